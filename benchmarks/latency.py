"""Measure one user's speed by the distance to the verifier, with drafts and without.

The verifier has one core and the device another; every byte between them is delayed. The same prompts are run in both
ways in turn, greedily and at temperature 0.8, as by `outrider bench`; `rows` in `edge_agent/bench/report.py` explains
the columns. Without drafts the verifier drafts nothing, either. The time to the first token includes the reading of the
prompt. `degenerate` counts texts that end in a loop, which any draft predicts.

`--http` adds rows measured through `outrider-edge serve`, with streamed completions, beside the verifier. With
`--context N` there are rows for prompts behind N tokens of other prompts, which the verifier has read when they are
measured. `--step-ms N` throttles the target to N milliseconds a step, as a large one takes.

`--short` measures answers of 40 to 150 tokens instead, whole requests, each session a new one: `adaptive`, with the
speculation length that the coordinator decides, `fixed`, with the best of lengths that never change, and `realised`,
(adaptive - 1) / (fixed - 1). The first ten answers are a coordinator's first ever, later ones begin with what those
taught. `slower` counts answers that took 3% longer than without drafts.

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
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.support import harness
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.throttled_verifier import environment
from coordinator.cluster import Cluster
from edge_agent.bench.measure import Configuration, Plan, run_plan
from edge_agent.bench.report import rows
from edge_agent.bench.users import GREEDY, SAMPLED, PromptInput, Run, Text, Users, devices
from outrider.core.errors import Unavailable

SAMPLINGS = {"greedy": GREEDY, "T=0.8": SAMPLED}


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    rtts_ms: tuple[float, ...] = (0.0, 50.0)
    prompts: int = 40
    tokens: int = 48
    short: int = 26
    """Prompts of `--short`."""
    fixed: tuple[int, ...] = (2, 4, 8)
    """Speculation lengths that never change."""

    @property
    def ways(self) -> dict[str, int | None]:
        """Return the names of adaptive and fixed lengths, with the length if it is fixed."""
        return {ADAPTIVE: None} | {f"fixed {length}": length for length in self.fixed}


QUICK = Setting(rtts_ms=(0.0, 50.0), prompts=4, tokens=48, short=2, fixed=(4,))
ADAPTIVE = "adaptive"
SHORTEST, LONGEST = 40, 150
"""Tokens of a short answer, unless it ends before."""
SHORT_RTTS_MS = (0.0, 50.0)
FIRST = 10
"""Answers to which a coordinator knows nothing of earlier ones, or little."""
LEAST = 0.97
"""Speed over that without drafts below which an answer counts as slower."""


@contextlib.asynccontextmanager
async def http_server(cluster: Cluster) -> AsyncIterator[str]:
    """Run `outrider-edge serve` on this process's core, and yield its URL. Raises Unavailable."""
    command = ("-m", "edge_agent.cli", "serve", "--coordinator", cluster.address)
    options = ("--listen", "127.0.0.1:0")
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


async def http_text(web: httpx.AsyncClient, number: int, prompt: PromptInput, options: dict[str, Any]) -> Text:
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


async def over_http(cluster: Cluster, prompts: Sequence[PromptInput], options: dict[str, Any]) -> Configuration:
    """Return what was measured through the HTTP server beside the verifier; the first prompt warms up."""
    configuration = Configuration(0.0, 1)
    async with http_server(cluster) as url, httpx.AsyncClient(base_url=url, timeout=None) as web:
        await http_text(web, 0, prompts[0], options)
        for number, prompt in enumerate(prompts[1:]):
            for speculation, runs in ((False, configuration.undrafted), (True, configuration.drafted)):
                text = await http_text(web, number, prompt, options | {"speculation": speculation})
                runs.append(Run((text,), 0.0))
    return configuration


async def fresh_sessions(
    pair: Pair, setting: Setting, prompts: Sequence[PromptInput], rtt_ms: float, sampling: dict[str, Any]
) -> dict[str, list[float]]:
    """Return how many times as fast each answer came as without drafts, by how its speculation length was set."""
    cores = harness.cores()
    async with contextlib.AsyncExitStack() as stack:
        running = {
            way: await stack.enter_async_context(_site(pair, length, *cores)) for way, length in setting.ways.items()
        }
        users = {
            way: (Users({"coordinator": cluster.address}, (), draft="auto", rtt_ms=rtt_ms, warm=0), one)
            for way, cluster in running.items()
            for one in [await stack.enter_async_context(devices(1, cores[1:]))]
        }

        async def seconds(way: str, prompt: PromptInput, tokens: int, *, drafts: bool = True) -> float:
            asked, one = users[way]
            options = sampling | {"max_tokens": tokens, "speculation": drafts}
            return (await one.run(replace(asked, prompts=[prompt], options=options))).texts[0].seconds

        for way in users:  # loads the draft, and teaches nothing of it
            await seconds(way, prompts[0], 16, drafts=False)
        found: dict[str, list[float]] = {way: [] for way in users}
        for number, prompt in enumerate(prompts[1:]):
            tokens = SHORTEST + 37 * number % (LONGEST - SHORTEST)
            taken: dict[str, float] = {}
            for way in harness.rotated(["", *users], number):
                taken[way] = await seconds(way or ADAPTIVE, prompt, tokens, drafts=bool(way))
            for way in users:
                found[way].append(taken[""] / taken[way])
            say(f"{rtt_ms:g} ms, {tokens} tokens: " + ", ".join(f"{way} {found[way][-1]:.2f}x" for way in users))
    return found


