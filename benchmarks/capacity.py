"""Measure the tokens per second of one verifier on one core, by who drafts: nobody, the verifier, the devices.

Several verifiers share one core and are measured in turn, while coordinators and verifiers of the others stand still:
`autoregression` streams; `device` verifies what recorded devices draft (benchmarks.support.draft_replay: the draft
passes take their recorded time, but on no core of the verifier's); `co-located` has all that a verifier can have of its
own, n-grams, token recycling, heads and a draft, once for each depth of the draft's chain, each source pausing where it
does not pay; `both` is such a verifier with the devices' nodes besides, and `both, controlled` has the coordinator's
windows, which a device alone has to follow; `server draft` drafts in every step, to measure what a draft on that core
costs. Each has a verifier for itself, but `autoregression` and `device`, which have nothing of the verifier's. 1 to 32
sessions at once run in a closed loop, greedy and sampled in turn; outputs with more than 30% repeated 4-grams are left
out. In a round every configuration plays the same list of texts. It begins when all sessions run and ends with the last
text of the list, while sessions go on with others. A figure is the number of tokens delivered meanwhile over that time;
ratios are taken within a round, and their median is given. `by_sampling` has the same of greedy and of sampled sessions
apart: tokens delivered over the time in which such sessions ran. Prompts are in the prefix cache, so the figures cover
generation and the opening of sessions. Each list begins with other texts than the one before, since a verifier recycles
tokens of all texts that it has served; greedy texts, of which fewer are left, come again sooner, which favours
`co-located` and `both` alike. What devices know of their draft they have learned from the prompts for tuning. Windows
are the verifier's own, which maximise the tokens of all sessions together; in `device, controlled` they are the
coordinator's, which keep every session at least as fast as streaming.

With `--engine vllm` verifiers that run vLLM take their turns too, and `vllm` in the last line compares them with ours:
the faster forward as `autoregression`, and with it what chains commit where our engine verifies trees. Recordings whose
output vLLM does not repeat, which a tie may do, are left out for all.

Then the same is measured with a draft that costs far more, the target itself in Q8_0, at 1, 4 and 16 sessions.

Devices and `both` are compared with the better of server-side drafting and streaming at each number of sessions
(`vs_without_devices` and its likes): the configuration with the greatest median of `autoregression`, `server draft` and
`co-located`, of any depth. `--out` draws the tokens per second of each configuration.

`server_draft_bound` is the gain expected from drafting elsewhere: 0.9 of 1 + draft time / verify time of the best
verifier that always drafts, both as it reports them. It is compared with the best verifier that drafts by itself,
co-located ones included. `both_over_best` is over the best of all others. With a GPU, benchmarks.capacity_gpu follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.capacity_findings import (
    BOTH,
    BOTH_CONTROLLED,
    COLOCATED,
    CONTROLLED,
    DEVICE,
    PLAIN,
    SERVER,
    Cells,
    LoadWindow,
    MeasuredCell,
    by_sampling,
    criteria,
    report,
    report_vllm,
)
from benchmarks.support import engine_options, harness, proc
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.swarm import Swarm, record_drafts, repeated, settings
from benchmarks.support.engine_options import TORCH, VLLM, Engines
from benchmarks.support.harness import Pair, Size
from benchmarks.support.texts import repetitive
from cloud_verifier.distill.gguf.writer import write_gguf
from coordinator.cluster import Child, Cluster
from outrider.llama.model import quantize

LOOK_S = 0.1
"""Time between two looks at whether a verifier is registered again."""
RENEWED_S = 3.9
"""What is left of a lease of five seconds where a verifier has reported within the last second."""
HANG_S = 600.0
"""Time after which a verifier that has not registered again never will. No figure depends on it."""


@dataclass(frozen=True)
class CapacitySize:
    """Set how much is measured."""

    rounds: int
    prompts: int
    depths: tuple[int, ...]
    """Depths of the chains of the server drafts that always draft."""
    colocated: tuple[int, ...]
    """Depths of the chains of verifiers that have all sources, each of which pauses where it does not pay."""
    both: int
    """The depth of these at which devices draft besides."""
    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sessions at once, with the shipped draft."""
    heavy_levels: tuple[int, ...] = (1, 4, 16)
    """The same with the draft that costs far more; none: it is not measured."""
    least: int = 8
    """Texts of a list, which has one for each session at once if there are more of them."""
    teaching: int = 8
    """Prompts for tuning from which devices learn, greedy and sampled."""
    tokens: int = 96
    """Most tokens of a session."""


FULL = CapacitySize(rounds=3, prompts=48, depths=(2, 4), colocated=(2, 4, 16), both=4)
QUICK = CapacitySize(
    rounds=1,
    prompts=4,
    depths=(4,),
    colocated=(4,),
    both=4,
    levels=(1,),
    heavy_levels=(),
    least=2,
    teaching=2,
    tokens=48,
)
SMOKE = replace(QUICK, prompts=2, depths=(2,), colocated=(2,), both=2, heavy_levels=(1,), teaching=1, tokens=32)


