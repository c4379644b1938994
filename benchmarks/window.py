"""Adaptive windows against plain streaming: by distance, draft, sessions at once and verifier.

A coordinator, a verifier and recorded devices (benchmarks.swarm) behind an emulated link. `streaming` runs no drafter.
`adaptive` is the product as it comes: devices draft, the coordinator steers. Both play the same prompts on the same
verifier in turn; a session's ratio is its speed, from request to last token, over that of the same prompt streamed in
the same round. A cell's figure is the median of these ratios with a bootstrapped 95% interval over prompts.

Then a line whose round trip turns from 5 to 300 ms and back in mid-session: what was delivered in the three seconds
after each turn, over the same by streaming on the same line.

PACED verifiers take at least `a + b n` ms for a pass over n rows, everything else as it is: a stand-in for the step
times of a larger model on an accelerator. A paced run is invalid where more than 2% of its passes took longer by
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import harness
from benchmarks.harness import Pair
from benchmarks.replay import Job, Outcome, Where
from benchmarks.swarm import Swarm, make_tape
from coordinator.cluster import Cluster
from edge_agent.completion import Options
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

RTTS_MS = (1.0, 20.0, 50.0, 100.0, 200.0)
OPTIONS: Mapping[str, Options] = {
    "T=0.8": Options(max_tokens=192, temperature=0.8, seed=20_260_731, ignore_eos=True),
}
OVERRAN = 0.02
SLOWER = 0.97
"""Of streaming: no cell's interval may end below it."""
DRAWS = 1_000
SINGLE = 8
"""Prompts where they are played one after the other."""


@dataclass(frozen=True)
class Machine:
    """A verifier, and how many sessions it has at once."""

    sessions: int
    pass_ms: float = 0.0
    """0: as fast as it can."""
    row_ms: float = 0.0

    def __str__(self) -> str:
        pace = f"PACED {self.pass_ms:g} + {self.row_ms:g} n ms" if self.pass_ms else "real CPU"
        return f"{pace}, {self.sessions} at once"

    @property
    def environment(self) -> dict[str, str]:
        names = {"OUTRIDER_VERIFIER_PACE_MS": self.pass_ms, "OUTRIDER_VERIFIER_PACE_ROW_MS": self.row_ms}
        return {name: str(value) for name, value in names.items()}


TURNING = Machine(1, 80.0, 0.05)
TURNS = ((1.5, 300.0), (4.5, 5.0))
"""Seconds since a session's begin -> ms of its round trip from then on; 5 at first."""
TURNED_S = 3.0
MACHINES = (Machine(1), Machine(8), Machine(1, 30.0, 0.05), Machine(8, 80.0, 0.05))
QUICK = {(Machine(1, 30.0, 0.05), 50.0), (Machine(8, 80.0, 0.05), 50.0), (Machine(1), 1.0), (Machine(8), 20.0)}


@dataclass
class Cell:
    """What both arms did, by round and prompt."""

    streaming: list[list[Outcome]] = field(default_factory=list)
    adaptive: list[list[Outcome]] = field(default_factory=list)
    windows: dict[str, coordinator_pb2.SessionWindow] = field(default_factory=dict)
    """The last decision about each session of the adaptive arm."""

    @property
    def ratios(self) -> dict[int, list[float]]:
        """Prompt -> adaptive over streaming, one for each round."""
        found: dict[int, list[float]] = {}
        for slow, fast in zip(self.streaming, self.adaptive, strict=True):
            for number, (a, b) in enumerate(zip(slow, fast, strict=True)):
                found.setdefault(number, []).append((b.tokens / b.seconds) / (a.tokens / a.seconds))
        return found

    def over(self, share: float, of: str) -> float:
        """A quantile over all sessions, adaptive over streaming. of: first_token_s, or gaps_ms between deliveries."""
        both = []
        for arm in (self.adaptive, self.streaming):
            values = [getattr(outcome, of) for outcomes in arm for outcome in outcomes]
            flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
            both.append(sorted(flat)[min(len(flat) - 1, int(share * len(flat)))])
        return float(both[0] / both[1])


def interval(ratios: Mapping[int, Sequence[float]]) -> tuple[float, float, float]:
    """Median of the prompts' medians, and its bootstrapped 95% interval over prompts."""
    each = [statistics.median(values) for values in ratios.values()]
    rng = random.Random(1)
    draws = sorted(statistics.median(rng.choices(each, k=len(each))) for _ in range(DRAWS))
    return statistics.median(each), draws[int(0.025 * DRAWS)], draws[int(0.975 * DRAWS)]


