"""Decide the life of a release: candidate -> canary -> stable -> superseded, or rolled back on the way.

The functions are pure: a track goes in and a track comes out. There is one canary at a time. The newest candidate goes
next, and older ones are rolled back: they were trained on less. Every operation may be repeated without harm but
PROMOTE, which goes one step each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.releases.evidence import LOG_THRESHOLD
from coordinator.releases.records import (
    CanaryEvidence,
    LifecycleState,
    Release,
    ReleaseAction,
    ReleaseTrack,
)
from outrider.core.errors import BadRequest, NotFound

HISTORY = 32
"""Releases of a target that are remembered; the versions of forgotten ones stay refused."""
_OVER = (LifecycleState.SUPERSEDED, LifecycleState.ROLLED_BACK)


def publish(track: ReleaseTrack, new: Release, now: float) -> ReleaseTrack:
    """Return the track with another candidate. The stable release's own file is stable at once.

    A manifest that is in the track already changes nothing. Raises BadRequest for a version that is not above all that
    were published before.
    """
    if track.find(new.manifest) is not None:
        return track
    if new.version <= track.newest:
        raise BadRequest(
            f"version {new.version} of {track.weights} is not above {track.newest}, the newest that was published;"
            f" sign it again as version {track.newest + 1} or later",
            field="manifest.version",
        )
    grown = replace(track, newest=new.version, releases=(new, *track.releases))
    if track.stable is not None and track.stable.name == new.name:
        grown = _renewed(grown, track.stable, new, now)
    return _trimmed(advance(grown, now))


def advance(track: ReleaseTrack, now: float) -> ReleaseTrack:
    """Make the newest candidate the canary, unless there is a canary or a pin keeps what is there."""
    running = [
        r for r in track.releases if r.state not in _OVER and not (r.state is LifecycleState.CANDIDATE and r.pinned)
    ]
    for release in running:
        if release.state is LifecycleState.CANDIDATE and release is not running[0]:
            reason = f"passed over for version {running[0].version}"
            track = _moved(track, release, LifecycleState.ROLLED_BACK, now, reason)
    if not running or running[0].state is not LifecycleState.CANDIDATE:
        return track
    if track.canary is not None or (track.stable is not None and track.stable.pinned):
        return track
    return _begun(track, running[0], now, f"on trial with {running[0].share:.0%} of the devices")


def judge(
    track: ReleaseTrack, evidence: CanaryEvidence, bound: float, window_s: float, now: float
) -> tuple[LifecycleState, str] | None:
    """Return the canary's new state and why, None if it stays.

    Where too few tenants take part, what they show decides nothing: any of them could have made it up. Then the
    operator decides, or the end of the window, which rolls back whatever has not proved itself.
    """
    canary = track.canary
    if canary is None or canary.pinned:
        return None
    allowed, measured = f"than the bound of {bound:g} allows", _measured(evidence)
    if not evidence.tenants_missing:
        if evidence.log_worse >= LOG_THRESHOLD:
            return LifecycleState.ROLLED_BACK, f"worse {allowed}: {measured}"
        held = track.stable is not None and track.stable.pinned
        if evidence.log_better >= LOG_THRESHOLD and not held:
            return LifecycleState.STABLE, f"not worse {allowed}: {measured}"
    if now - canary.since_unix >= window_s:
        few = f", {_tenants_words(evidence)}" if evidence.tenants_missing else ""
        return LifecycleState.ROLLED_BACK, f"undecided after {window_s:.0f} s: {measured}{few}"
    return None


def awaited(evidence: CanaryEvidence, bound: float) -> str:
    """Return what the operator is told about a canary whose evidence would decide if more tenants took part, or ""."""
    if not evidence.tenants_missing:
        return ""
    for log, shown in ((evidence.log_worse, "worse than"), (evidence.log_better, "not worse than")):
        if log >= LOG_THRESHOLD:
            few = _tenants_words(evidence)
            return f"it looks {shown} the bound of {bound:g} allows, but {few}: promote it or roll it back"
    return ""


def settle(
    track: ReleaseTrack,
    release: Release,
    state: LifecycleState,
    reason: str,
    evidence: CanaryEvidence | None,
    now: float,
) -> ReleaseTrack:
    """End the canary's trial with this state, and begin the next. Unchanged if it is not the canary any more."""
    canary = track.canary
    if canary is None or canary.manifest != release.manifest:
        return track
    if state is LifecycleState.STABLE and track.stable is not None:
        replaced = f"version {canary.version} is stable in its place"
        track = _moved(track, track.stable, LifecycleState.SUPERSEDED, now, replaced)
    return advance(_moved(track, canary, state, now, reason, evidence=evidence or canary.evidence), now)


def apply(track: ReleaseTrack, release: Release, action: ReleaseAction, now: float) -> ReleaseTrack:
    """Carry out an operator's action. Raises BadRequest if the release's state forbids it, with a way out."""
    match action:
        case ReleaseAction.PROMOTE:
            return _promote(track, release, now)
        case ReleaseAction.ROLL_BACK:
            return _roll_back(track, release, now)
        case ReleaseAction.UNPIN:
            return advance(_swapped(track, replace(release, pinned=False)), now)
    if release.state in _OVER:
        raise _refused(f"version {release.version} is {_words(release.state)}, for good")
    return _swapped(track, replace(release, pinned=True))


