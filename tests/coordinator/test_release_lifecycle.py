"""Test that a release goes through its states whatever is published, decided and ordered, in any order."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.releases import lifecycle
from coordinator.releases.evidence import LOG_THRESHOLD
from coordinator.releases.records import (
    CanaryEvidence,
    LifecycleState,
    Release,
    ReleaseAction,
    ReleaseTrack,
)
from outrider.core.errors import BadRequest, NotFound

CANDIDATE, CANARY, STABLE, SUPERSEDED, ROLLED_BACK = LifecycleState
SHARE = 0.25
POLICY = 0.05, 100.0
"""The bound by which a canary may be worse, and the seconds that it is tried."""
OVER = (SUPERSEDED, ROLLED_BACK)


def release(version: int, file: int | None = None) -> Release:
    name = f"{version if file is None else file:064x}"
    return Release(b"manifest %d" % version, version, name, CANDIDATE, 0.0, share=SHARE)


def published(*versions: int, track: ReleaseTrack | None = None) -> ReleaseTrack:
    track = track or ReleaseTrack("w")
    for version in versions:
        track = lifecycle.publish(track, release(version), 0.0)
    return track


def states(track: ReleaseTrack) -> dict[int, LifecycleState]:
    return {r.version: r.state for r in track.releases}


def of(track: ReleaseTrack, version: int) -> Release:
    return next(r for r in track.releases if r.version == version)


def settled(track: ReleaseTrack, state: LifecycleState) -> ReleaseTrack:
    return lifecycle.settle(track, track.canary, state, "so", CanaryEvidence(), 1.0)


def steered(track: ReleaseTrack, version: int, action: ReleaseAction) -> ReleaseTrack:
    return lifecycle.apply(track, of(track, version), action, 1.0)


STABLE_1 = settled(published(1), STABLE)


def test_what_comes_during_a_trial_waits_and_the_newest_goes_next() -> None:
    track = published(2, 3, 4, track=STABLE_1)
    assert states(track) == {
        1: STABLE,
        2: CANARY,
        3: ROLLED_BACK,
        4: CANDIDATE,
    }
    assert "version 4" in of(track, 3).reason
    assert states(settled(track, ROLLED_BACK))[4] is CANARY
    promoted = states(settled(track, STABLE))
    assert (promoted[1], promoted[2], promoted[4]) == (
        SUPERSEDED,
        STABLE,
        CANARY,
    )


def test_the_stable_file_signed_again_is_stable_at_once_and_ends_the_trial_of_an_older_version() -> None:
    track = lifecycle.publish(published(2, track=STABLE_1), release(3, file=1), 1.0)
    assert states(track) == {1: SUPERSEDED, 2: ROLLED_BACK, 3: STABLE}


def test_history_is_short_and_what_it_forgot_stays_refused() -> None:
    track = STABLE_1
    for version in range(2, 100):
        track = settled(published(version, track=track), ROLLED_BACK)
    assert len(track.releases) == lifecycle.HISTORY
    assert track.stable.version == 1
    with pytest.raises(BadRequest, match="not above 99"):
        published(50, track=track)


# --- what is measured decides


def canary(**changes: object) -> ReleaseTrack:
    track = published(2, track=STABLE_1)
    return replace(track, releases=tuple(replace(r, **changes) if r.version == 2 else r for r in track.releases))


BETTER, WORSE = CanaryEvidence(log_better=LOG_THRESHOLD), CanaryEvidence(log_worse=LOG_THRESHOLD)


def test_a_trial_without_evidence_ends_with_its_window() -> None:
    assert lifecycle.judge(canary(), CanaryEvidence(), *POLICY, 99.9) is None
    assert lifecycle.judge(canary(), CanaryEvidence(), *POLICY, 100.0)[0] is ROLLED_BACK


@pytest.mark.parametrize("shown", [{"log_better": 99.0}, {"log_worse": 99.0}])
def test_with_too_few_tenants_evidence_decides_nothing_and_the_operator_is_told(shown: dict[str, float]) -> None:
    few = CanaryEvidence(tenants=2, tenants_needed=3, **shown)
    assert lifecycle.judge(canary(), few, *POLICY, 99.0) is None
    told = lifecycle.awaited(few, POLICY[0])
    assert "2 of the 3 tenants that a decision needs take part: promote it or roll it back" in told
    assert told.startswith("it looks worse" if "log_worse" in shown else "it looks not worse")
    assert lifecycle.awaited(replace(few, tenants=3), POLICY[0]) == ""
    assert lifecycle.awaited(CanaryEvidence(tenants=2, tenants_needed=3), POLICY[0]) == ""
    enough = lifecycle.judge(canary(), replace(few, tenants=3), *POLICY, 1.0)
    assert enough is not None
    assert enough[0] is (ROLLED_BACK if "log_worse" in shown else STABLE)


def test_pins_hold_against_what_is_measured() -> None:
    assert lifecycle.judge(canary(pinned=True), WORSE, *POLICY, 1e9) is None
    kept = steered(canary(), 1, ReleaseAction.PIN)
    assert lifecycle.judge(kept, BETTER, *POLICY, 1.0) is None
    assert lifecycle.judge(kept, WORSE, *POLICY, 1.0)[0] is ROLLED_BACK


def test_a_decision_that_comes_second_changes_nothing() -> None:
    track = canary()
    first = lifecycle.settle(track, track.canary, STABLE, "so", BETTER, 1.0)
    assert lifecycle.settle(first, track.canary, ROLLED_BACK, "no", WORSE, 2.0) is first
    assert of(first, 2).evidence == BETTER


# --- an operator decides


def test_promoting_goes_from_candidate_to_canary_to_stable() -> None:
    track = steered(published(2, track=steered(STABLE_1, 1, ReleaseAction.PIN)), 2, ReleaseAction.PROMOTE)
    assert track.canary.version == 2
    track = steered(track, 2, ReleaseAction.PROMOTE)
    assert states(track) == {1: SUPERSEDED, 2: STABLE}
    assert steered(track, 2, ReleaseAction.PROMOTE) is track


def test_nothing_goes_on_trial_against_a_pinned_stable_release_until_it_is_unpinned() -> None:
    track = published(2, 3, track=steered(STABLE_1, 1, ReleaseAction.PIN))
    assert (track.canary, of(track, 3).state) == (None, CANDIDATE)
    assert steered(track, 1, ReleaseAction.UNPIN).canary.version == 3


def test_a_pinned_candidate_waits_and_is_too_old_once_a_newer_one_is_stable() -> None:
    track = steered(published(2, 3, track=STABLE_1), 3, ReleaseAction.PIN)
    track = published(4, track=settled(track, ROLLED_BACK))
    assert (track.canary.version, of(track, 3).state) == (4, CANDIDATE)
    track = settled(track, STABLE)
    with pytest.raises(BadRequest, match="older than 4"):
        steered(track, 3, ReleaseAction.PROMOTE)
    assert of(steered(track, 3, ReleaseAction.UNPIN), 3).state is ROLLED_BACK


def test_a_release_is_found_by_the_beginning_of_its_hash() -> None:
    tracks = [ReleaseTrack("w", 3, (replace(release(3), name="ab12"), replace(release(1), name="ac00")))]
    assert lifecycle.find(tracks, "sha256:ab")[1].version == 3
    with pytest.raises(BadRequest, match="2 releases begin with 'a'"):
        lifecycle.find(tracks, "a")
    with pytest.raises(NotFound, match="releases list"):
        lifecycle.find(tracks, "ff")


class ReleaseMachine(RuleBasedStateMachine):
    """Let everything that can happen to a release happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.track = ReleaseTrack("w")
        self.now = 0.0
        self.stable = 0
        self.over: dict[int, LifecycleState] = {}

    @rule(step=st.integers(1, 3), file=st.none() | st.integers(0, 3))
    def publish(self, step: int, file: int | None) -> None:
        self.track = lifecycle.publish(self.track, release(self.track.newest + step, file), self.now)

    @rule(back=st.integers(0, 3))
    def publish_an_old_version(self, back: int) -> None:
        old = max(0, self.track.newest - back)
        with pytest.raises(BadRequest):
            lifecycle.publish(self.track, replace(release(old), manifest=b"forged"), self.now)

    @precondition(lambda self: self.track.canary is not None)
    @rule(better=st.floats(0, 9), worse=st.floats(0, 9), wait=st.floats(0, 60))
    def measure(self, better: float, worse: float, wait: float) -> None:
        self.now += wait
        before = self.track.canary
        verdict = lifecycle.judge(self.track, CanaryEvidence(log_better=better, log_worse=worse), *POLICY, self.now)
        if verdict is not None:
            assert not before.pinned
            self.track = lifecycle.settle(self.track, before, *verdict, None, self.now)

    @precondition(lambda self: bool(self.track.releases))
    @rule(which=st.integers(0, 9), action=st.sampled_from(ReleaseAction))
    def steer(self, which: int, action: ReleaseAction) -> None:
        chosen = self.track.releases[which % len(self.track.releases)]
        try:
            self.track = lifecycle.apply(self.track, chosen, action, self.now)
        except BadRequest as error:
            assert error.field == "release"

    @invariant()
    def there_is_one_trial_and_one_stable_release_at_most(self) -> None:
        found = [r.state for r in self.track.releases]
        assert found.count(STABLE) <= 1
        assert found.count(CANARY) <= 1

    @invariant()
    def versions_only_grow(self) -> None:
        versions = [r.version for r in self.track.releases]
        assert versions == sorted(set(versions), reverse=True)
        assert self.track.newest >= max(versions, default=0)

    @invariant()
    def a_device_is_never_offered_less_than_it_found_healthy(self) -> None:
        stable, trial = self.track.stable, self.track.canary
        if self.stable:
            assert stable is not None
            assert stable.version >= self.stable
        self.stable = stable.version if stable else 0
        if trial is not None:
            assert trial.version > self.stable
            assert stable is None or trial.name != stable.name

    @invariant()
    def what_is_over_stays_over(self) -> None:
        for r in self.track.releases:
            if r.version in self.over:
                assert r.state is self.over[r.version]
            elif r.state in OVER:
                self.over[r.version] = r.state

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        waiting = [r for r in self.track.releases if r.state is CANDIDATE and not r.pinned]
        held = self.track.canary is not None or (self.track.stable is not None and self.track.stable.pinned)
        assert len(waiting) <= (1 if held else 0)


TestLife = ReleaseMachine.TestCase
TestLife.settings = settings(max_examples=500 if os.environ.get("OUTRIDER_NIGHTLY") else 50, stateful_step_count=30)
