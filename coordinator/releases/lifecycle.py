"""The life of a release: candidate -> canary -> stable -> superseded, or rolled back on the way.

Pure: a line in, a line out. One canary at a time. The newest candidate goes next, and those before it are passed over,
which is the end of them: they were trained on less.
Each operation may be repeated without harm but PROMOTE, which goes one step each time it is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.releases.records import Evidence, Order, Release, ReleaseTrack, Rule, State
from outrider.core.errors import BadRequest, NotFound

HISTORY = 32
"""Releases of a target that are remembered; the versions of forgotten ones stay refused."""
_OVER = (State.SUPERSEDED, State.ROLLED_BACK)


@dataclass(frozen=True)
class Verdict:
    """What the evidence says of a canary."""

    state: State
    reason: str


def publish(line: ReleaseTrack, new: Release, now: float, share: float) -> ReleaseTrack:
    """The line with another candidate; the stable release's own file is stable at once. The same manifest again changes
    nothing, whatever became of it.

    Raises BadRequest for a version that is not above every one before.
    """
    if any(release.manifest == new.manifest for release in line.releases):
        return line
    if new.version <= line.newest:
        raise BadRequest(
            f"version {new.version} of {line.weights_hash} is not above {line.newest}, the newest that was published;"
            f" sign it again as version {line.newest + 1} or later",
            field="manifest.version",
        )
    grown = replace(line, newest=new.version, releases=(new, *line.releases))
    if line.stable is not None and line.stable.name == new.name:
        grown = _renewed(grown, line.stable, new, now)
    return _trimmed(advance(grown, now, share))


def advance(line: ReleaseTrack, now: float, share: float) -> ReleaseTrack:
    """The newest candidate goes on trial, where nothing is on trial and nobody has pinned what is there."""
    running = [r for r in line.releases if r.state not in _OVER and not (r.state is State.CANDIDATE and r.pinned)]
    for release in running:
        if release.state is State.CANDIDATE and release is not running[0]:
            line = _moved(line, release, State.ROLLED_BACK, now, f"passed over for version {running[0].version}")
    if not running or running[0].state is not State.CANDIDATE:
        return line
    if line.canary is not None or (line.stable is not None and line.stable.pinned):
        return line
    return _begun(line, running[0], now, share, f"on trial with {share:.0%} of the devices")


def settle(
    line: ReleaseTrack, release: Release, verdict: Verdict, evidence: Evidence | None, now: float, share: float
) -> ReleaseTrack:
    """The canary is decided; the next candidate goes on trial. Unchanged where it is no canary any more."""
    canary = line.canary
    if canary is None or canary.manifest != release.manifest:
        return line
    if verdict.state is State.STABLE and line.stable is not None:
        line = _moved(line, line.stable, State.SUPERSEDED, now, f"version {canary.version} is stable in its place")
    return advance(_moved(line, canary, verdict.state, now, verdict.reason, evidence=evidence), now, share)


def judge(line: ReleaseTrack, evidence: Evidence, rule: Rule, now: float) -> Verdict | None:
    """What becomes of the canary; None: it stays on trial. Bad news first: worse in one class outweighs the rest."""
    canary = line.canary
    if canary is None or canary.pinned:
        return None
    if evidence.log_worse >= rule.needed:
        return Verdict(State.ROLLED_BACK, f"worse than the bound of {rule.bound:g} allows: {_figures(evidence)}")
    held = bool(evidence.doubt) or (line.stable is not None and line.stable.pinned)
    if evidence.log_better >= rule.needed and not held:
        return Verdict(State.STABLE, f"not worse than the bound of {rule.bound:g} allows: {_figures(evidence)}")
    if now - canary.since_unix >= rule.window_s:
        doubt = f", in doubt: {evidence.doubt}" if evidence.doubt else ""
        return Verdict(State.ROLLED_BACK, f"undecided after {rule.window_s:.0f} s: {_figures(evidence)}{doubt}")
    return None


def steer(line: ReleaseTrack, release: Release, order: Order, now: float, share: float) -> ReleaseTrack:
    """What an operator wants. Raises BadRequest where the release's state does not allow it, with the way out."""
    return _STEERING[order](line, release, now, share)


def find(lines: list[ReleaseTrack], beginning: str) -> tuple[ReleaseTrack, Release]:
    """The release whose hash begins so; of a file that was released twice, the newer. Raises NotFound or BadRequest."""
    wanted = beginning.removeprefix("sha256:")
    found = [(line, release) for line in lines for release in line.releases if release.name.startswith(wanted)]
    if not found:
        raise NotFound(f"no release {beginning!r}; `outrider releases list` names them")
    if len({(line.weights_hash, release.name) for line, release in found}) > 1:
        raise BadRequest(f"{len(found)} releases begin with {beginning!r}; give more of the hash", field="release")
    return found[0]