@contextlib.asynccontextmanager
async def _site(pair: Pair, length: int | None, verifier_core: int, device_core: int) -> AsyncIterator[Cluster]:
    """Run a cluster whose coordinator decides the speculation length, or one in which it is `length` for good."""
    engine: dict[str, Any] = {"prefix_cache": False}
    if length is not None:
        engine["nodes_per_step"] = length
    control = ("--no-window-control",) if length is not None else ()
    models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
    async with harness.cluster(prefix_cache=False) as cluster:
        await cluster.start_coordinator(*harness.LOOPBACK, *control, cores=[device_core])
        await cluster.start_verifier(*models, "--engine-args", json.dumps(engine), cores=[verifier_core])
        yield cluster


async def measure_short(options: argparse.Namespace) -> None:
    pair, setting = Pair.of(options), QUICK if options.quick else Setting()
    prompts = list(harness.prompts(options, pair, 1 + setting.short).values())
    table: list[dict[str, Any]] = []
    for name, sampling in SAMPLINGS.items():
        for rtt_ms in SHORT_RTTS_MS:
            found = await fresh_sessions(pair, setting, prompts, rtt_ms, sampling)
            for answers, part in (("first ten", slice(FIRST)), ("later", slice(FIRST, None))):
                speeds = {way: statistics.median(ratios[part]) for way, ratios in found.items() if ratios[part]}
                if not speeds:
                    continue
                adaptive = speeds.pop(ADAPTIVE)
                best = max(speeds, key=lambda way: speeds[way])
                table.append(
                    {"sampling": name, "rtt_ms": rtt_ms, "answers": answers, "adaptive": rounded(adaptive)}
                    | {way: rounded(speed) for way, speed in speeds.items()}
                    | {"best": best, "realised": rounded((adaptive - 1.0) / max(0.01, speeds[best] - 1.0))}
                    | {"slower": sum(ratio < LEAST for ratio in found[ADAPTIVE][part])}
                )
    size = f"One user, {setting.short} prompts, {SHORTEST} to {LONGEST} tokens each, target on one core."
    harness.finish(options, size, table)


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    setting = QUICK if options.quick else Setting()
    prompts = list(harness.prompts(options, pair, 1 + setting.prompts).values())
    table: list[dict[str, Any]] = []
    _, core = harness.cores()
    throttle = environment(options.step_ms) if options.step_ms else None
    # Without a context, a prompt is read anew by each request, so that all first tokens cost the same.
    async with harness.one_verifier(pair, prefix_cache=bool(options.context), throttle=throttle) as cluster:
        for name, sampling in SAMPLINGS.items():
            requests = sampling | {"max_tokens": setting.tokens}

            async def measured(
                prompts: Sequence[PromptInput], rtts_ms: Sequence[float], requests: dict[str, Any] = requests
            ) -> list[Configuration]:
                common = Users({"coordinator": cluster.address}, prompts, draft="auto", options=requests)
                found: list[Configuration] = []
                await run_plan(Plan(common, (1,), rtts_ms, [core], pinned=True), found, say)
                return found

            table += [{"sampling": name} | row for row in rows(await measured(prompts, setting.rtts_ms))]
            if options.http:
                configuration = await over_http(cluster, prompts, requests)
                table += [{"sampling": name, "over": "HTTP"} | row for row in rows([configuration])]
            for context in options.context or ():
                text = harness.running_text(options, pair, context)
                found = await measured([[*text, *prompt] for prompt in prompts[:5]], [0.0])
                table += [{"sampling": name, "context": context} | row for row in rows(found)]
    throttled = f", throttled to {options.step_ms:g} ms a step" if options.step_ms else ""
    size = f"One user, {setting.prompts} prompts, at most {setting.tokens} tokens each, target on one core"
    harness.finish(options, f"{size}{throttled}.", table)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("latency", __doc__)
    parser.add_argument("--http", action="store_true", help="measure through the HTTP server, too")
    parser.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="measure behind long contexts, too")
    parser.add_argument("--step-ms", type=float, default=0.0, help="throttle the target to this step time")
    parser.add_argument("--short", action="store_true", help="measure short answers of new sessions instead")
    options = parser.parse_args(argv)
    harness.main(lambda: measure_short(options) if options.short else measure(options))


if __name__ == "__main__":
    main()