@dataclass(frozen=True)
class ServingSetup:
    """Hold one way to serve, with its cluster and swarm running."""

    name: str
    swarm: Swarm
    cluster: Cluster
    drafted: bool
    clients_core: int
    """The CPU on which the swarm runs, and with it this process and the coordinators."""


class CapacityClusters:
    """Start the clusters of all configurations, and record the draft."""

    def __init__(
        self,
        pair: Pair,
        draft: Path,
        scratch: Path,
        cores: tuple[int, int],
        stack: contextlib.AsyncExitStack,
        engines: Engines,
    ) -> None:
        self._pair = pair
        self._engines = engines
        self._draft = draft
        self._file = scratch / f"{draft.stem}.json"
        self._stack = stack
        self._verifier_core, self._device_core = cores
        self.greedy: tuple[bool, ...] = ()
        """Of each recording, whether its session is greedy."""
        self.pass_s = 0.0
        """Time that the draft needs on the device for a pass over one token."""

    async def configurations(
        self,
        prompts: Mapping[str, Sequence[int]],
        teaching: Mapping[str, Sequence[int]],
        size: CapacitySize,
        *,
        keep_repetitive: bool = False,
    ) -> list[ServingSetup]:
        """Start a verifier for each configuration and record the draft. The first one streams.

        teaching: other prompts, from which devices learn what their draft is worth.
        """
        plain, where = await self._cluster()
        pair, asked = replace(self._pair, draft=self._draft), settings(size.tokens)
        recorded = await record_drafts(where, pair, prompts, asked)
        kept = [r for r in recorded.recordings if keep_repetitive or not repetitive(r.call.output)]
        taught = await record_drafts(where, pair, teaching, asked)
        recorded = replace(recorded, recordings=tuple(kept), lessons=taught.lessons)
        others = {engine: await self._cluster(*self._engines[engine]) for engine in self._engines if engine != TORCH}
        for engine, (_, there) in others.items():
            same = await repeated(there, recorded.recordings)
            print(f"{engine} repeats {len(same)} of {len(recorded.recordings)} recorded outputs", flush=True)
            recorded = replace(recorded, recordings=tuple(recorded.recordings[i] for i in same))
        recorded.save(self._file)
        self.greedy = tuple(one.call.sampling.greedy for one in recorded.recordings)
        self.pass_s = min(recorded.decodes)[1]
        found = await self._engine("", plain, where)
        for engine, (cluster, there) in others.items():
            found += await self._engine(f"{engine} ", cluster, there, *self._engines[engine])
        for depth in size.depths:
            found.append(await self._server_draft(f"{SERVER} {depth}", depth, "--no-server-draft-pauses"))
        for depth in size.colocated:
            found.append(await self._server_draft(f"{COLOCATED} {depth}", depth, *self._pair.server_sources))
        for name, controlled in ((BOTH, False), (BOTH_CONTROLLED, True)):
            both = await self._server_draft(name, size.both, *self._pair.server_sources, controlled=controlled)
            found.append(replace(both, drafted=True))
        return found

    async def _engine(self, prefix: str, plain: Cluster, where: ServiceAddress, *options: str) -> list[ServingSetup]:
        """Return an engine's setups. plain: its verifier with windows of its own; another is started beside it."""
        swarm = await self._swarm(where)
        streaming = ServingSetup(prefix + PLAIN, swarm, plain, False, self._device_core)
        controlled, where = await self._cluster(*options, controlled=True)
        return [
            streaming,
            replace(streaming, name=prefix + DEVICE, drafted=True),
            ServingSetup(prefix + CONTROLLED, await self._swarm(where), controlled, True, self._device_core),
        ]

    async def _server_draft(self, name: str, depth: int, *options: str, controlled: bool = False) -> ServingSetup:
        drafting = ["--server-draft", str(self._draft), "--server-draft-depth", str(depth)]
        cluster, where = await self._cluster(*drafting, *options, controlled=controlled)
        return ServingSetup(name, await self._swarm(where), cluster, False, self._device_core)

    async def _cluster(self, *options: str, controlled: bool = False) -> tuple[Cluster, ServiceAddress]:
        cluster = await self._stack.enter_async_context(harness.cluster())
        os.environ["OUTRIDER_COORDINATOR_WINDOW_CONTROL"] = str(controlled)
        await cluster.start_coordinator(*harness.LOOPBACK, cores=[self._device_core])
        arguments = ["--model", str(self._pair.target), "--draft", str(self._draft), "--threads", "1", *options]
        verifier: Child = await cluster.start_verifier(*arguments, cores=[self._verifier_core])
        return cluster, ServiceAddress(verifier.address, cluster.address)

    async def _swarm(self, where: ServiceAddress) -> Swarm:
        return await self._stack.enter_async_context(Swarm(self._file, where, cores=[self._device_core]))


