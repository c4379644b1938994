"""What every part of the windows' benchmark is given, and how it plays one verifier or two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.swarm import Swarm
from benchmarks.window_cell_player import CellPlayer
from benchmarks.window_plan import TOKENS, Plan
from benchmarks.window_recordings import Recordings
from benchmarks.window_stage import OVERRAN, Lane, Machine, Site, Stage


@dataclass(frozen=True)
class Context:
    """One run."""

    stage: Stage
    plan: Plan
    recordings: Recordings
    lanes: tuple[Lane, Lane]
    invalid: list[str] = field(default_factory=list)
    """What was not measured properly: paced verifiers that could not keep their pace."""

    def player(self, site: Site, swarm: Swarm, draft: str, rounds: int = 1) -> CellPlayer:
        """Of as many prompts as the site's machine is given; where those are not enough, they are played again."""
        prompts, machine = self.recordings.prompts(draft), site.machine
        count = self.plan.singles if machine.sessions == 1 else max(prompts, machine.sessions)
        numbers = [i % prompts for i in range(count)]
        long = range(prompts, prompts + self.plan.long)
        return CellPlayer(site, swarm, numbers, long, tokens=TOKENS[machine], rounds=rounds)

    async def check(self, site: Site) -> None:
        """Say so where a paced verifier needed longer by itself."""
        overran = await site.overran()
        if overran > OVERRAN:
            self.invalid.append(f"{site.machine}: {overran:.1%} of the passes took longer by themselves")
            print(f"INVALID: {self.invalid[-1]}", flush=True)
        elif site.machine.pass_ms:
            print(f"{site.machine}: {overran:.2%} of the passes overran", flush=True)


def side_by_side(machines: Iterable[Machine]) -> bool:
    """Whether two verifiers may be played at once: they sleep for half of their time, and have one session each."""
    return all(machine.pass_ms and machine.sessions == 1 for machine in machines)


async def each(playing: Sequence[Callable[[], Awaitable[None]]], *, at_once: bool) -> None:
    """All of them together, or one after the other."""
    if at_once:
        await asyncio.gather(*(one() for one in playing))
    else:
        for one in playing:
            await one()
