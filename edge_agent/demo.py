"""Run the device's side of `outrider demo`: show text as it is made, then compare it with plain streaming.

Every request is made twice, with the draft and as plain streaming of the same service, on loopback and behind an
emulated round trip. Both outputs must be identical, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.bench.delay import delayed
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options
from edge_agent.target.detokenizer import Detokenizer
from outrider.core.errors import OutriderError
from outrider.core.text import table

TOKENS, QUICK_TOKENS = 120, 48
GREEDY = Options(max_tokens=TOKENS, temperature=0.0)
# The small target repeats itself when it continues code greedily; a penalty, which speculation keeps, prevents it.
PENALISED = Options(max_tokens=TOKENS, temperature=0.0, frequency_penalty=1.0)
SAMPLED = Options(max_tokens=TOKENS, temperature=0.8, top_p=0.95, seed=20_260_731)
SAMPLED_CODE = Options(max_tokens=TOKENS, temperature=0.6, frequency_penalty=0.3, seed=7)

Marks = tuple[str, str]
"""Texts to print before and after tokens of the draft."""
DemoRequest = tuple[str, str, Options]
"""(name, prompt, options)"""

REQUESTS: Sequence[DemoRequest] = (
    ("arithmetic, greedy", "Question: A farm has 12 cows and 30 hens. How many legs do they have?\nAnswer:", GREEDY),
    (
        "code, greedy",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        PENALISED,
    ),
    (
        "arithmetic, sampled",
        "Question: A box holds 8 pens. A school buys 25 boxes and hands out 120 pens. How many pens are left?\nAnswer:",
        SAMPLED,
    ),
    (
        "code, sampled",
        'def load(path):\n    """Load a file and return its contents."""\n    with open(path) as file:\n',
        SAMPLED_CODE,
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One request that was made over one link twice, with the draft and as plain streaming."""

    link: str
    name: str
    drafted: Completion
    streamed: Completion

    @property
    def identical(self) -> bool:
        return self.drafted.token_ids == self.streamed.token_ids

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table with `COLUMNS`."""
        drafted, streamed = self.drafted.statistics, self.streamed.statistics
        tokens = max(1, drafted.tokens)
        speedup = drafted.tokens_per_s / streamed.tokens_per_s if streamed.tokens_per_s else 0.0
        return (
            self.link,
            self.name,
            str(drafted.tokens),
            str(drafted.steps),
            f"{drafted.tokens_per_step:.2f}",
            f"{drafted.tokens_per_s:.0f}",
            f"{streamed.tokens_per_s:.0f}",
            f"{speedup:.2f}x",
            f"{drafted.bytes_up / tokens:.0f} up, {drafted.bytes_down / tokens:.0f} down",
            "yes" if self.identical else "NO",
        )


COLUMNS = (
    *("LINK", "REQUEST", "TOKENS", "STEPS", "PER STEP"),
    *("TOKENS/S", "STREAMING", "SPEED-UP", "BYTES/TOKEN", "IDENTICAL"),
)
"""STREAMING: tokens/s of the same request without a draft. BYTES/TOKEN: payload up and down."""


async def show(client: AsyncClient, request: DemoRequest, marks: Marks) -> Completion:
    """Print the text as the verifier commits it, with the draft's tokens between the marks."""
    (name, prompt, options), (begin, end) = request, marks
    tokenizer = (await client.prepare()).tokenizer
    detokenizer = Detokenizer(tokenizer.table, tokenizer.special)
    print(f"\n--- {name}\n{prompt}", end="", flush=True)
    stream = await client.stream(prompt, **options)
    async for chunk in stream:
        tokens = zip(chunk.drafted, chunk.token_ids, strict=True)
        for drafted, run in itertools.groupby(tokens, key=lambda token: token[0]):
            text = "".join(detokenizer.feed(token) for _, token in run)
            print(f"{begin}{text}{end}" if drafted and text else text, end="", flush=True)
    print(detokenizer.flush())
    return stream.completion


async def compare(
    link: str, coordinator: str, reroute: dict[str, str], requests: Sequence[DemoRequest], marks: Marks | None
) -> list[Comparison]:
    """Make every request with and without the draft; print the texts if there are marks for the draft's tokens."""
    found = []
    async with (
        AsyncClient(coordinator=coordinator, reroute=reroute) as drafting,
        AsyncClient(coordinator=coordinator, reroute=reroute, draft=None) as streaming,
    ):
        for client in (drafting, streaming):
            await client.generate("def main():\n", max_tokens=24)  # so that the table holds no first-time work
        for request in requests:
            name, prompt, options = request
            streamed = await streaming.generate(prompt, **options)
            drafted = await (show(drafting, request, marks) if marks else drafting.generate(prompt, **options))
            found.append(Comparison(link, name, drafted, streamed))
    return found


def overall(found: Sequence[Comparison]) -> str:
    """Return one line per link: all its tokens over all its seconds."""
    lines = []
    for link in dict.fromkeys(one.link for one in found):
        chosen = [one for one in found if one.link == link]
        drafted, streamed = (
            sum(s.tokens for s in side) / max(1e-9, sum(s.last_token_s or 0.0 for s in side))
            for side in ([c.drafted.statistics for c in chosen], [c.streamed.statistics for c in chosen])
        )
        steps = sum(one.drafted.statistics.steps for one in chosen)
        per_step = sum(one.drafted.statistics.tokens for one in chosen) / max(1, steps)
        lines.append(
            f"{link}: {drafted:.0f} tokens/s against {streamed:.0f} by plain streaming, {drafted / streamed:.2f}x"
            f" (time to the first token included); {per_step:.2f} tokens per verification step"
        )
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> int:
    """Make the requests, print texts and table, and return the exit status."""
    requests = REQUESTS
    if options.quick:
        requests = [(name, prompt, o | Options(max_tokens=QUICK_TOKENS)) for name, prompt, o in REQUESTS[:2]]
    marks, name = ("[", "]"), "in brackets"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        marks, name = ("\x1b[32m", "\x1b[0m"), "in green"
    print(
        f"What to look at: tokens {marks[0]}{name}{marks[1]} are the draft's, accepted by the target; the table "
        "compares with plain streaming of the same service; both outputs must be identical."
    )
    found = await compare("loopback", options.coordinator, {}, requests, marks)
    async with delayed(options.verifier, options.rtt_ms) as address:
        reroute = {options.verifier: address}
        found += await compare(f"RTT {options.rtt_ms:.0f} ms", options.coordinator, reroute, requests, None)
    print(f"\n{table(COLUMNS, [one.cells() for one in found])}\n\n{overall(found)}")
    different = sum(not one.identical for one in found)
    if different:
        print(f"\n{different} of {len(found)} outputs differ from plain streaming: that is a defect", file=sys.stderr)
        return 1
    print(f"\nall {len(found)} outputs are identical to plain streaming")
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m edge_agent.demo", description=__doc__)
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--verifier", required=True, help="HOST:PORT of the verifier, for the emulated link")
    parser.add_argument("--rtt-ms", type=float, default=30.0, help="round trip of the emulated link [default: 30]")
    parser.add_argument("--quick", action="store_true", help="make two requests of 48 tokens")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        raise SystemExit(asyncio.run(run(parser.parse_args(arguments))))
    except OutriderError as error:
        print(f"outrider demo: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
