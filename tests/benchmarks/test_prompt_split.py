"""Test that held-out prompts copy nothing that a model learns from, and that a copy would be found."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.support import harness, questions
from benchmarks.support.harness import Prompt

GRAM, RUN = 8, 20
"""Tokens of a gram, and of the longest allowed stretch of text all of whose grams stand somewhere else."""
DEVICES, ASKED = 8, 1_000
"""Devices of `distill`, each of which asks its own questions, and how many of each are looked at."""
NOT_LEARNT = {"site-packages", "dist-packages", "test", "tests"}

Copied = Callable[[str, str], int]


@pytest.fixture(scope="module")
def longest_copied() -> Copied:
    """Return a function: the tokens of the longest stretch of a text all of whose grams stand in another text.

    Stretches shorter than RUN are not measured and count as 0.
    """
    pair = harness.Pair.in_folder(harness.ROOT / "models")
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))

    def longest(text: str, other: str) -> int:
        places = tokenizer.encode(text, add_special_tokens=False).offsets
        count, best = len(places) - GRAM + 1, 0

        def stands(gram: int) -> bool:
            return 0 <= gram < count and text[places[gram][0] : places[gram + GRAM - 1][1]] in other

        step = RUN - GRAM + 1  # of so many neighbouring grams a stretch of RUN has every one, so one of these
        for middle in range(0, count, step):
            if stands(middle):
                first = last = middle
                while stands(first - 1):
                    first -= 1
                while stands(last + 1):
                    last += 1
                best = max(best, last - first + GRAM)
        return best if best >= RUN else 0

    return longest


@pytest.fixture(scope="module")
def library() -> str:
    """Return the code of the standard library, from which the models learn and devices of `distill` ask."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not NOT_LEARNT & {*path.relative_to(root).parts})
    return "\0".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def heldout(*kinds: str) -> list[Prompt]:
    prompts = [*harness.prompts("heldout"), *harness.prompts("quoting")]
    return [prompt for prompt in prompts if prompt.kind in kinds]


def text_of(prompt: Prompt) -> str:
    return prompt.text or "\n".join(message["content"] for message in prompt.messages)


def test_no_held_out_code_is_copied_from_what_models_learn(longest_copied: Copied, library: str) -> None:
    copied = {prompt.id: longest_copied(text_of(prompt), library) for prompt in heldout("code", "quoting")}
    assert {name: tokens for name, tokens in copied.items() if tokens} == {}


def test_no_held_out_question_is_one_that_devices_ask(longest_copied: Copied) -> None:
    asked = "\0".join(one for seed in range(DEVICES) for one in questions.arithmetic(ASKED, seed=seed))
    copied = {prompt.id: longest_copied(text_of(prompt), asked) for prompt in heldout("arithmetic", "chat")}
    assert {name: tokens for name, tokens in copied.items() if tokens} == {}


def test_no_held_out_prompt_is_copied_from_one_for_tuning(longest_copied: Copied) -> None:
    tuning = "\0".join(map(text_of, harness.prompts("tuning")))
    prompts = heldout("code", "arithmetic", "chat", "quoting")
    assert len(prompts) == len(harness.prompts("heldout")) + len(harness.prompts("quoting"))
    copied = {prompt.id: longest_copied(text_of(prompt), tuning) for prompt in prompts}
    assert {name: tokens for name, tokens in copied.items() if tokens} == {}


def test_no_code_for_tuning_is_copied_from_what_drafts_learn(longest_copied: Copied, library: str) -> None:
    """distill_losses measures drafts on it."""
    code = [prompt for prompt in harness.prompts("tuning") if prompt.kind == "code"]
    copied = {prompt.id: longest_copied(text_of(prompt), library) for prompt in code}
    assert {name: tokens for name, tokens in copied.items() if tokens} == {}


def test_a_copy_is_found_wherever_it_stands(longest_copied: Copied, library: str) -> None:
    where = library.index("def escape(s, quote=True):")
    for begin in range(where, where + 40, 10):
        copy = library[begin : begin + 120]
        assert longest_copied(f"class Something:\n    x = {begin}\n\n{copy}", library) >= RUN
    assert longest_copied("def initials(name):\n    return '.'.join(word[0] for word in name.split())\n", library) == 0
