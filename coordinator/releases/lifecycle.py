"""Decide the life of a release: candidate -> canary -> stable -> superseded, or rolled back on the way.

The functions change a track that their caller keeps if they return; they read no clock. There is one canary at a time.
The newest candidate goes next, and older ones are rolled back: they were trained on less. Every operation may be
repeated without harm but PROMOTE, which goes one step each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from coordinator.releases.evidence import BOUND, LOG_THRESHOLD
from outrider.core.errors import BadRequest, NotFound
from outrider.wire.manifest import state_of
from outrider.wire.v1 import coordinator_pb2 as pb

CANDIDATE, CANARY, STABLE = pb.RELEASE_STATE_CANDIDATE, pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_STABLE
SUPERSEDED, ROLLED_BACK = pb.RELEASE_STATE_SUPERSEDED, pb.RELEASE_STATE_ROLLED_BACK
OVER = (SUPERSEDED, ROLLED_BACK)
HISTORY = 32
"""Releases of a target that are remembered; the versions of forgotten ones stay refused."""


def in_state(track: pb.ReleaseTrack, state: pb.ReleaseState) -> pb.Release | None:
    """Return the newest release in this state; there is one stable release at most, and one canary."""
    return next((release for release in track.releases if release.state == state), None)


def signed_as(track: pb.ReleaseTrack, manifest: bytes) -> pb.Release | None:
    """Return the release with this manifest, None if there is none."""
    return next((release for release in track.releases if release.manifest == manifest), None)


def in_canary(device_id: str, release: str, share: float) -> bool:
    """Return whether a device is drawn for the share that tries a release. A device without a name never is.

    It depends on the two names alone, so it is the same at every coordinator and every time. Another release draws
    anew, so that no device is always first. A greater share keeps the devices that were drawn.
    """
    digest = hashlib.sha256(f"{release}:{device_id}".encode()).digest()
    return device_id != "" and int.from_bytes(digest[:8]) < share * 2**64


def arm(track: pb.ReleaseTrack, draft: str, device_id: str) -> str:
    """Return "c" for sessions that draft with the canary, "s" for those it is compared with, "" for all others.

    draft: what the session drafts with, as its device says, which counts only if that was offered to the device.
    Without a stable release every other draft takes its place.
    """
    canary, stable = in_state(track, CANARY), in_state(track, STABLE)
    tries = canary is not None and draft == canary.name
    if canary is None or not draft or tries is not in_canary(device_id, canary.name, canary.share):
        return ""
    if tries:
        return "c"
    return "s" if stable is None or draft == stable.name else ""


def find(tracks: Iterable[pb.ReleaseTrack], beginning: str) -> tuple[pb.ReleaseTrack, pb.Release]:
    """Return the newest release whose file's hash begins so. Raises NotFound, or BadRequest if several files' do."""
    wanted = beginning.removeprefix("sha256:")
    found = [(track, release) for track in tracks for release in track.releases if release.name.startswith(wanted)]
    if not found:
        raise NotFound(f"no release {beginning!r}; `outrider releases list` names them")
    if len({(track.weights, release.name) for track, release in found}) > 1:
        raise BadRequest(f"{len(found)} releases begin with {beginning!r}; give more of the hash", field="release")
    return found[0]


def publish(track: pb.ReleaseTrack, new: pb.Release, now: float) -> None:
    """Add another candidate. The stable release's own file is stable at once.

    A manifest that is in the track already changes nothing. Raises BadRequest for a version that is not above all that
    were published before.
    """
    if signed_as(track, new.manifest) is not None:
        return
    if new.version <= track.newest:
        raise BadRequest(
            f"version {new.version} of {track.weights} is not above {track.newest}, the newest that was published;"
            f" sign it again as version {track.newest + 1} or later",
            field="manifest.version",
        )
    track.newest = new.version
    track.releases.insert(0, new)
    stable = in_state(track, STABLE)
    if stable is not None and stable.name == new.name:
        _renew(track, stable, track.releases[0], now)
    _advance(track, now)
    over = [release for release in track.releases if release.state in OVER]
    for release in over[max(0, HISTORY - len(track.releases) + len(over)) :]:
        track.releases.remove(release)


def judge(
    track: pb.ReleaseTrack, evidence: pb.ReleaseEvidence, window_s: float, now: float
) -> tuple[pb.ReleaseState, str] | None:
    """Return the canary's new state and why, None if it stays.

    Where too few tenants take part, what they show decides nothing: any of them could have made it up. Then the
    operator decides, or the end of the window, which rolls back whatever has not proved itself.
    """
    canary, stable = in_state(track, CANARY), in_state(track, STABLE)
    if canary is None or canary.pinned:
        return None
    measured, few = _measured(evidence), _few(evidence)
    if not few:
        if evidence.log_worse >= LOG_THRESHOLD:
            return ROLLED_BACK, f"worse than the bound of {BOUND:g} allows: {measured}"
        if evidence.log_better >= LOG_THRESHOLD and not (stable is not None and stable.pinned):
            return STABLE, f"not worse than the bound of {BOUND:g} allows: {measured}"
    if now - canary.since_unix >= window_s:
        return ROLLED_BACK, f"undecided after {window_s:.0f} s: {measured}{few and f', {few}'}"
    return None


def awaited(evidence: pb.ReleaseEvidence) -> str:
    """Return what the operator is told about a canary whose evidence would decide if more tenants took part, or ""."""
    if few := _few(evidence):
        for log, shown in ((evidence.log_worse, "worse than"), (evidence.log_better, "not worse than")):
            if log >= LOG_THRESHOLD:
                return f"it looks {shown} the bound of {BOUND:g} allows, but {few}: promote it or roll it back"
    return ""


def settle(track: pb.ReleaseTrack, canary: pb.Release, state: pb.ReleaseState, reason: str, now: float) -> None:
    """End the canary's trial with this state, and begin the next."""
    stable = in_state(track, STABLE)
    if state == STABLE and stable is not None:
        _move(stable, SUPERSEDED, now, f"version {canary.version} is stable in its place")
    _move(canary, state, now, reason)
    _advance(track, now)


