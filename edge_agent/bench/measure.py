"""Measure users with drafts and without, in turn, so that whatever else the machines do meets both."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_agent.bench.users import Ask, Played, Users, devices
from outrider.core.errors import BadRequest
from outrider.core.text import counted

ASKS_IN_A_ROW = 2
"""Prompts that a user asks in a row before the other way has its turn."""


@dataclass(frozen=True)
class Plan:
    """Describe what is measured: each prompt is asked once with drafts and once without, at all numbers of users.

    Raises BadRequest for more users than prompts.
    """

    device: Mapping[str, Any]
    """Settings of each device, as for `Users`."""
    asks: Sequence[Ask]
    warm: Ask
    """What new devices ask first, which does not count."""
    users: Sequence[int]
    rtts_ms: Sequence[float]
    options: Mapping[str, Any]
    """Of each request."""
    cores: Sequence[int]
    """CPUs of the devices' processes, one of each."""
    draft: str | None = "auto"
    """As for `Users`; with None the verifier alone drafts."""
    pinned: bool = False
    """Whether each process stays on its CPU."""

    def __post_init__(self) -> None:
        if len(self.asks) < max(self.users):
            found = counted(len(self.asks), "prompt")
            raise BadRequest(
                f"{max(self.users)} users need as many prompts, since each is asked once, got {found}; give more by"
                " --count and --prompts, or fewer users",
                field="users",
            )


@dataclass
class Configuration:
    """Hold what was played with so many users at one distance; both lists belong together, item by item."""

    rtt_ms: float
    users: int
    undrafted: list[Played] = field(default_factory=list)
    drafted: list[Played] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.rtt_ms:g} ms, {counted(self.users, 'user')}"


async def measure(plan: Plan, found: list[Configuration], tell: Callable[[str], None]) -> None:
    """Add the configurations of a plan to `found`, so that they are there if this is interrupted.

    tell: is called with how far it is. Raises Unavailable if a device fails.
    """
    progress = Progress(plan, tell)
    for rtt_ms in plan.rtts_ms:
        for count in plan.users:
            configuration = Configuration(rtt_ms, count)
            async with devices(count, plan.cores, pinned=plan.pinned) as running:
                for number, (begin, end) in enumerate(blocks(len(plan.asks), count)):
                    asks = [plan.warm, *plan.asks[begin:end]]
                    common = Users(plan.device, asks, count, plan.draft, rtt_ms)
                    played: dict[bool, Played] = {}
                    for drafts in (False, True) if number % 2 == 0 else (True, False):
                        users = dataclasses.replace(common, options={**plan.options, "speculation": drafts})
                        played[drafts] = _numbered(await running.play(users), begin - 1)
                        progress.show(configuration, drafts, end - begin, played[drafts])
                    configuration.undrafted.append(played[False])
                    configuration.drafted.append(played[True])
                    if number == 0:
                        found.append(configuration)


def blocks(asks: int, users: int) -> list[tuple[int, int]]:
    """Return where parts of so many asks begin and end; each has ASKS_IN_A_ROW of each user or more, if there are."""
    count = max(1, asks // (users * ASKS_IN_A_ROW))
    bounds = [asks * number // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _numbered(played: Played, first: int) -> Played:
    """Return the texts with the numbers of their prompts among all."""
    texts = (dataclasses.replace(text, prompt=first + text.prompt) for text in played.texts)
    return dataclasses.replace(played, texts=tuple(texts))


class Progress:
    """Tells what has been measured, and about how long the rest takes, by the texts in a row that are left."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._begun = time.monotonic()
        self._done = 0.0
        self._all = 2.0 * len(plan.rtts_ms) * sum(len(plan.asks) / users for users in plan.users)

    def show(self, configuration: Configuration, drafts: bool, asks: int, played: Played) -> None:
        self._done += asks / configuration.users
        left_s = (time.monotonic() - self._begun) * (self._all / self._done - 1.0)
        left = f"about {left_s / 60:.0f} min" if left_s > 90 else f"about {left_s:.0f} s"
        what = f"{configuration.name}, {'with drafts' if drafts else 'without'}"
        self._tell(f"{self._done / self._all:4.0%}  {what}: {played.tokens_per_s:.1f} tokens/s; {left} left")