def in_turn(greedy: Sequence[bool], share: float) -> Iterator[int]:
    """Yield the numbers of recordings without end, a greedy and a sampled one in turn, the fewer ones more often.

    greedy: of each recording. share: the part of either kind after which it begins, from 0 to 1.
    """
    kinds = []
    for kind in dict.fromkeys(greedy):
        numbers = [number for number, each in enumerate(greedy) if each is kind]
        first = int(len(numbers) * share)
        kinds.append(itertools.cycle([*numbers[first:], *numbers[:first]]))
    while kinds:
        yield from map(next, kinds)


async def ask(
    arm: ServingSetup, level: int, recordings: Iterator[int], greedy: Sequence[bool], count: int
) -> LoadWindow:
    """Run a closed loop of `level` sessions, and count from the beginning of its list to the list's end.

    The list has `count` recordings, after one for each session that is not counted, so that sessions are out of step;
    others follow until the list's last has ended. greedy: by the number of a recording.

    Raises RuntimeError if a session fails or its output is not the recorded one.
    """
    outcomes: list[SessionOutcome] = []
    ran: dict[bool, list[tuple[float, float, SessionOutcome]]] = {False: [], True: []}
    numbered = enumerate(recordings, start=-level)
    left = set(range(count))
    begin, end, begin_busy_s, busy_s = math.inf, math.inf, 0.0, 0.0
    parts_ms: Mapping[str, float] = {}

    async def sessions() -> None:
        nonlocal begin, end, begin_busy_s, busy_s, parts_ms
        while left:
            number, recording = next(numbered)
            begun = time.monotonic()
            if number == 0:
                begin, begin_busy_s = begun, proc.busy_seconds(arm.clients_core)
            outcome = await arm.swarm.play(SessionJob(recording, drafted=arm.drafted))
            outcomes.append(outcome)
            ran[greedy[recording]].append((begun, time.monotonic(), outcome))
            left.discard(number)
            if not left and end == math.inf:
                end, busy_s = time.monotonic(), proc.busy_seconds(arm.clients_core) - begin_busy_s
                parts_ms = await timing(arm.cluster)

    await asyncio.gather(*(sessions() for _ in range(level)))
    if failed := [o.error for o in outcomes if o.error or o.wrong or not o.finished]:
        raise RuntimeError(f"{arm.name}, {level} sessions: {len(failed)} failed or are not as recorded: {failed[:3]}")

    def delivered(some: Sequence[SessionOutcome]) -> int:
        return sum(begin <= at < end for o in some for at in o.delivered_s)

    def per_s(some: Sequence[tuple[float, float, SessionOutcome]]) -> float:
        session_s = sum(max(0.0, min(ended, end) - max(begun, begin)) for begun, ended, _ in some)
        return level * delivered([o for _, _, o in some]) / session_s if session_s else math.nan

    per_step = sum(o.tokens for o in outcomes) / sum(o.steps for o in outcomes)
    tokens_per_s = delivered(outcomes) / (end - begin)
    return LoadWindow(tokens_per_s, per_s(ran[True]), per_s(ran[False]), per_step, busy_s / (end - begin), parts_ms)


async def timing(cluster: Cluster) -> Mapping[str, float]:
    """Return the milliseconds of each part of the verifier's recent steps."""
    return dict((await harness.status(cluster.address)).verifiers[0].telemetry.timing_ms)


async def measure(setups: Sequence[ServingSetup], greedy: Sequence[bool], size: CapacitySize) -> Cells:
    """Send every prompt once, so that it is in the prefix caches; then measure all setups in turn. greedy: of each
    recording."""
    cells: Cells = defaultdict(MeasuredCell)
    for arm in setups:
        begun = [SessionJob(i, drafted=arm.drafted, ending="cancel", after=1) for i in range(len(greedy))]
        await asyncio.gather(*map(arm.swarm.play, begun))
    windows = size.rounds * len(size.levels)
    with stopped([arm.cluster for arm in setups]):
        for turn in range(size.rounds):
            for number, level in enumerate(size.levels):
                begun_with = (turn * len(size.levels) + number) / windows
                for arm in setups if turn % 2 else reversed(setups):
                    count = max(size.least, level)
                    async with running(arm.cluster):
                        window = await ask(arm, level, in_turn(greedy, begun_with), greedy, count)
                    cells[arm.name, level].windows.append(window)
    return cells


