"""Hold what every part of the windows benchmark needs, and play one verifier or two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.support.draft_replay.swarm import Swarm
from benchmarks.window.cell_player import CellPlayer
from benchmarks.window.plan import WindowPlan
from benchmarks.window.recording_library import RecordingLibrary
from benchmarks.window.testbed import (
    OVERRAN,
    REAL_PASS_MS,
    CorePair,
    RunningVerifier,
    VerifierMachine,
    WindowTestbed,
)

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """Hold what all parts of one run share."""

    testbed: WindowTestbed
    plan: WindowPlan
    recordings: RecordingLibrary
    core_pairs: tuple[CorePair, CorePair]
    together: bool = True
    """Whether paced verifiers may be played two at a time."""
    invalid: list[str] = field(default_factory=list)
    """Descriptions of paced verifiers that could not keep their pace."""

    def player(
        self,
        site: RunningVerifier,
        swarm: Swarm,
        draft: str,
        rounds: int = 1,
        counts: tuple[int, int] | None = None,
        *,
        probed: bool = False,
    ) -> CellPlayer:
        """Return a player of as many prompts as the site's machine gets; if they are not enough, they are played again.

        counts: of machines with one session and of others; the plan's without them. probed: as in SessionJob.
        """
        prompts, machine = self.recordings.prompts(draft), site.machine
        single, several = counts or (self.plan.singles, self.plan.several)
        count = single if machine.sessions == 1 else max(several, machine.sessions)
        numbers = [i % prompts for i in range(count)]
        long = range(prompts, prompts + self.plan.long)
        return CellPlayer(site, swarm, numbers, long, tokens=self.plan.tokens_of(machine), rounds=rounds, probed=probed)

    def check(self, site: RunningVerifier, arm: str = "") -> None:
        """Record and print if a paced verifier missed its pace. arm: its configuration, if there are several."""
        overran, name = site.overran, f"{site.machine}{arm and ', '}{arm}"
        if overran > OVERRAN:
            self.invalid.append(f"{name}: {overran:.1%} of the passes took longer by themselves")
            print(f"INVALID: {self.invalid[-1]}", flush=True)
        elif site.machine.pass_ms:
            print(f"{name}: {overran:.2%} of the passes overran", flush=True)

    async def each(self, playing: Sequence[Callable[[], Awaitable[T]]], machines: Iterable[VerifierMachine]) -> list[T]:
        """Play these machines, each on a core of its own: together if they have one session each and sleep for most of
        their time, else one after the other."""
        least_ms = 3 * REAL_PASS_MS[1]
        if self.together and all(machine.pass_ms > least_ms and machine.sessions == 1 for machine in machines):
            return list(await asyncio.gather(*(one() for one in playing)))
        return [await one() for one in playing]