def delivered(outcome: Outcome, since_s: float, until_s: float) -> int:
    """Tokens that came between two moments, counted from the session's begin."""
    begin = outcome.delivered_s[0] - (outcome.first_token_s or 0.0)
    return sum(since_s <= at - begin < until_s for at in outcome.delivered_s)


async def play(swarm: Swarm, numbers: Iterable[int], at_once: int, drafted: bool) -> list[Outcome]:
    """Every recording once, so many at once; in the order of `numbers`. Raises RuntimeError where one fails."""
    seats = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with seats:
            return await swarm.play(Job(number, drafted=drafted))

    outcomes = await asyncio.gather(*(one(number) for number in numbers))
    if failed := [o.error or "not as recorded" for o in outcomes if o.error or o.wrong or not o.finished]:
        raise RuntimeError(f"{len(failed)} sessions failed: {failed[:3]}")
    return outcomes


@contextlib.asynccontextmanager
async def watched(cluster: Cluster, cell: Cell) -> AsyncIterator[None]:
    """Collects what is decided meanwhile."""

    async def look() -> None:
        async with channel(cluster.address) as link:
            admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
            while True:
                shown = await admin.ShowWindows(coordinator_pb2.ShowWindowsRequest(), timeout=5.0)
                cell.windows |= {window.session_id: window for window in shown.windows}
                await asyncio.sleep(0.5)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait({looking})


async def overran(cluster: Cluster) -> float:
    return (await harness.status(cluster.address)).verifiers[0].overran


class Bench:
    """Everything between the flags and the table."""

    def __init__(
        self, pair: Pair, scratch: Path, rounds: int, prompts: Mapping[str, Sequence[int]], *, steered: bool = True
    ) -> None:
        """steered: False leaves windows to the verifier's own setting."""
        self._pair = pair
        self._steered = steered
        self._scratch = scratch
        self._rounds = rounds
        self._prompts = prompts
        self._verifier_core, self._device_core = harness.cores()
        self._recordings: dict[str, int] = {}

    async def tape(self, name: str, draft: Path) -> None:
        """What this draft says of every prompt; outputs that are too short are left out."""
        async with self._cluster(Machine(1), draft) as (_, where):
            tape = await make_tape(where, replace(self._pair, draft=draft), self._prompts, OPTIONS)
        tape.save(self._file(name))
        self._recordings[name] = len(tape.recordings)
        print(
            f"{name} draft: {len(tape.recordings)} recordings, {1e3 * min(tape.decodes)[1]:.1f} ms a decode", flush=True
        )

    async def cells(self, machine: Machine, name: str, draft: Path, rtts_ms: Sequence[float]) -> dict[float, Cell]:
        """By RTT, on one verifier. Raises RuntimeError where a paced one could not keep its pace."""
        found: dict[float, Cell] = {}
        async with self._cluster(machine, draft) as (cluster, where):
            for rtt_ms in rtts_ms:
                async with Swarm(
                    self._file(name), replace(where, rtt_ms=rtt_ms), processes=1, cores=[self._device_core]
                ) as swarm:
                    found[rtt_ms] = await self._cell(cluster, swarm, machine.sessions, self._recordings[name])
            if machine.pass_ms and (share := await overran(cluster)) > OVERRAN:
                raise RuntimeError(
                    f"{machine}: {share:.1%} of the passes took longer by themselves; the run is invalid"
                )
        return found

    async def turning(self, name: str, draft: Path) -> dict[str, float]:
        """On a line whose round trip turns: delivered after each turn, adaptive over streaming."""
        async with self._cluster(TURNING, draft) as (cluster, where):
            far = replace(where, rtt_ms=5.0, turns=TURNS)
            async with Swarm(self._file(name), far, processes=1, cores=[self._device_core]) as swarm:
                cell = await self._cell(cluster, swarm, 1, min(SINGLE, self._recordings[name]))
        found = {}
        for at_s, rtt_ms in TURNS:
            ratios = []
            for slow, fast in zip(cell.streaming, cell.adaptive, strict=True):
                for a, b in zip(slow, fast, strict=True):
                    ends_s = min(at_s + TURNED_S, b.seconds)  # a session that is through has nothing left to deliver
                    if ends_s > at_s + TURNED_S / 2:
                        ratios.append(delivered(b, at_s, ends_s) / max(1, delivered(a, at_s, ends_s)))
            found[f"to {rtt_ms:g} ms"] = round(statistics.median(ratios), 3) if ratios else math.nan
            print(f"{TURNING!s:<34}{name:<7}turn to {rtt_ms:g} ms: {harness.spread(ratios)} of streaming", flush=True)
        return found

    async def _cell(self, cluster: Cluster, swarm: Swarm, at_once: int, recordings: int) -> Cell:
        cell = Cell()
        numbers = range(recordings if at_once > 1 else min(recordings, SINGLE))
        await play(swarm, numbers[:1], 1, True)  # whatever is slow the first time
        for turn in range(self._rounds):
            for drafted in (True, False) if turn % 2 else (False, True):
                async with watched(cluster, cell) if drafted else contextlib.nullcontext():
                    outcomes = await play(swarm, numbers, at_once, drafted)
                (cell.adaptive if drafted else cell.streaming).append(outcomes)
        return cell

    @contextlib.asynccontextmanager
    async def _cluster(self, machine: Machine, draft: Path) -> AsyncIterator[tuple[Cluster, Where]]:
        async with harness.cluster(prefix_cache=False) as cluster:
            os.environ.update(machine.environment | {"OUTRIDER_COORDINATOR_WINDOW_CONTROL": str(self._steered)})
            await cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[self._device_core])
            arguments = ["--model", str(self._pair.target), "--draft", str(draft), "--threads", "1"]
            verifier = await cluster.start_verifier(*arguments, cores=[self._verifier_core])
            yield cluster, Where(verifier.address, cluster.address)

    def _file(self, name: str) -> Path:
        return self._scratch / f"{name}.json"


