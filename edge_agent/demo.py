"""Run the device's side of `outrider demo`: answer questions with a draft, and compare with no speculation.

Each question is asked four times: near the verifier and behind an emulated round trip, with the draft and without. With
`--kill` a text is asked for twice instead, and the verifier that serves it the second time is killed in its
midst. All answers to a question must be identical, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from edge_agent.bench.delay import DelayedAddresses
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Completion, Options
from edge_agent.target.detokenizer import Detokenizer
from outrider.core.errors import OutriderError

QUESTIONS = (
    "What is gravity?",
    "Write a Python function that checks whether a word is a palindrome.",
    "Give me three tips for better sleep.",
)
TALE = "Tell me a long story about a lighthouse keeper and a whale."
DRAFTED = Options(max_tokens=160, temperature=0.0)
UNDRAFTED = DRAFTED | Options(speculation=False)

Marks = tuple[str, str]
"""Texts to print before and after tokens of the draft."""


def asking(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


async def shown(
    client: AsyncClient,
    question: str,
    marks: Marks,
    seen: Callable[[CompletionStream], object] = lambda _: None,
) -> Completion:
    """Print the answer as the verifier commits it, with the draft's tokens between the marks.

    seen: called with the stream after each of its chunks.
    """
    begin, end = marks
    tokenizer = (await client.prepare()).tokenizer
    detokenizer = Detokenizer(tokenizer.table, tokenizer.special)
    stream = await client.stream_chat(asking(question), **DRAFTED)
    async for chunk in stream:
        tokens = zip(chunk.drafted, chunk.token_ids, strict=True)
        for drafted, run in itertools.groupby(tokens, key=lambda token: token[0]):
            text = "".join(detokenizer.feed(token) for _, token in run)
            print(f"{begin}{text}{end}" if drafted and text else text, end="", flush=True)
        seen(stream)
    print()
    return stream.completion


def compared(drafted: Completion, undrafted: Completion) -> str:
    """Return what the draft gained, in a line."""
    fast, slow = drafted.statistics, undrafted.statistics
    return (
        f"acceptance length {fast.tokens_per_step:.2f}, speed-up over no speculation "
        f"{fast.tokens_per_s / max(1e-9, slow.tokens_per_s):.2f} "
        f"({fast.tokens_per_s:.0f} against {slow.tokens_per_s:.0f} tokens/s), "
        f"identical: {'yes' if drafted.token_ids == undrafted.token_ids else 'NO'}"
    )


def marking() -> tuple[Marks, str]:
    """Return the marks that suit the terminal, and what they look like."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return ("\x1b[4;32m", "\x1b[0m"), "underlined"
    return ("[", "]"), "in brackets"


async def run(coordinator: str, rtt_ms: float) -> int:
    """Ask the questions, print answers and comparisons, and return the exit status."""
    (marks, how), different = marking(), 0
    async with (
        DelayedAddresses(rtt_ms) as addresses,
        AsyncClient(coordinator=coordinator) as near,
        AsyncClient(coordinator=coordinator, reroute=addresses) as far,
    ):
        for client in (near, far):
            await client.chat(asking("Hello!"), max_tokens=8)  # first-time work
        print(f"Tokens {marks[0]}{how}{marks[1]} are the draft's, accepted by the target.")
        for question in QUESTIONS:
            print(f"\n> {question}")
            answer = await shown(near, question, marks)
            print("  near: ", end="", flush=True)
            answers = [answer, await near.chat(asking(question), **UNDRAFTED)]
            print(compared(*answers), end=f"\n  at {rtt_ms:.0f} ms: ", flush=True)
            answers += [await far.chat(asking(question), **options) for options in (DRAFTED, UNDRAFTED)]
            print(compared(*answers[2:]))
            different += any(other.token_ids != answer.token_ids for other in answers)
    if different:
        print(f"\n{different} of {len(QUESTIONS)} answers differ: that is a defect", file=sys.stderr)
    return int(different > 0)


async def outlived(client: AsyncClient, kill: Callable[[str], object]) -> int:
    """Ask for a text twice, and the second time kill the verifier that serves it, halfway. Return the exit status.

    kill: called with the verifier's address.
    """
    undisturbed = await client.chat(asking(TALE), **DRAFTED)
    killed, last, pause_s = "", time.monotonic(), 0.0

    def seen(stream: CompletionStream) -> None:
        nonlocal killed, last, pause_s
        now, figures = time.monotonic(), stream.statistics
        pause_s = max(pause_s, now - last) if killed else 0.0
        last = now
        if not killed and 2 * figures.tokens >= len(undisturbed.token_ids):
            killed = figures.address
            print("(kill -9)", end="", flush=True)
            kill(killed)

    print(f"\n> {TALE}")
    answer = await shown(client, TALE, marking()[0], seen)
    identical = answer.token_ids == undisturbed.token_ids
    print(
        f"  verifier {killed} was killed (kill -9), {answer.statistics.address} went on: pause {pause_s:.2f} s, "
        f"identical: {'yes' if identical else 'NO'}"
    )
    return int(not identical)


async def run_killing(coordinator: str, verifiers: Sequence[str]) -> int:
    """Show that a text outlives its verifier, and return the exit status. verifiers: ADDRESS=PID of each."""
    groups = {address: int(pid) for address, _, pid in (one.rpartition("=") for one in verifiers)}
    async with AsyncClient(coordinator=coordinator) as client:
        return await outlived(client, lambda address: os.killpg(groups[address], signal.SIGKILL))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m edge_agent.demo", description=__doc__)
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="round trip of the emulated link [default: 50]")
    text = "verifiers by their address and process group; the one that serves the text is killed"
    parser.add_argument("--kill", nargs="+", metavar="ADDRESS=PID", help=text)
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        work = run_killing(options.coordinator, options.kill) if options.kill else None
        raise SystemExit(asyncio.run(work or run(options.coordinator, options.rtt_ms)))
    except OutriderError as error:
        print(f"outrider demo: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
