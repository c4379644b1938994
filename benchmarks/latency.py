"""Measure one user's speed by the distance to the verifier, with and without a draft on the device.

The verifier has one core and the device another; a TCP proxy delays every byte between them. Both ways generate the
same prompts, greedily and at temperature 0.8. `undrafted` and `drafted` are tokens per second from a text's first token
on, in the median of the texts; `speed_up` is the median of each text's own ratio. `degenerate` counts texts that end in
a loop, which any draft predicts. `first_token_ms` is the drafted user's time from the request to its first token, in
which the verifier reads the prompt.

`--http` adds a row measured through `outrider-edge serve`, with streamed completions, beside the verifier. With
`--context N` there is a row for prompts behind N tokens of other prompts, which the verifier has read when it is
measured. `--step-ms N` throttles the target to N milliseconds a step, as a large one takes.

Caveat: device and verifier are cores of one CPU, so that a draft token costs more beside a step than it usually does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.support import harness
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.throttled_verifier import environment
from benchmarks.support.users import GREEDY, SAMPLED, Played, Text, Users, play
from coordinator.cluster import Cluster
from outrider.core.errors import Unavailable

SAMPLINGS = {"greedy": GREEDY, "T=0.8": SAMPLED}


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    rtts_ms: tuple[float, ...] = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0)
    prompts: int = 24
    tokens: int = 96


QUICK = Setting(rtts_ms=(0.0, 50.0), prompts=3, tokens=32)


@dataclass(frozen=True)
class Bench:
    """Measures rows of the table at one verifier."""

    cluster: Cluster
    setting: Setting
    core: int
    """The CPU of the devices."""

    async def row(self, sampling: str, prompts: Sequence[Sequence[int]], rtt_ms: float) -> dict[str, Any]:
        """Return the row of one distance."""
        undrafted, drafted = [await self._play(sampling, prompts, rtt_ms, draft) for draft in (None, "auto")]
        return compared(rtt_ms, sampling, undrafted, drafted)

    async def _play(self, sampling: str, prompts: Sequence[Sequence[int]], rtt_ms: float, draft: str | None) -> Played:
        users = Users(
            coordinator=self.cluster.address,
            verifier=self.cluster.verifiers[0].address,
            prompts=prompts,
            draft=draft,
            rtt_ms=rtt_ms,
            options=SAMPLINGS[sampling] | {"max_tokens": self.setting.tokens},
        )
        return await play(users, [self.core])


def compared(rtt_ms: float, sampling: str, undrafted: Played, drafted: Played) -> dict[str, Any]:
    """Return a row of the table."""
    rates = {one.prompt: one.rate for one in undrafted.texts}
    evaluated = sum(one.evaluated for one in drafted.texts)
    return {
        "rtt_ms": rtt_ms,
        "sampling": sampling,
        "texts": len(drafted.texts),
        "degenerate": drafted.degenerate,
        "undrafted": rounded(undrafted.rate, 1),
        "drafted": rounded(drafted.rate, 1),
        "speed_up": rounded(statistics.median(one.rate / rates[one.prompt] for one in drafted.texts)),
        "acceptance_length": rounded(drafted.acceptance_length),
        "accepted": rounded(sum(one.accepted for one in drafted.texts) / evaluated) if evaluated else None,
        "first_token_ms": rounded(drafted.first_token_ms, 1),
        "texts_unlike_undrafted": drafted.differing(undrafted),
    }


@contextlib.asynccontextmanager
async def http_server(cluster: Cluster, draft: str) -> AsyncIterator[str]:
    """Run `outrider-edge serve` on this process's core, and yield its URL. Raises Unavailable."""
    command = ("-m", "edge_agent.cli", "serve", "--coordinator", cluster.address, "--draft", draft)
    options = ("--listen", "127.0.0.1:0", "--log-level", "WARNING")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, stdout=asyncio.subprocess.PIPE, cwd=harness.ROOT
    )
    try:
        line = await process.stdout.readline() if process.stdout is not None else b""
        found = re.search(r"http://\S+/", line.decode())
        if found is None:
            raise Unavailable(f"outrider-edge serve did not start: {line!r}")
        yield found[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def http_text(web: httpx.AsyncClient, number: int, prompt: Sequence[int], options: dict[str, Any]) -> Text:
    """Generate one text through the HTTP server. Raises Unavailable."""
    body = {"prompt": prompt, "stream": True, "provenance": True, **options}
    begun, delivered, tokens, counts = time.monotonic(), list[float](), list[int](), dict[str, Any]()
    async with web.stream("POST", "v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            content = json.loads(line.removeprefix("data: "))
            if "error" in content:
                raise Unavailable(content["error"]["message"])
            for choice in content["choices"]:
                told = choice.get("outrider", {})
                ids = [token["id"] for token in told.get("tokens", ())]
                delivered += [time.monotonic()] * len(ids)
                tokens += ids
                counts = told.get("statistics", counts)
    steps, evaluated, accepted = (counts[name] for name in ("steps", "evaluated", "accepted"))
    return Text(0, number, tuple(tokens), begun, tuple(delivered), steps, evaluated, accepted)


async def http_row(bench: Bench, sampling: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a row that is measured through the HTTP server beside the verifier."""
    played = []
    options = SAMPLINGS[sampling] | {"max_tokens": bench.setting.tokens}
    for draft in ("none", "auto"):
        async with (
            http_server(bench.cluster, draft) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as web,
        ):
            await http_text(web, 0, prompts[0], options)
            texts = [await http_text(web, number, prompt, options) for number, prompt in enumerate(prompts[1:])]
        played.append(Played(tuple(texts), 0.0))
    return {"over": "HTTP"} | compared(0.0, sampling, *played)


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    setting = QUICK if options.quick else Setting()
    prompts = list(harness.prompts(options, pair, 1 + setting.prompts).values())
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        say(row)
        rows.append(row)

    _, core = harness.cores()
    throttle = environment(options.step_ms) if options.step_ms else None
    # Without a context, a prompt is read anew by each request, so that all first tokens cost the same.
    async with harness.one_verifier(pair, prefix_cache=bool(options.context), throttle=throttle) as cluster:
        bench = Bench(cluster, setting, core)
        for sampling in SAMPLINGS:
            for rtt_ms in setting.rtts_ms:
                add(await bench.row(sampling, prompts, rtt_ms))
            if options.http:
                add(await http_row(bench, sampling, prompts))
            for context in options.context or ():
                text = harness.running_text(options, pair, context)
                long = [[*text, *prompt] for prompt in prompts[:5]]
                add({"context": context} | await bench.row(sampling, long, 0.0))
    throttled = f", throttled to {options.step_ms:g} ms a step" if options.step_ms else ""
    size = f"One user, {setting.prompts} prompts, at most {setting.tokens} tokens each, target on one core"
    harness.finish(options, f"{size}{throttled}.", rows)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("latency", __doc__)
    parser.add_argument("--http", action="store_true", help="measure through the HTTP server, too")
    parser.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="measure behind long contexts, too")
    parser.add_argument("--step-ms", type=float, default=0.0, help="throttle the target to this step time")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
