"""Play the two arms of a cell, and record the window decisions meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence

from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.draft_replay.swarm import Swarm
from benchmarks.window.cells import Cell, ObservedWindow
from benchmarks.window.testbed import RunningVerifier, check, play
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

FIRST_TOKENS = 4
"""Tokens of a session with a long prompt, which is then cancelled."""
AROUND_TOKENS = 32
"""Tokens of the sessions that generate beside a long prompt; others take their places."""
AROUND_S = 0.5
"""Time until those sessions generate."""
LOOK_S = 0.25
WARM_TOKENS = 16


class CellPlayer:
    """Play cells at one site. numbers: the recordings of its prompts; long: those of long prompts."""

    def __init__(
        self,
        site: RunningVerifier,
        swarm: Swarm,
        numbers: Sequence[int],
        long: Sequence[int],
        *,
        tokens: int,
        rounds: int = 1,
        probed: bool = False,
    ) -> None:
        """Set up a player. tokens: number after which each session is cancelled. probed: as in SessionJob."""
        self._site = site
        self._swarm = swarm
        self.numbers = numbers
        self._long = long
        self._tokens = tokens
        self._rounds = rounds
        self._probed = probed

    async def warm(self) -> None:
        """Play a short session first, because first requests are slow."""
        await play(self._swarm, [SessionJob(self.numbers[0], ending="cancel", after=WARM_TOKENS)], 1)

    async def steady(self, rtt_ms: float, cell: Cell) -> None:
        """Play both arms in turn: by prompt with one session at once, else by round."""
        async with watched(self._site, cell.observations):
            for turn in range(self._rounds):
                if self._site.machine.sessions == 1:
                    pairs = [await self.pair([n], rtt_ms, turn + i) for i, n in enumerate(self.numbers)]
                    streaming, adaptive = ([arm for pair in pairs for arm in pair[i]] for i in (0, 1))
                else:
                    streaming, adaptive = await self.pair(self.numbers, rtt_ms, turn)
                cell.streaming.append(streaming)
                cell.adaptive.append(adaptive)

    async def pair(
        self, numbers: Sequence[int], rtt_ms: float, turn: int, *, arrival: float = 1.0
    ) -> tuple[list[SessionOutcome], list[SessionOutcome]]:
        """Play these prompts in both arms; return the outcomes, streaming first. Which arm is played first alternates.

        arrival: the share of a cell's time in which first sessions arrive.
        """
        at_once, over_s = self._site.machine.sessions, arrival * self._over_s
        arms = {}
        for drafted in (True, False) if turn % 2 else (False, True):
            jobs = [self._job(n, rtt_ms, drafted) for n in numbers]
            arms[drafted] = await play(self._swarm, jobs, at_once, over_s)
        return arms[False], arms[True]

    @property
    def _over_s(self) -> float:
        """Return the seconds in which a cell's first sessions arrive: as long as one of them streams.

        So prompts are read and text is generated at all times, in either arm.
        """
        machine = self._site.machine
        return self._tokens * machine.plain_ms / 1e3 if machine.sessions > 1 else 0.0

    async def first_tokens(self, rtt_ms: float, cell: Cell) -> None:
        """Play each long prompt in both arms, one after the other; which arm is first alternates."""
        arms = {False: cell.long_streaming, True: cell.long_adaptive}
        turns = [(n, drafted) for i, n in enumerate(self._long) for drafted in ((True, False) if i % 2 else arms)]
        for drafted, numbers in itertools.groupby(turns, key=lambda turn: turn[1]):
            async with self._around(rtt_ms, drafted):
                for number, _ in numbers:
                    job = SessionJob(number, drafted, "cancel", FIRST_TOKENS, rtt_ms=rtt_ms)
                    outcome = await self._swarm.play(job)
                    check([job], [outcome])
                    arms[drafted].append(outcome)

    @contextlib.asynccontextmanager
    async def _around(self, rtt_ms: float, drafted: bool) -> AsyncIterator[None]:
        """Let other sessions generate meanwhile, in all places but one."""
        over = asyncio.Event()

        async def keep_playing(number: int) -> None:
            job = SessionJob(number, drafted, "cancel", AROUND_TOKENS, rtt_ms=rtt_ms)
            while not over.is_set():
                check([job], [await self._swarm.play(job)])

        others = self.numbers[: self._site.machine.sessions - 1]
        playing = asyncio.gather(*map(keep_playing, others))
        await asyncio.sleep(AROUND_S if others else 0.0)
        try:
            yield
        finally:
            over.set()
            await playing

    def _job(self, number: int, rtt_ms: float, drafted: bool) -> SessionJob:
        return SessionJob(number, drafted, "cancel", self._tokens, rtt_ms=rtt_ms, probed=self._probed)


@contextlib.asynccontextmanager
async def watched(
    site: RunningVerifier, observations: list[ObservedWindow], every_s: float = LOOK_S
) -> AsyncIterator[None]:
    """Collect the window decisions that are made meanwhile."""

    async def look() -> None:
        async with channel(site.cluster.address) as link:
            admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
            while True:
                shown = await admin.ListWindows(coordinator_pb2.ListWindowsRequest(), timeout=120.0)
                observations.extend(_observed(window) for window in shown.windows)
                await asyncio.sleep(every_s)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait({looking})


def _observed(decided: coordinator_pb2.WindowDecision) -> ObservedWindow:
    return ObservedWindow(
        time.monotonic(),
        decided.session_id,
        decided.window.k,
        decided.window.depth,
        decided.tokens_per_step,
        decided.speedup,
        decided.first_acceptance,
        decided.rtt_ms,
        decided.draft_ms,
        decided.window.nodes_per_level,
        decided.min_acceptance,
    )