def tell(machine: Machine, draft: str, rtt_ms: float, cell: Cell) -> dict[str, Any]:
    """Print a line; the cell's figures."""
    middle, low, high = interval(cell.ratios)
    each = [statistics.median(values) for values in cell.ratios.values()]
    steps = sum(o.steps for outcomes in cell.adaptive for o in outcomes)
    per_step = sum(o.tokens for outcomes in cell.adaptive for o in outcomes) / steps
    tokens, seconds, wire_up, appends = (
        sum(getattr(o, name) for outcomes in cell.adaptive for o in outcomes)
        for name in ("tokens", "seconds", "wire_up", "appends")
    )
    figures = {
        "speedup": round(middle, 3),
        "interval": [round(low, 3), round(high, 3)],
        "slowest": round(min(each), 3),
        "first_token": round(cell.over(0.5, "first_token_s"), 3),
        "gap_p99": round(cell.over(0.99, "gaps_ms"), 3),
        "wire_up_per_token": round(wire_up / tokens, 1),
        "messages_per_s": round(appends / seconds, 1),
    }
    windows = cell.windows.values()
    decided = ""
    if windows:
        k, depth, hits = (statistics.fmean(getattr(w, name) for w in windows) for name in ("k", "depth", "hits"))
        predicted = statistics.median(w.speedup for w in windows)
        decided = f"; decided: k {k:.1f}, depth {depth:.1f}, hits {hits:.2f}, predicted {predicted:.2f}x"
        figures["predicted"] = round(predicted, 3)
    print(
        f"{machine!s:<34}{draft:<7}{rtt_ms:>5.0f} ms  {middle:.2f}x [{low:.2f} .. {high:.2f}], slowest {min(each):.2f};"
        f" {per_step:.2f} tokens a step; first token {figures['first_token']:.2f}x, p99 gap {figures['gap_p99']:.2f}x,"
        f" {wire_up / tokens:.0f} bytes up a token, {appends / seconds:.0f} messages/s"
        f"{decided}",
        flush=True,
    )
    return figures


async def main() -> None:
    parser = harness.arguments("window", __doc__)
    parser.add_argument(
        "--own", action="store_true", help="devices draft by their verifier's own setting, for comparison"
    )
    options = parser.parse_args()
    pair = Pair.in_folder(options.models)
    rounds, count = (2, 8) if options.quick else (3, 16)
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")[:count]}
    drafts = {"good": pair.draft} if options.quick else {"good": pair.draft, "narrow": pair.narrow}
    result: dict[str, Any] = {}
    turns: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        bench = Bench(pair, Path(scratch), rounds, prompts, steered=not options.own)
        print("windows: the verifier's own setting" if options.own else "windows: by the coordinator", flush=True)
        for name, draft in drafts.items():
            await bench.tape(name, draft)
            for machine in MACHINES:
                rtts_ms = [rtt for rtt in RTTS_MS if not options.quick or (machine, rtt) in QUICK]
                for rtt_ms, cell in (await bench.cells(machine, name, draft, rtts_ms)).items():
                    result[f"{machine}, {name}, {rtt_ms:g} ms"] = tell(machine, name, rtt_ms, cell)
            if name == "good":
                turns = await bench.turning(name, draft)
    slower = [name for name, figures in result.items() if figures["interval"][1] < SLOWER]
    print(f"{len(slower)} of {len(result)} cells are slower than {SLOWER} of streaming: {'; '.join(slower) or 'none'}")
    harness.finish({"cells": result, "slower": slower, "turns": turns})
    if slower:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