def _begun(line: ReleaseTrack, candidate: Release, now: float, share: float, reason: str) -> ReleaseTrack:
    """On trial, but for the stable release's own file: there is nothing to try."""
    if line.stable is not None and line.stable.name == candidate.name:
        return _renewed(line, line.stable, candidate, now)
    return _moved(line, candidate, State.CANARY, now, reason, share=share)


def _renewed(line: ReleaseTrack, stable: Release, new: Release, now: float) -> ReleaseTrack:
    """The stable release's file, signed again: what is older could not follow it any more."""
    for release in line.releases:
        if release.state not in _OVER and release.version < new.version:
            state = State.SUPERSEDED if release is stable else State.ROLLED_BACK
            line = _moved(line, release, state, now, f"version {new.version} took its place")
    line = _moved(line, new, State.STABLE, now, f"the file of version {stable.version}, which was stable")
    return _swapped(line, new, replace(line.stable or new, pinned=stable.pinned))


def _promote(line: ReleaseTrack, release: Release, now: float, share: float) -> ReleaseTrack:
    if release.state is State.STABLE:
        return line
    if release.state is State.CANARY:
        return settle(line, release, Verdict(State.STABLE, "promoted by the operator"), release.evidence, now, share)
    if release.state is not State.CANDIDATE:
        raise BadRequest(
            f"version {release.version} is {_words(release.state)}, and devices that had a newer one take no older one;"
            f" publish its file as version {line.newest + 1}",
            field="release",
        )
    if line.stable is not None and release.version < line.stable.version:
        raise BadRequest(
            f"version {release.version} is older than {line.stable.version}, which is stable: devices would refuse it;"
            f" publish its file as version {line.newest + 1}",
            field="release",
        )
    if line.canary is not None:
        raise BadRequest(
            f"version {line.canary.version} is on trial, and there is one trial at a time; promote it or roll it back",
            field="release",
        )
    return _begun(line, release, now, share, f"put on trial by the operator, with {share:.0%} of the devices")


def _roll_back(line: ReleaseTrack, release: Release, now: float, share: float) -> ReleaseTrack:
    if release.state is State.STABLE:
        raise BadRequest(
            f"version {release.version} is stable: devices have it and take no older one, so going back is a new"
            f" release, the file before it signed as version {line.newest + 1}; `outrider releases rollback"
            f" {release.name[:12]} --key FILE` makes it with the publisher's key",
            field="release",
        )
    if release.state in _OVER:
        return line
    gone = _moved(line, release, State.ROLLED_BACK, now, "rolled back by the operator", evidence=release.evidence)
    return advance(gone, now, share)


def _pin(line: ReleaseTrack, release: Release, now: float, share: float) -> ReleaseTrack:
    if release.state in _OVER:
        raise BadRequest(f"version {release.version} is {_words(release.state)}, for good", field="release")
    return _swapped(line, release, replace(release, pinned=True))


def _unpin(line: ReleaseTrack, release: Release, now: float, share: float) -> ReleaseTrack:
    return advance(_swapped(line, release, replace(release, pinned=False)), now, share)


_STEERING: dict[Order, Callable[[ReleaseTrack, Release, float, float], ReleaseTrack]] = {
    Order.PROMOTE: _promote,
    Order.ROLL_BACK: _roll_back,
    Order.PIN: _pin,
    Order.UNPIN: _unpin,
}


def _moved(
    line: ReleaseTrack,
    release: Release,
    state: State,
    now: float,
    reason: str,
    *,
    share: float = 0.0,
    evidence: Evidence | None = None,
) -> ReleaseTrack:
    """A new state is not pinned: a pin is about the old one."""
    moved = replace(
        release,
        state=state,
        since_unix=now,
        reason=reason,
        share=share,
        pinned=False,
        evidence=evidence or release.evidence,
    )
    return _swapped(line, release, moved)


def _swapped(line: ReleaseTrack, old: Release, new: Release) -> ReleaseTrack:
    kept = tuple(new if release.version == old.version else release for release in line.releases)
    return replace(line, releases=kept)


def _trimmed(line: ReleaseTrack) -> ReleaseTrack:
    """Without the oldest of those that are over."""
    room = HISTORY - sum(release.state not in _OVER for release in line.releases)
    over = [release.version for release in line.releases if release.state in _OVER][: max(0, room)]
    return replace(line, releases=tuple(r for r in line.releases if r.state not in _OVER or r.version in over))


def _words(state: State) -> str:
    return state.value.replace("_", " ")


def _figures(e: Evidence) -> str:
    return (
        f"{e.canary_right:.1%} of positions guessed right in {e.canary_samples} samples,"
        f" {e.stable_right:.1%} in {e.stable_samples} beside it"
    )
