"""The life of a release, whatever is published, decided and ordered in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.releases import lifecycle
from coordinator.releases.lifecycle import Verdict
from coordinator.releases.records import Evidence, Order, Release, ReleaseTrack, Rule, State
from outrider.core.errors import BadRequest, NotFound

SHARE = 0.25
RULE = Rule(share=SHARE, bound=0.05, alpha=0.01, window_s=100.0)
OVER = (State.SUPERSEDED, State.ROLLED_BACK)


def release(version: int, file: int | None = None) -> Release:
    name = f"{version if file is None else file:064x}"
    return Release(b"manifest %d" % version, version, name, State.CANDIDATE, 0.0)


def published(*versions: int, line: ReleaseTrack | None = None) -> ReleaseTrack:
    line = line or ReleaseTrack("w")
    for version in versions:
        line = lifecycle.publish(line, release(version), 0.0, SHARE)
    return line


def states(line: ReleaseTrack) -> dict[int, State]:
    return {r.version: r.state for r in line.releases}


def of(line: ReleaseTrack, version: int) -> Release:
    return next(r for r in line.releases if r.version == version)


def settled(line: ReleaseTrack, state: State) -> ReleaseTrack:
    return lifecycle.settle(line, line.canary, Verdict(state, "so"), Evidence(), 1.0, SHARE)


def steered(line: ReleaseTrack, version: int, order: Order) -> ReleaseTrack:
    return lifecycle.steer(line, of(line, version), order, 1.0, SHARE)


STABLE_1 = settled(published(1), State.STABLE)


def test_the_first_release_goes_on_trial_with_a_share_of_the_devices() -> None:
    line = published(1)
    assert line.stable is None
    assert (line.canary.version, line.canary.share) == (1, SHARE)


def test_what_comes_during_a_trial_waits_and_the_newest_goes_next() -> None:
    line = published(2, 3, 4, line=STABLE_1)
    assert states(line) == {1: State.STABLE, 2: State.CANARY, 3: State.ROLLED_BACK, 4: State.CANDIDATE}
    assert "version 4" in of(line, 3).reason
    assert states(settled(line, State.ROLLED_BACK))[4] is State.CANARY
    promoted = states(settled(line, State.STABLE))
    assert (promoted[1], promoted[2], promoted[4]) == (State.SUPERSEDED, State.STABLE, State.CANARY)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_version_that_is_not_above_the_newest_is_refused_and_the_next_one_named(version: int) -> None:
    line = published(3, line=STABLE_1)
    with pytest.raises(BadRequest, match=r"not above 3.*version 4"):
        lifecycle.publish(line, replace(release(version), manifest=b"another"), 1.0, SHARE)


def test_the_same_manifest_again_changes_nothing_even_when_it_was_rolled_back() -> None:
    line = settled(published(2, line=STABLE_1), State.ROLLED_BACK)
    assert lifecycle.publish(line, release(2), 9.0, SHARE) is line


def test_the_stable_file_signed_again_is_stable_at_once_and_ends_the_trial_of_an_older_version() -> None:
    line = lifecycle.publish(published(2, line=STABLE_1), release(3, file=1), 1.0, SHARE)
    assert states(line) == {1: State.SUPERSEDED, 2: State.ROLLED_BACK, 3: State.STABLE}


def test_history_is_short_and_what_it_forgot_stays_refused() -> None:
    line = STABLE_1
    for version in range(2, 100):
        line = settled(published(version, line=line), State.ROLLED_BACK)
    assert len(line.releases) == lifecycle.HISTORY
    assert line.stable.version == 1
    with pytest.raises(BadRequest, match="not above 99"):
        published(50, line=line)


# --- what is measured decides


def canary(**changes: object) -> ReleaseTrack:
    line = published(2, line=STABLE_1)
    return replace(line, releases=tuple(replace(r, **changes) if r.version == 2 else r for r in line.releases))


BETTER, WORSE = Evidence(log_better=RULE.needed), Evidence(log_worse=RULE.needed)


def test_evidence_decides_as_soon_as_there_is_enough() -> None:
    assert lifecycle.judge(canary(), BETTER, RULE, 1.0).state is State.STABLE
    assert lifecycle.judge(canary(), WORSE, RULE, 1.0).state is State.ROLLED_BACK
    assert lifecycle.judge(canary(), Evidence(log_better=4.6, log_worse=4.6), RULE, 1.0) is None


def test_worse_in_one_class_outweighs_better_over_all() -> None:
    both = Evidence(log_better=99.0, log_worse=RULE.needed)
    assert lifecycle.judge(canary(), both, RULE, 1.0).state is State.ROLLED_BACK


def test_a_doubt_about_one_class_holds_up_a_promotion_and_not_beyond_the_window() -> None:
    doubtful = replace(BETTER, doubt="class code of tenant acme")
    assert lifecycle.judge(canary(), doubtful, RULE, 99.0) is None
    verdict = lifecycle.judge(canary(), doubtful, RULE, 100.0)
    assert verdict.state is State.ROLLED_BACK
    assert "undecided after 100 s" in verdict.reason
    assert "class code of tenant acme" in verdict.reason


def test_a_trial_without_evidence_ends_with_its_window() -> None:
    assert lifecycle.judge(canary(), Evidence(), RULE, 99.9) is None
    assert lifecycle.judge(canary(), Evidence(), RULE, 100.0).state is State.ROLLED_BACK


def test_pins_hold_against_what_is_measured() -> None:
    assert lifecycle.judge(canary(pinned=True), WORSE, RULE, 1e9) is None
    kept = steered(canary(), 1, Order.PIN)
    assert lifecycle.judge(kept, BETTER, RULE, 1.0) is None
    assert lifecycle.judge(kept, WORSE, RULE, 1.0).state is State.ROLLED_BACK


def test_a_decision_that_comes_second_changes_nothing() -> None:
    line = canary()
    first = lifecycle.settle(line, line.canary, Verdict(State.STABLE, "so"), BETTER, 1.0, SHARE)
    assert lifecycle.settle(first, line.canary, Verdict(State.ROLLED_BACK, "no"), WORSE, 2.0, SHARE) is first
    assert of(first, 2).evidence == BETTER


# --- an operator decides


def test_promoting_goes_from_candidate_to_canary_to_stable() -> None:
    line = steered(published(2, line=steered(STABLE_1, 1, Order.PIN)), 2, Order.PROMOTE)
    assert line.canary.version == 2
    line = steered(line, 2, Order.PROMOTE)
    assert states(line) == {1: State.SUPERSEDED, 2: State.STABLE}
    assert steered(line, 2, Order.PROMOTE) is line


def test_there_is_one_trial_at_a_time_for_operators_too() -> None:
    with pytest.raises(BadRequest, match="one trial at a time"):
        steered(published(2, 3, line=STABLE_1), 3, Order.PROMOTE)


def test_a_stable_release_is_not_taken_back_but_followed_by_another() -> None:
    with pytest.raises(BadRequest, match=r"new\s+release.*signed as version 2.*--key"):
        steered(STABLE_1, 1, Order.ROLL_BACK)


def test_rolling_back_a_canary_sends_devices_back_and_can_be_said_twice() -> None:
    line = steered(canary(), 2, Order.ROLL_BACK)
    assert (line.canary, line.stable.version) == (None, 1)
    assert steered(line, 2, Order.ROLL_BACK) is line
    with pytest.raises(BadRequest, match=r"rolled back.*publish its file as version 3"):
        steered(line, 2, Order.PROMOTE)


def test_nothing_goes_on_trial_against_a_pinned_stable_release_until_it_is_unpinned() -> None:
    line = published(2, 3, line=steered(STABLE_1, 1, Order.PIN))
    assert (line.canary, of(line, 3).state) == (None, State.CANDIDATE)
    assert steered(line, 1, Order.UNPIN).canary.version == 3


def test_a_pinned_candidate_waits_and_is_too_old_once_a_newer_one_is_stable() -> None:
    line = steered(published(2, 3, line=STABLE_1), 3, Order.PIN)
    line = published(4, line=settled(line, State.ROLLED_BACK))
    assert (line.canary.version, of(line, 3).state) == (4, State.CANDIDATE)
    line = settled(line, State.STABLE)
    with pytest.raises(BadRequest, match="older than 4"):
        steered(line, 3, Order.PROMOTE)
    assert of(steered(line, 3, Order.UNPIN), 3).state is State.ROLLED_BACK


def test_what_is_over_cannot_be_pinned() -> None:
    with pytest.raises(BadRequest, match="for good"):
        steered(settled(canary(), State.ROLLED_BACK), 2, Order.PIN)


def test_a_release_is_found_by_the_beginning_of_its_hash() -> None:
    lines = [ReleaseTrack("w", 3, (replace(release(3), name="ab12"), replace(release(1), name="ac00")))]
    assert lifecycle.find(lines, "sha256:ab")[1].version == 3
    with pytest.raises(BadRequest, match="2 releases begin with 'a'"):
        lifecycle.find(lines, "a")
    with pytest.raises(NotFound, match="releases list"):
        lifecycle.find(lines, "ff")


def test_of_a_file_that_was_released_twice_the_newer_release_is_found() -> None:
    line = ReleaseTrack("w", 3, (release(3, file=1), release(2), release(1)))
    assert lifecycle.find([line], release(1).name)[1].version == 3


class Life(RuleBasedStateMachine):
    """Everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ReleaseTrack("w")
        self.now = 0.0
        self.stable = 0
        self.over: dict[int, State] = {}

    @rule(step=st.integers(1, 3), file=st.none() | st.integers(0, 3))
    def publish(self, step: int, file: int | None) -> None:
        self.line = lifecycle.publish(self.line, release(self.line.newest + step, file), self.now, SHARE)

    @rule(back=st.integers(0, 3))
    def publish_an_old_version(self, back: int) -> None:
        old = max(0, self.line.newest - back)
        with pytest.raises(BadRequest):
            lifecycle.publish(self.line, replace(release(old), manifest=b"forged"), self.now, SHARE)

    @precondition(lambda self: self.line.canary is not None)
    @rule(better=st.floats(0, 9), worse=st.floats(0, 9), wait=st.floats(0, 60))
    def measure(self, better: float, worse: float, wait: float) -> None:
        self.now += wait
        before = self.line.canary
        verdict = lifecycle.judge(self.line, Evidence(log_better=better, log_worse=worse), RULE, self.now)
        if verdict is not None:
            assert not before.pinned
            self.line = lifecycle.settle(self.line, before, verdict, None, self.now, SHARE)

    @precondition(lambda self: bool(self.line.releases))
    @rule(which=st.integers(0, 9), order=st.sampled_from(Order))
    def steer(self, which: int, order: Order) -> None:
        chosen = self.line.releases[which % len(self.line.releases)]
        try:
            self.line = lifecycle.steer(self.line, chosen, order, self.now, SHARE)
        except BadRequest as error:
            assert error.field == "release"

    @invariant()
    def there_is_one_trial_and_one_stable_release_at_most(self) -> None:
        found = [r.state for r in self.line.releases]
        assert found.count(State.STABLE) <= 1
        assert found.count(State.CANARY) <= 1

    @invariant()
    def versions_only_grow(self) -> None:
        versions = [r.version for r in self.line.releases]
        assert versions == sorted(set(versions), reverse=True)
        assert self.line.newest >= max(versions, default=0)

    @invariant()
    def a_device_is_never_offered_less_than_it_found_healthy(self) -> None:
        stable, trial = self.line.stable, self.line.canary
        if self.stable:
            assert stable is not None
            assert stable.version >= self.stable
        self.stable = stable.version if stable else 0
        if trial is not None:
            assert trial.version > self.stable
            assert stable is None or trial.name != stable.name

    @invariant()
    def what_is_over_stays_over(self) -> None:
        for r in self.line.releases:
            if r.version in self.over:
                assert r.state is self.over[r.version]
            elif r.state in OVER:
                self.over[r.version] = r.state

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        waiting = [r for r in self.line.releases if r.state is State.CANDIDATE and not r.pinned]
        held = self.line.canary is not None or (self.line.stable is not None and self.line.stable.pinned)
        assert len(waiting) <= (1 if held else 0)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
