"""Measure users with drafts and without, in turn, so that whatever else the machines do meets both."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_agent.bench.users import PromptInput, Run, Users, devices
from outrider.core.errors import BadRequest
from outrider.core.text import counted

PROMPTS_IN_A_ROW = 2
"""Prompts of a user with drafts, or without, before the other way has its turn."""


@dataclass(frozen=True)
class Plan:
    """Describe what is measured: each prompt is run once with drafts and once without, at all numbers of users.

    Raises BadRequest for more users than prompts.
    """

    common: Users
    """What all users share. Their first prompt is that of new devices, which does not count."""
    users: Sequence[int]
    rtts_ms: Sequence[float]
    cores: Sequence[int]
    """CPUs of the devices' processes, one of each."""
    pinned: bool = False
    """Whether each process stays on its CPU."""

    @property
    def prompts(self) -> Sequence[PromptInput]:
        """Return the prompts that count."""
        return self.common.prompts[1:]

    def __post_init__(self) -> None:
        if len(self.prompts) < max(self.users):
            found = counted(len(self.prompts), "prompt")
            raise BadRequest(
                f"{max(self.users)} users need as many prompts, since each is run once, got {found}; give more by"
                " --count and --prompts, or fewer users",
                field="users",
            )


@dataclass
class Configuration:
    """Hold the runs of so many users at one distance; both lists belong together, item by item."""

    rtt_ms: float
    users: int
    undrafted: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.rtt_ms:g} ms, {counted(self.users, 'user')}"


async def run_plan(plan: Plan, found: list[Configuration], tell: Callable[[str], None]) -> None:
    """Add the configurations of a plan to `found`, so that they are there if this is interrupted.

    tell: is called with how far it is. Raises Unavailable if a device fails.
    """
    begun, done = time.monotonic(), 0.0
    texts_in_a_row = 2.0 * len(plan.rtts_ms) * sum(len(plan.prompts) / users for users in plan.users)

    def show(configuration: Configuration, drafts: bool, prompts: int, run: Run) -> None:
        nonlocal done
        done += prompts / configuration.users
        left_s = (time.monotonic() - begun) * (texts_in_a_row / done - 1.0)
        left = f"about {left_s / 60:.0f} min" if left_s > 90 else f"about {left_s:.0f} s"
        what = f"{configuration.name}, {'with drafts' if drafts else 'without'}"
        tell(f"{done / texts_in_a_row:4.0%}  {what}: {run.tokens_per_s:.1f} tokens/s; {left} left")

    for rtt_ms in plan.rtts_ms:
        for count in plan.users:
            configuration = Configuration(rtt_ms, count)
            async with devices(count, plan.cores, pinned=plan.pinned) as running:
                for number, (begin, end) in enumerate(blocks(len(plan.prompts), count)):
                    prompts = [plan.common.prompts[0], *plan.prompts[begin:end]]
                    users = dataclasses.replace(plan.common, prompts=prompts, count=count, rtt_ms=rtt_ms)
                    runs: dict[bool, Run] = {}
                    for drafts in (False, True) if number % 2 == 0 else (True, False):
                        users = dataclasses.replace(users, options={**users.options, "speculation": drafts})
                        runs[drafts] = _numbered(await running.run(users), begin - 1)
                        show(configuration, drafts, end - begin, runs[drafts])
                    configuration.undrafted.append(runs[False])
                    configuration.drafted.append(runs[True])
                    if number == 0:
                        found.append(configuration)


def blocks(prompts: int, users: int) -> list[tuple[int, int]]:
    """Return where parts of so many prompts begin and end, with PROMPTS_IN_A_ROW of each user or more, if there are."""
    count = max(1, prompts // (users * PROMPTS_IN_A_ROW))
    bounds = [prompts * number // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _numbered(run: Run, first: int) -> Run:
    """Return the texts with the numbers of their prompts among all."""
    texts = (dataclasses.replace(text, prompt=first + text.prompt) for text in run.texts)
    return dataclasses.replace(run, texts=tuple(texts))