@contextlib.contextmanager
def stopped(clusters: Sequence[Cluster]) -> Iterator[None]:
    """Stop coordinators and verifiers, which take some of both cores without any session, inside the context."""
    for cluster in clusters:
        _signal(cluster, signal.SIGSTOP)
    try:
        yield
    finally:
        for cluster in clusters:
            _signal(cluster, signal.SIGCONT)


@contextlib.asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[None]:
    """Let a stopped cluster run inside the context, which begins once its verifier has reported again.

    Raises RuntimeError if the verifier has ended, and TimeoutError if it does not report.
    """
    _signal(cluster, signal.SIGCONT)
    try:
        async with asyncio.timeout(HANG_S):
            reported = False
            while not reported:
                await asyncio.sleep(LOOK_S)
                if not all(child.running for child in cluster.verifiers):
                    raise RuntimeError("a verifier has ended; its log stands below")
                found = (await harness.status(cluster.address)).verifiers
                reported = any(one.lease_s > RENEWED_S and one.telemetry.timing_ms for one in found)
        yield
    finally:
        _signal(cluster, signal.SIGSTOP)


def _signal(cluster: Cluster, number: signal.Signals) -> None:
    for child in (cluster.coordinator, *cluster.verifiers):
        if child is not None:
            child.signal_group(number)


def heavy_draft(target: Path, folder: Path) -> Path:
    """Write the target as its own draft, in Q8_0, and return its path."""
    disable_progress_bar()
    full, path = folder / "target-f32.gguf", folder / "target-q8.gguf"
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    write_gguf(model, tokenizer, full, "target as draft")
    quantize(full, path, "Q8_0")
    full.unlink()
    return path


@contextlib.asynccontextmanager
async def bench(
    pair: Pair, draft: Path, scratch: Path, cores: tuple[int, int], engines: Engines
) -> AsyncIterator[CapacityClusters]:
    """Yield the clusters under test, which stop when the context is left."""
    async with contextlib.AsyncExitStack() as stack:
        yield CapacityClusters(pair, draft, scratch, cores, stack, engines)


def draw_plot(found: Mapping[str, Any], title: str, folder: Path, key: str = "") -> Path:
    """Draw the tokens per second that `report` has found, and return the file. key: of the draft in the last line."""
    from benchmarks.capacity_plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    return draw(found["tokens_per_s"], title, folder / f"capacity{key and '_'}{key}.png")


def on_gpu(size: Size) -> dict[str, Any] | None:
    """Return the result of benchmarks.capacity_gpu; without a GPU print that nothing was measured and return None."""
    from benchmarks import capacity_gpu

    found = capacity_gpu.measure(size=size)
    if found is None:
        print("no CUDA device: nothing was measured on a GPU")
    return found


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("capacity", __doc__)
    harness.add_texts_option(parser)
    engine_options.add_options(parser)
    parser.add_argument("--shipped-draft", action="store_true", help="leave the draft out that costs far more")
    parser.add_argument("--out", type=Path, help="folder for plots (PNG) of tokens per second by sessions at once")
    options = parser.parse_args(argv)
    engines = engine_options.chosen(options)
    pair = Pair.in_folder(options.models)
    size: CapacitySize = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    prompts = pair.encode(harness.prompts(options.texts, size.prompts))
    teaching = pair.encode(harness.prompts("tuning", size.teaching))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        scratch = Path(folder)
        cores = harness.cores()
        harness.pin(cores[1])
        drafts = {"": pair.draft}
        if size.heavy_levels and not options.shipped_draft:
            drafts["heavy_draft"] = await asyncio.to_thread(heavy_draft, pair.target, scratch)
        for key, draft in drafts.items():
            async with bench(pair, draft, scratch, cores, engines) as one:
                setups = await one.configurations(prompts, teaching, size, keep_repetitive=options.texts != "heldout")
                levels = size.heavy_levels if key else size.levels
                cells = await measure(setups, one.greedy, replace(size, levels=levels))
            title = key.replace("_", " ") or "the shipped draft"
            found: dict[str, Any] = report(title, cells, levels)
            if options.out or options.size is Size.SMOKE:  # a smoke run draws as well, and keeps nothing
                file = draw_plot(found, title, options.out or scratch, key)
                print(f"wrote {file}")
            found["by_sampling"] = by_sampling(cells, levels)
            greedy = sum(one.greedy)
            found["texts"] = {"greedy": greedy, "sampled": len(one.greedy) - greedy}
            if VLLM in engines:
                found[VLLM] = report_vllm(cells, levels)
            cost = one.pass_s * cells[PLAIN, 1].median("tokens_per_s")
            print(f"a pass of this draft takes {cost:.2f} of a single session's step")
            found["draft_over_target"] = round(cost, 3)
            result |= {key: found} if key else found
    harness.finish(result | {"gpu": on_gpu(options.size)}, criteria(result), options.size)


if __name__ == "__main__":
    asyncio.run(main())
