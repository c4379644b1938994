"""Start verifiers for the windows benchmark, paced or not, each on its own core and under its own coordinator.

PACED verifiers take at least `a + b n` ms for a pass over n rows, to stand in for the step times of a larger model on
an accelerator (benchmarks.support.pace). A paced run is invalid if more than 2% of its passes took longer by
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.swarm import Swarm
from benchmarks.support.engine_options import TORCH, Engines, engines
from benchmarks.support.harness import Pair
from benchmarks.support.pace import COUNTS, WAITS, Pace, PassCounts
from coordinator.cluster import Cluster
from outrider.core.protocol.messages import Directive

OVERRAN = 0.02
PACED_VERIFIER = "benchmarks.support.paced_verifier"
UCB_COORDINATOR = "benchmarks.support.ucb_coordinator"
REAL_PASS_MS = {1: 16.0, 8: 20.0}
"""Number of sessions -> approximate time of a plain step on a CPU core."""


@dataclass(frozen=True)
class VerifierMachine:
    """Describe a verifier and how many sessions it has at once."""

    sessions: int
    pass_ms: float = 0.0
    """0: as fast as it can."""
    row_ms: float = 0.0

    @property
    def plain_ms(self) -> float:
        """Return the time of a step of all sessions without nodes; on the real CPU, an estimate of it."""
        return self.pass_ms + self.row_ms * self.sessions if self.pass_ms else REAL_PASS_MS[self.sessions]

    def __str__(self) -> str:
        return f"{self.pace or 'real CPU'}, {self.sessions} at once"

    @property
    def pace(self) -> Pace | None:
        return Pace(self.pass_ms, self.row_ms) if self.pass_ms else None


@dataclass(frozen=True)
class CorePair:
    """Hold two cores: one for a verifier, the other for its devices. Paced verifiers may use two such pairs at once,
    because they sleep most of the time."""

    verifier: int
    devices: int

    @classmethod
    def both(cls) -> tuple[CorePair, CorePair]:
        a, b = harness.cores()
        return cls(a, b), cls(b, a)


@dataclass(frozen=True)
class RunningVerifier:
    """Hold a running verifier and how to reach it."""

    machine: VerifierMachine
    cores: CorePair
    where: ServiceAddress
    cluster: Cluster
    counts: PassCounts | None = None
    """The pass counts of a paced verifier."""

    @contextlib.asynccontextmanager
    async def swarm(
        self, recorded: Path, changes: tuple[tuple[float, float], ...] = (), draft: Path | None = None
    ) -> AsyncIterator[Swarm]:
        """Run devices that replay this recording here. Jobs without an RTT of their own have 1 ms.

        draft: the file of the recorded draft, for live jobs.
        """
        where = replace(self.where, rtt_ms=1.0, changes=changes)
        async with Swarm(recorded, where, processes=1, cores=[self.cores.devices], draft=draft) as swarm:
            yield swarm

    @property
    def overran(self) -> float:
        """Return the share of passes that took longer than a paced verifier's should, since it was ready."""
        return self.counts.overran if self.counts else 0.0


