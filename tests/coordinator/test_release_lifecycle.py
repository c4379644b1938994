"""Test that a release goes through its states whatever is published, decided and ordered, in any order."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.releases import lifecycle
from coordinator.releases.evidence import LOG_THRESHOLD
from coordinator.releases.lifecycle import CANARY, CANDIDATE, OVER, ROLLED_BACK, STABLE, SUPERSEDED, in_state
from outrider.core.errors import BadRequest, NotFound
from outrider.wire.v1 import coordinator_pb2 as pb

PROMOTE, ROLL_BACK = pb.RELEASE_ACTION_PROMOTE, pb.RELEASE_ACTION_ROLL_BACK
PIN, UNPIN = pb.RELEASE_ACTION_PIN, pb.RELEASE_ACTION_UNPIN
SHARE = 0.25
WINDOW_S = 100.0
"""The bound by which a canary may be worse, and the seconds that it is tried."""


def release(version: int, file: int | None = None) -> pb.Release:
    name = f"{version if file is None else file:064x}"
    return pb.Release(manifest=b"manifest %d" % version, version=version, name=name, state=CANDIDATE, share=SHARE)


def copied(track: pb.ReleaseTrack) -> pb.ReleaseTrack:
    copy = pb.ReleaseTrack()
    copy.CopyFrom(track)
    return copy


def published(*versions: int, track: pb.ReleaseTrack | None = None) -> pb.ReleaseTrack:
    track = copied(track or pb.ReleaseTrack(weights="w"))
    for version in versions:
        lifecycle.publish(track, release(version), 0.0)
    return track


def states(track: pb.ReleaseTrack) -> dict[int, int]:
    return {r.version: r.state for r in track.releases}


def of(track: pb.ReleaseTrack, version: int) -> pb.Release:
    return next(r for r in track.releases if r.version == version)


def settled(track: pb.ReleaseTrack, state: int) -> pb.ReleaseTrack:
    track = copied(track)
    lifecycle.settle(track, in_state(track, CANARY), state, "so", 1.0)
    return track


def steered(track: pb.ReleaseTrack, version: int, action: int) -> pb.ReleaseTrack:
    track = copied(track)
    lifecycle.apply(track, of(track, version), action, 1.0)
    return track


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
    assert states(settled(track, ROLLED_BACK))[4] == CANARY
    promoted = states(settled(track, STABLE))
    assert (promoted[1], promoted[2], promoted[4]) == (
        SUPERSEDED,
        STABLE,
        CANARY,
    )


def test_the_stable_file_signed_again_is_stable_at_once_and_ends_the_trial_of_an_older_version() -> None:
    track = published(2, track=STABLE_1)
    lifecycle.publish(track, release(3, file=1), 1.0)
    assert states(track) == {1: SUPERSEDED, 2: ROLLED_BACK, 3: STABLE}


def test_history_is_short_and_what_it_forgot_stays_refused() -> None:
    track = STABLE_1
    for version in range(2, 100):
        track = settled(published(version, track=track), ROLLED_BACK)
    assert len(track.releases) == lifecycle.HISTORY
    assert in_state(track, STABLE).version == 1
    with pytest.raises(BadRequest, match="not above 99"):
        published(50, track=track)


# --- what is measured decides


BETTER, WORSE = pb.ReleaseEvidence(log_better=LOG_THRESHOLD), pb.ReleaseEvidence(log_worse=LOG_THRESHOLD)
TRIED = published(2, track=STABLE_1)


def test_a_trial_without_evidence_ends_with_its_window() -> None:
    assert lifecycle.judge(TRIED, pb.ReleaseEvidence(), WINDOW_S, 99.9) is None
    assert lifecycle.judge(TRIED, pb.ReleaseEvidence(), WINDOW_S, 100.0)[0] == ROLLED_BACK


@pytest.mark.parametrize("shown", [{"log_better": 99.0}, {"log_worse": 99.0}])
def test_with_too_few_tenants_evidence_decides_nothing_and_the_operator_is_told(shown: dict[str, float]) -> None:
    few, enough = (pb.ReleaseEvidence(tenants=count, tenants_needed=3, **shown) for count in (2, 3))
    assert lifecycle.judge(TRIED, few, WINDOW_S, 99.0) is None
    told = lifecycle.awaited(few)
    assert "2 of the 3 tenants that a decision needs take part: promote it or roll it back" in told
    assert told.startswith("it looks worse" if "log_worse" in shown else "it looks not worse")
    assert lifecycle.awaited(enough) == ""
    assert lifecycle.awaited(pb.ReleaseEvidence(tenants=2, tenants_needed=3)) == ""
    decided = lifecycle.judge(TRIED, enough, WINDOW_S, 1.0)
    assert decided is not None
    assert decided[0] == (ROLLED_BACK if "log_worse" in shown else STABLE)


def test_pins_hold_against_what_is_measured() -> None:
    assert lifecycle.judge(steered(TRIED, 2, PIN), WORSE, WINDOW_S, 1e9) is None
    kept = steered(TRIED, 1, PIN)
    assert lifecycle.judge(kept, BETTER, WINDOW_S, 1.0) is None
    assert lifecycle.judge(kept, WORSE, WINDOW_S, 1.0)[0] == ROLLED_BACK


# --- an operator decides


def test_promoting_goes_from_candidate_to_canary_to_stable() -> None:
    track = steered(published(2, track=steered(STABLE_1, 1, PIN)), 2, PROMOTE)
    assert in_state(track, CANARY).version == 2
    track = steered(track, 2, PROMOTE)
    assert states(track) == {1: SUPERSEDED, 2: STABLE}
    assert steered(track, 2, PROMOTE) == track


def test_nothing_goes_on_trial_against_a_pinned_stable_release_until_it_is_unpinned() -> None:
    track = published(2, 3, track=steered(STABLE_1, 1, PIN))
    assert (in_state(track, CANARY), of(track, 3).state) == (None, CANDIDATE)
    assert in_state(steered(track, 1, UNPIN), CANARY).version == 3


def test_a_pinned_candidate_waits_and_is_too_old_once_a_newer_one_is_stable() -> None:
    track = steered(published(2, 3, track=STABLE_1), 3, PIN)
    track = published(4, track=settled(track, ROLLED_BACK))
    assert (in_state(track, CANARY).version, of(track, 3).state) == (4, CANDIDATE)
    track = settled(track, STABLE)
    with pytest.raises(BadRequest, match="older than 4"):
        steered(track, 3, PROMOTE)
    assert of(steered(track, 3, UNPIN), 3).state == ROLLED_BACK


def test_a_release_is_found_by_the_beginning_of_its_hash() -> None:
    files = [pb.Release(version=3, name="ab12"), pb.Release(version=1, name="ac00")]
    tracks = [pb.ReleaseTrack(weights="w", newest=3, releases=files)]
    assert lifecycle.find(tracks, "sha256:ab")[1].version == 3
    with pytest.raises(BadRequest, match="2 releases begin with 'a'"):
        lifecycle.find(tracks, "a")
    with pytest.raises(NotFound, match="releases list"):
        lifecycle.find(tracks, "ff")


class ReleaseMachine(RuleBasedStateMachine):
    """Let everything that can happen to a release happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.track = pb.ReleaseTrack(weights="w")
        self.now = 0.0
        self.stable = 0
        self.over: dict[int, int] = {}

    @rule(step=st.integers(1, 3), file=st.none() | st.integers(0, 3))
    def publish(self, step: int, file: int | None) -> None:
        lifecycle.publish(self.track, release(self.track.newest + step, file), self.now)

    @rule(back=st.integers(0, 3))
    def publish_an_old_version(self, back: int) -> None:
        old = max(0, self.track.newest - back)
        forged = release(old)
        forged.manifest = b"forged"
        with pytest.raises(BadRequest):
            lifecycle.publish(self.track, forged, self.now)

    @precondition(lambda self: in_state(self.track, CANARY) is not None)
    @rule(better=st.floats(0, 9), worse=st.floats(0, 9), wait=st.floats(0, 60))
    def measure(self, better: float, worse: float, wait: float) -> None:
        self.now += wait
        before, shown = in_state(self.track, CANARY), pb.ReleaseEvidence(log_better=better, log_worse=worse)
        verdict = lifecycle.judge(self.track, shown, WINDOW_S, self.now)
        if verdict is not None:
            assert not before.pinned
            lifecycle.settle(self.track, before, *verdict, self.now)

    @precondition(lambda self: bool(self.track.releases))
    @rule(which=st.integers(0, 9), action=st.sampled_from((PROMOTE, ROLL_BACK, PIN, UNPIN)))
    def steer(self, which: int, action: int) -> None:
        chosen = self.track.releases[which % len(self.track.releases)]
        try:
            lifecycle.apply(self.track, chosen, action, self.now)
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
        stable, trial = in_state(self.track, STABLE), in_state(self.track, CANARY)
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
                assert r.state == self.over[r.version]
            elif r.state in OVER:
                self.over[r.version] = r.state

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        waiting = [r for r in self.track.releases if r.state == CANDIDATE and not r.pinned]
        stable = in_state(self.track, STABLE)
        held = in_state(self.track, CANARY) is not None or (stable is not None and stable.pinned)
        assert len(waiting) <= (1 if held else 0)


TestLife = ReleaseMachine.TestCase
TestLife.settings = settings(max_examples=500 if os.environ.get("OUTRIDER_NIGHTLY") else 50, stateful_step_count=30)
