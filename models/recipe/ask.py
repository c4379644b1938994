"""Ask a running cluster questions, so that it records what the target answers.

Most of the questions are the target's own: it writes what a user would ask after the prefix of its chat template, as
in Magpie (arXiv 2406.08464). The others are GSM8K's training questions and tasks of code. Nothing drafts meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.sdk.types import Options
from outrider.core.addresses import DEFAULT_COORDINATOR
from outrider.core.errors import OutriderError

AT_ONCE = 32
TOKENS = 400
"""Most tokens of an answer."""
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)
_VERBS = (
    *(
        "returns the sum of",
        "returns the largest of",
        "returns the smallest of",
        "sorts",
        "reverses",
        "removes duplicates from",
    ),
    *(
        "counts the duplicates in",
        "computes the average of",
        "computes the median of",
        "prints every second element of",
    ),
    *("checks for negative values in", "doubles every element of", "returns the running total of", "shuffles"),
    *("finds the second largest element of", "rotates by k places", "returns the index of the maximum of"),
)
_OBJECTS = (
    *("a list of integers", "a list of floats", "a tuple of numbers", "a nested list of numbers"),
    *("the values of a dictionary", "the columns of a CSV file", "the numbers in a text file"),
)
_OTHERS = (
    *("checks whether a string is a palindrome", "checks whether a number is prime", "multiplies two matrices"),
    *("finds the greatest common divisor of two numbers", "implements binary search", "implements merge sort"),
    *("implements quicksort", "implements a stack class", "implements a queue with two stacks", "inverts a dictionary"),
    *("reads a JSON file and prints its keys", "downloads a page and counts its words", "flattens a nested list"),
    *("walks a directory and sums file sizes", "merges two dictionaries", "transposes a matrix"),
    *("formats a number with thousands separators", "converts a Roman numeral to an integer"),
    *("encodes a string with run-length encoding", "implements a simple LRU cache", "generates a random password"),
    *("retries a function with exponential backoff", "measures how long a function takes"),
    "groups words by their first letter",
)
CODE = [
    f"Write a Python function that {one}." for one in (*map(" ".join, itertools.product(_VERBS, _OBJECTS)), *_OTHERS)
]


class Questioner:
    """Chooses questions and asks them, each in a traffic class of its kind."""

    def __init__(self, client: AsyncClient, tokenizer: PreTrainedTokenizerBase, maths: list[str], seed: int) -> None:
        """Take the target's tokenizer, whose template begins the questions that the target writes."""
        self._client, self._maths, self._chance = client, maths, random.Random(seed)
        mark = "\x00"
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        prefix, _, self._end = str(rendered).partition(mark)
        self._prefix: list[int] = tokenizer.encode(prefix, add_special_tokens=False)
        self.answers = self.tokens = 0

    async def ask(self) -> None:
        """Ask one question."""
        kind = self._chance.choices(("chat", "maths", "code"), (0.6, 0.25, 0.15))[0]
        question = {"chat": None, "maths": self._chance.choice(self._maths), "code": self._chance.choice(CODE)}[kind]
        if question is None:
            options: Options = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 120, "speculation": False}
            written = await self._client.generate(self._prefix, **options)
            question = written.text.strip()
            if written.finish_reason != "stop" or not question:
                return
        options = {"temperature": self._chance.choice(TEMPERATURES), "max_tokens": TOKENS, "speculation": False}
        options["traffic_class"] = kind
        answer = await self._client.chat([{"role": "user", "content": question}], **options)
        self.answers, self.tokens = self.answers + 1, self.tokens + len(answer.token_ids)


async def run(options: argparse.Namespace) -> None:
    """Ask until the minutes are over, `AT_ONCE` questions at a time."""
    lines = options.gsm8k.read_text(encoding="utf-8").splitlines()
    maths = [json.loads(line)["question"] for line in lines]
    until = time.monotonic() + 60 * options.minutes
    async with AsyncClient(settings=EdgeSettings(coordinator=options.coordinator)) as client:
        questioner = Questioner(client, AutoTokenizer.from_pretrained(options.target), maths, options.seed)

        async def user() -> None:
            while time.monotonic() < until:
                try:
                    await questioner.ask()
                except OutriderError as error:
                    print(f"not answered: {error}", flush=True)
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(user() for _ in range(AT_ONCE)))
    print(f"{questioner.answers} answers, {questioner.tokens} tokens")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m models.recipe.ask", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="its folder")
    parser.add_argument("--gsm8k", type=Path, required=True, help="gsm8k_train.jsonl of openai/grade-school-math")
    parser.add_argument("--coordinator", default=DEFAULT_COORDINATOR, help="address [default: %(default)s]")
    parser.add_argument("--minutes", type=float, default=60.0, help="[default: %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions [default: %(default)s]")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