class WindowTestbed:
    """Start verifiers of one pair of target and draft."""

    def __init__(self, pair: Pair, *, controlled: bool = True, available: Engines | None = None) -> None:
        """Set up a testbed.

        controlled: False leaves windows to the verifier's own setting. available: engines that a site may have; our
        own without it.
        """
        self.pair = pair
        self.engines = available or engines()
        self._controlled = controlled
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def site(
        self,
        machine: VerifierMachine,
        cores: CorePair,
        draft: Path | None = None,
        engine: str = TORCH,
        *,
        server_sources: bool = False,
        ucb: bool = False,
    ) -> AsyncIterator[RunningVerifier]:
        """Run a verifier with this engine under a coordinator that decides the windows.

        server_sources: whether it has sources of nodes of its own, so that a device's are not the only ones.
        ucb: whether UCB-SpecStop decides the windows.
        """
        options = (*self.engines[engine], *(self.pair.server_sources if server_sources else ()))
        async with (
            self._cluster(cores, controlled=self._controlled or ucb, ucb=ucb) as cluster,
            self._verifier(cluster, machine, cores, draft, {}, *options) as site,
        ):
            yield site

    @contextlib.asynccontextmanager
    async def static_site(
        self, machine: VerifierMachine, cores: CorePair, directive: Directive, *, waits: bool = False
    ) -> AsyncIterator[RunningVerifier]:
        """Run a verifier whose own directive holds from the first token on: its coordinator leaves windows alone.

        waits: whether a paced one waits for nodes as long as the directive says even if that gains nothing.
        """
        own = {
            "WINDOW_NODES": directive.window_nodes,
            "WINDOW_DEPTH": directive.window_depth,
            "NODES_PER_STEP": directive.nodes_per_step,
            "DRAFT_WAIT_MS": directive.draft_wait_ms,
        }
        environment = {f"OUTRIDER_VERIFIER_{name}": str(value) for name, value in own.items()}
        environment |= {WAITS: "1"} if waits else {}
        async with (
            self._cluster(cores, controlled=False) as cluster,
            self._verifier(cluster, machine, cores, None, environment) as site,
        ):
            yield site

    @contextlib.asynccontextmanager
    async def _cluster(self, cores: CorePair, *, controlled: bool, ucb: bool = False) -> AsyncIterator[Cluster]:
        async with harness.cluster(prefix_cache=False) as cluster:
            if ucb:
                cluster.coordinator_module = UCB_COORDINATOR
            # Others may start meanwhile; a child has its environment when its process begins, in the task's first turn.
            async with self._starting:
                with _environment({"OUTRIDER_COORDINATOR_WINDOW_CONTROL": str(controlled)}):
                    starting = asyncio.create_task(
                        cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[cores.devices])
                    )
                    await asyncio.sleep(0)
            await starting
            yield cluster

    @contextlib.asynccontextmanager
    async def _verifier(
        self,
        cluster: Cluster,
        machine: VerifierMachine,
        cores: CorePair,
        draft: Path | None,
        environment: Mapping[str, str],
        *options: str,
    ) -> AsyncIterator[RunningVerifier]:
        arguments = ["--model", str(self.pair.target), "--threads", "1", *options]
        arguments += ["--draft", str(draft)] if draft else []
        with tempfile.TemporaryDirectory(prefix="outrider-pace-") as scratch:
            counts = None
            if machine.pace is not None:
                cluster.verifier_module = PACED_VERIFIER
                counts = PassCounts(Path(scratch, "passes"))
                environment = {**environment, **machine.pace.environment, COUNTS: str(Path(scratch, "passes"))}
            async with self._starting:
                with _environment(environment):
                    starting = asyncio.create_task(cluster.start_verifier(*arguments, cores=[cores.verifier]))
                    await asyncio.sleep(0)
            verifier = await starting
            if counts is not None:
                counts.begin()
            yield RunningVerifier(machine, cores, ServiceAddress(verifier.address, cluster.address), cluster, counts)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


async def play(swarm: Swarm, jobs: Iterable[SessionJob], at_once: int, over_s: float = 0.0) -> list[SessionOutcome]:
    """Play every job, so many at once; return outcomes in their order. Raises RuntimeError if one fails.

    over_s: the first `at_once` of them come evenly over so long, the others into places that become free.
    """
    jobs = list(jobs)
    outcomes: dict[int, SessionOutcome] = {}
    waiting = iter(range(at_once, len(jobs)))

    async def play_from(first: int) -> None:
        await asyncio.sleep(over_s * first / at_once)
        for number in itertools.chain([first], waiting):
            outcomes[number] = await swarm.play(jobs[number])

    await asyncio.gather(*map(play_from, range(min(at_once, len(jobs)))))
    found = [outcomes[number] for number in range(len(jobs))]
    check(jobs, found)
    return found


def check(jobs: Sequence[SessionJob], outcomes: Sequence[SessionOutcome]) -> None:
    """Raise RuntimeError unless each output came as recorded."""
    failed = [
        outcome.error or f"{outcome.wrong} tokens are not as recorded, finish {outcome.finish!r}"
        for job, outcome in zip(jobs, outcomes, strict=True)
        if outcome.error or outcome.wrong or not (outcome.finished or job.ending == outcome.finish[:6] == "cancel")
    ]
    if failed:
        raise RuntimeError(f"{len(failed)} sessions failed: {failed[:3]}")
