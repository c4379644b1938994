"""What `outrider releases` prints."""

from __future__ import annotations

import time
from collections.abc import Sequence

from coordinator.releases.codec import state_from_proto
from coordinator.releases.records import State
from outrider.core.text import facts, table
from outrider.wire.manifest import Manifest, read_unverified
from outrider.wire.v1 import coordinator_pb2 as pb

SHORT = 12
"""Letters of a hash that are shown: enough to tell releases apart, and to name one with."""
_COLUMNS = ("RELEASE", "VERSION", "TARGET", "STATE", "SINCE", "SIZE", "REASON")


def describe_releases(releases: Sequence[pb.Release]) -> str:
    """One line each."""
    if not releases:
        return "no releases: devices draft with what their verifiers offer"
    return table(_COLUMNS, [_row(release, read_unverified(release.manifest)) for release in releases])


def describe_release(release: pb.Release) -> str:
    """All that is known of one."""
    manifest = read_unverified(release.manifest)
    known = {
        "release": manifest.digest,
        "version": str(manifest.version),
        "state": f"{_state(release)}, since {_when(release.since_unix)}",
        "reason": release.reason,
        "target": f"{manifest.weights_hash}, tokenizer {manifest.tokenizer_hash}",
        "file": f"{_size(manifest.size)}, {manifest.quantization}; {', '.join(manifest.urls) or 'no URLs'}",
        "trained from": manifest.parent.removeprefix("sha256:") or "nothing that was released",
        "signed by": pb.SignedManifest.FromString(release.manifest).key_id,
        "created": _when(manifest.created_unix),
        **{f"gate: {name}": f"{value:g}" for name, value in sorted(manifest.metrics.items())},
        **(_evidence(release.evidence) if release.HasField("evidence") else {}),
    }
    return facts(known)


def _row(release: pb.Release, manifest: Manifest) -> tuple[str, ...]:
    return (
        manifest.digest[:SHORT],
        str(manifest.version),
        manifest.weights_hash.removeprefix("sha256:")[:SHORT],
        _state(release),
        _when(release.since_unix),
        _size(manifest.size),
        release.reason,
    )


def _evidence(e: pb.ReleaseEvidence) -> dict[str, str]:
    return {
        "measured": f"{e.canary_right:.1%} of positions guessed right in {e.canary_samples} samples,"
        f" {e.stable_right:.1%} in {e.stable_samples} beside it",
        "evidence": f"that it is not worse e^{e.log_better:.1f}, that it is worse e^{e.log_worse:.1f}",
    }


def _state(release: pb.Release) -> str:
    state = state_from_proto(release.state)
    named = state.value.replace("_", " ") if state else "unknown"
    share = f" {release.share:.0%}" if state is State.CANARY else ""
    return f"{named}{share}{', pinned' if release.pinned else ''}"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size} B"


def _when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if unix else "-"
