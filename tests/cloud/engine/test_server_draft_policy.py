"""Test when the server draft is paused, and when it is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.server_draft.policy import FIRST_PAUSE, LONGEST_PAUSE, TRIAL, DraftPolicy


@dataclass
class World:
    """Simulate steps of 20 ms plus 1 ms a node, with a draft of the given time and gain."""

    drafting_s: float = 0.002
    gain: float = 0.5
    """Accepted nodes of a session and step, out of two."""
    sessions: int = 16
    beside: float = 0.0
    """Tokens that the step commits for devices' own nodes, and for their sessions."""
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    step: int = 0

    def cost(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        return 0.02 + 0.001 * nodes

    def steps(self, count: int) -> Iterator[bool]:
        """Yield for each of the next steps whether the verifier drafts in it."""
        for _ in range(count):
            commits = self.sessions + self.beside
            drafts = self.policy.pays(self.step, commits, self.sessions, self.cost)
            if drafts:
                self.policy.time.observe_drafting(self.sessions, self.drafting_s)
                self.policy.observe_drafting(self.sessions, self.drafting_s)
                self.policy.observe_step(self.sessions, 2 * self.sessions, round(self.gain * self.sessions))
            self.step += 1
            yield drafts

    def drafted(self, count: int) -> int:
        return sum(self.steps(count))

    def pauses(self, count: int) -> list[int]:
        """Return the lengths of the pauses that ended within the next steps."""
        found, length = [], 0
        for drafts in self.steps(count):
            if drafts and length:
                found.append(length)
            length = 0 if drafts else length + 1
        return found


def test_what_pays_goes_on() -> None:
    # 16 * 1.9 commits in 20 + 32 + 2 ms, against 16 in 20.
    assert World(gain=1.9).drafted(1000) == 1000


def test_what_does_not_pay_is_paused_after_a_trial() -> None:
    world = World(gain=0.5, sessions=1)
    assert world.drafted(TRIAL) == TRIAL
    assert world.drafted(FIRST_PAUSE) == 0
    assert world.drafted(TRIAL) == TRIAL


def test_a_draft_that_has_become_good_is_found_out() -> None:
    world = World(gain=0.2)
    world.drafted(3000)
    world.gain = 1.9
    world.drafted(LONGEST_PAUSE)
    assert world.drafted(200) == 200
    world.gain = 0.2
    assert world.pauses(200)[0] == FIRST_PAUSE  # a success makes the next pause short again


def test_a_draft_that_has_become_bad_is_stopped_within_a_few_steps() -> None:
    world = World(gain=1.9)
    world.drafted(500)
    world.gain = 0.2
    assert world.drafted(60) < 30