def find(tracks: Sequence[ReleaseTrack], beginning: str) -> tuple[ReleaseTrack, Release]:
    """Return the newest release whose file's hash begins so. Raises NotFound, or BadRequest if several files' do."""
    wanted = beginning.removeprefix("sha256:")
    found = [(track, release) for track in tracks for release in track.releases if release.name.startswith(wanted)]
    if not found:
        raise NotFound(f"no release {beginning!r}; `outrider releases list` names them")
    if len({(track.weights, release.name) for track, release in found}) > 1:
        raise BadRequest(f"{len(found)} releases begin with {beginning!r}; give more of the hash", field="release")
    return found[0]


def _begun(track: ReleaseTrack, candidate: Release, now: float, reason: str) -> ReleaseTrack:
    """Put a candidate on trial. The stable release's own file needs none."""
    if track.stable is not None and track.stable.name == candidate.name:
        return _renewed(track, track.stable, candidate, now)
    return _moved(track, candidate, LifecycleState.CANARY, now, reason, share=candidate.share)


def _renewed(track: ReleaseTrack, stable: Release, new: Release, now: float) -> ReleaseTrack:
    """Make a new version of the stable file stable. Older versions end: they could not follow it any more."""
    for release in track.releases:
        if release.state not in _OVER and release.version < new.version:
            state = LifecycleState.SUPERSEDED if release is stable else LifecycleState.ROLLED_BACK
            track = _moved(track, release, state, now, f"version {new.version} took its place")
    reason = f"the file of version {stable.version}, which was stable"
    return _moved(track, new, LifecycleState.STABLE, now, reason, pinned=stable.pinned)


def _promote(track: ReleaseTrack, release: Release, now: float) -> ReleaseTrack:
    if release.state is LifecycleState.STABLE:
        return track
    if release.state is LifecycleState.CANARY:
        return settle(track, release, LifecycleState.STABLE, "promoted by the operator", None, now)
    if release.state is not LifecycleState.CANDIDATE:
        raise _refused(
            f"version {release.version} is {_words(release.state)}, and devices that had a newer one take no older one;"
            f" publish its file as version {track.newest + 1}"
        )
    if track.stable is not None and release.version < track.stable.version:
        raise _refused(
            f"version {release.version} is older than {track.stable.version}, which is stable: devices would refuse it;"
            f" publish its file as version {track.newest + 1}"
        )
    if track.canary is not None:
        raise _refused(
            f"version {track.canary.version} is on trial, and there is one trial at a time; promote it or roll it back"
        )
    return _begun(track, release, now, f"put on trial by the operator, with {release.share:.0%} of the devices")


def _roll_back(track: ReleaseTrack, release: Release, now: float) -> ReleaseTrack:
    if release.state is LifecycleState.STABLE:
        raise _refused(
            f"version {release.version} is stable: devices have it and take no older one, so going back is a new"
            f" release, the file before it signed as version {track.newest + 1}; `outrider releases rollback"
            f" {release.name[:12]} --key FILE` makes it with the publisher's key"
        )
    if release.state in _OVER:
        return track
    moved = _moved(track, release, LifecycleState.ROLLED_BACK, now, "rolled back by the operator")
    return advance(moved, now)


def _moved(
    track: ReleaseTrack, release: Release, state: LifecycleState, now: float, reason: str, **changes: Any
) -> ReleaseTrack:
    """Give a release another state. It is not pinned then, since a pin belongs to the state before."""
    moved = {"share": 0.0, "pinned": False, **changes}
    return _swapped(track, replace(release, state=state, since_unix=now, reason=reason, **moved))


def _swapped(track: ReleaseTrack, new: Release) -> ReleaseTrack:
    """Put a release in the place of the one with its version."""
    return replace(track, releases=tuple(new if new.version == r.version else r for r in track.releases))


def _trimmed(track: ReleaseTrack) -> ReleaseTrack:
    """Remove the oldest of the releases that are over."""
    room = HISTORY - sum(release.state not in _OVER for release in track.releases)
    over = [release.version for release in track.releases if release.state in _OVER][: max(0, room)]
    return replace(track, releases=tuple(r for r in track.releases if r.state not in _OVER or r.version in over))


def _refused(why: str) -> BadRequest:
    return BadRequest(why, field="release")


def _words(state: LifecycleState) -> str:
    return state.value.replace("_", " ")


def _measured(e: CanaryEvidence) -> str:
    return (
        f"first proposal accepted at {e.canary_acceptance:.1%} of positions in {e.canary_samples} samples,"
        f" {e.stable_acceptance:.1%} in {e.stable_samples} beside it"
    )


def _tenants_words(evidence: CanaryEvidence) -> str:
    """Return how many tenants take part, and how many a decision needs."""
    return f"{evidence.tenants} of the {evidence.tenants_needed} tenants that a decision needs take part"