def apply(track: pb.ReleaseTrack, release: pb.Release, action: pb.ReleaseAction, now: float) -> None:
    """Carry out an operator's action. Raises BadRequest if the release's state forbids it, with a way out."""
    if action == pb.RELEASE_ACTION_PROMOTE:
        _promote(track, release, now)
    elif action == pb.RELEASE_ACTION_ROLL_BACK:
        _roll_back(track, release, now)
    elif action == pb.RELEASE_ACTION_UNPIN:
        release.pinned = False
        _advance(track, now)
    elif release.state in OVER:
        raise _refused(f"version {release.version} is {words(release)}, for good")
    else:
        release.pinned = True


def words(release: pb.Release) -> str:
    return state_of(release).replace("_", " ")


def _promote(track: pb.ReleaseTrack, release: pb.Release, now: float) -> None:
    canary, stable = in_state(track, CANARY), in_state(track, STABLE)
    if release.state == STABLE:
        return
    if release.state == CANARY:
        settle(track, release, STABLE, "promoted by the operator", now)
        return
    again = f"publish its file as version {track.newest + 1}"
    if release.state in OVER:
        raise _refused(
            f"version {release.version} is {words(release)}, and devices that had a newer one take no older one;"
            f" {again}"
        )
    if stable is not None and release.version < stable.version:
        raise _refused(
            f"version {release.version} is older than {stable.version}, which is stable: devices would refuse it;"
            f" {again}"
        )
    if canary is not None:
        raise _refused(
            f"version {canary.version} is on trial, and there is one trial at a time; promote it or roll it back"
        )
    _begin(track, release, now, f"put on trial by the operator, with {release.share:.0%} of the devices")


def _roll_back(track: pb.ReleaseTrack, release: pb.Release, now: float) -> None:
    if release.state == STABLE:
        raise _refused(
            f"version {release.version} is stable: devices have it and take no older one, so going back is a new"
            f" release, the file before it signed as version {track.newest + 1}; `outrider releases rollback"
            f" {release.name[:12]} --key FILE` makes it with the publisher's key"
        )
    if release.state not in OVER:
        _move(release, ROLLED_BACK, now, "rolled back by the operator")
        _advance(track, now)


def _advance(track: pb.ReleaseTrack, now: float) -> None:
    """Make the newest candidate the canary, unless there is a canary or a pin keeps what is there."""
    running = [r for r in track.releases if r.state not in OVER and not (r.state == CANDIDATE and r.pinned)]
    for release in running[1:]:
        if release.state == CANDIDATE:
            _move(release, ROLLED_BACK, now, f"passed over for version {running[0].version}")
    stable = in_state(track, STABLE)
    held = in_state(track, CANARY) is not None or (stable is not None and stable.pinned)
    if running and running[0].state == CANDIDATE and not held:
        _begin(track, running[0], now, f"on trial with {running[0].share:.0%} of the devices")


def _begin(track: pb.ReleaseTrack, candidate: pb.Release, now: float, reason: str) -> None:
    """Put a candidate on trial. The stable release's own file needs none."""
    stable = in_state(track, STABLE)
    if stable is not None and stable.name == candidate.name:
        _renew(track, stable, candidate, now)
    else:
        _move(candidate, CANARY, now, reason, share=candidate.share)


def _renew(track: pb.ReleaseTrack, stable: pb.Release, new: pb.Release, now: float) -> None:
    """Make a new version of the stable file stable. Older versions end: they could not follow it any more."""
    pinned, version = stable.pinned, stable.version
    for release in track.releases:
        if release.state not in OVER and release.version < new.version:
            state = SUPERSEDED if release.version == version else ROLLED_BACK
            _move(release, state, now, f"version {new.version} took its place")
    _move(new, STABLE, now, f"the file of version {version}, which was stable")
    new.pinned = pinned


def _move(release: pb.Release, state: pb.ReleaseState, now: float, reason: str, share: float = 0.0) -> None:
    """Give a release another state. It is not pinned then, since a pin belongs to the state before."""
    release.state, release.since_unix, release.reason = state, now, reason
    release.share, release.pinned = share, False


def _refused(why: str) -> BadRequest:
    return BadRequest(why, field="release")


def _measured(e: pb.ReleaseEvidence) -> str:
    return (
        f"first proposal accepted at {e.canary_acceptance:.1%} of positions in {e.canary_samples} samples,"
        f" {e.stable_acceptance:.1%} in {e.stable_samples} beside it"
    )


def _few(e: pb.ReleaseEvidence) -> str:
    """Return how many tenants take part where a decision needs more; "" if there are enough."""
    if e.tenants >= e.tenants_needed:
        return ""
    return f"{e.tenants} of the {e.tenants_needed} tenants that a decision needs take part"
