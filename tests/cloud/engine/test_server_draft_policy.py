"""Test when the server draft is paused, and when it is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.server_draft.policy import FIRST_PAUSE, LONGEST_PAUSE, SHORT_TRIAL, TRIAL, DraftPolicy


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


def test_a_trial_with_many_sessions_ends_when_it_has_shown_enough() -> None:
    assert World(gain=0.5).drafted(FIRST_PAUSE) == SHORT_TRIAL


def test_a_trial_goes_on_while_what_it_gains_is_too_uneven_to_tell() -> None:
    world = World(gain=0.5)
    for world.gain in (3.8, 0.0, 0.0):
        assert world.drafted(1) == 1
    assert 0 < world.drafted(TRIAL) < TRIAL - 3


def test_pauses_grow_up_to_a_bound() -> None:
    pauses = World(gain=0.5).pauses(10_000)
    assert pauses[:5] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE, LONGEST_PAUSE]
    assert set(pauses[4:]) == {LONGEST_PAUSE}


def test_a_dear_draft_is_paused_however_right_it_is() -> None:
    # 16 * 2.9 commits in 20 + 32 + 50 ms, against 16 in 20: 0.57 of it.
    assert World(gain=1.9, drafting_s=0.05).drafted(FIRST_PAUSE) == SHORT_TRIAL
    assert World(gain=1.9, drafting_s=0.004).drafted(TRIAL + FIRST_PAUSE) == TRIAL + FIRST_PAUSE


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


def test_fewer_sessions_end_a_pause() -> None:
    world = World(gain=0.9)
    assert world.drafted(TRIAL + 10) == SHORT_TRIAL  # 16: 30.4 commits in 54 ms, against 16 in 20
    world.sessions = 9
    assert world.drafted(10) == 0
    world.sessions = 4  # 7.6 commits in 20 + 8 + 2 ms, against 4 in 20
    assert world.drafted(30) == 30


def test_with_fewer_sessions_a_spoiled_trial_is_soon_made_good() -> None:
    """This holds however long the pauses had become for many sessions."""
    world = World(gain=0.9)
    world.drafted(5000)
    world.sessions, world.gain = 1, 0.0  # a passage of which no draft token is accepted
    assert world.drafted(TRIAL + 1) == TRIAL
    world.gain = 1.9
    assert world.drafted(FIRST_PAUSE + 100) >= 100


def test_a_load_that_swings_reaches_long_pauses_too() -> None:
    world, drafted = World(gain=0.0), []
    for number in range(400):
        world.sessions = 4 if number % 2 else 16
        drafted.append(world.drafted(50))
    assert sum(drafted[:40]) > 0
    assert sum(drafted[200:]) <= 20 * TRIAL  # in 10,000 steps, some ten of the longest pauses of each load


def test_a_trial_ends_early_where_drafting_takes_more_than_it_could_ever_gain() -> None:
    # 8 tokens of a session are worth 160 ms.
    assert World(gain=1.9, drafting_s=0.17, sessions=1).drafted(FIRST_PAUSE) == SHORT_TRIAL
    assert World(gain=1.9, drafting_s=0.15, sessions=1).drafted(FIRST_PAUSE) == TRIAL


def test_one_slow_drafting_does_not_end_a_trial() -> None:
    """The first one may have to load something."""
    world = World(gain=1.9, drafting_s=5.0)
    assert world.drafted(1) == 1
    world.drafting_s = 0.002
    assert world.drafted(TRIAL - 1) == TRIAL - 1


def test_what_others_commit_counts_against_a_longer_step() -> None:
    world = World(gain=1.9, drafting_s=0.004)
    assert world.drafted(100) == 100
    world.beside = 32.0
    assert world.drafted(100) < 50


def reader(gain: float = 1.0, drafting_s: float = 0.002, a_token_s: float = 0.0002) -> DraftPolicy:
    """Return a policy that knows of 4 sessions how long a token takes to read."""
    policy = DraftPolicy()
    for _ in range(30):
        policy.time.observe_drafting(4, drafting_s)
        policy.observe_step(4, 8, round(4 * gain))
        policy.time.observe_reading(100, 100 * a_token_s)
    return policy


def test_a_long_prompt_before_a_short_answer_is_not_read() -> None:
    """With a step of 20 ms and 4 sessions a token is worth 5 ms; drafting and nodes cost 2.5 ms a session and step."""
    policy = reader()
    assert policy.reading_pays(1000, 400, 4, 4, World().cost)  # 200 ms, against 200 steps of 2.5 ms
    assert not policy.reading_pays(1000, 24, 4, 4, World().cost)  # against 12 of them
    assert policy.reading_pays(30, 24, 4, 4, World().cost)


def test_a_draft_that_gains_nothing_reads_nothing() -> None:
    assert not reader(gain=0.0).reading_pays(1, 10_000, 4, 4, World().cost)


def test_before_anything_is_known_one_reads() -> None:
    assert DraftPolicy().reading_pays(100_000, 1, 4, 4, World().cost)
