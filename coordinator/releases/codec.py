"""Convert between protobuf and records of releases, and check everything inbound against a bound."""

from __future__ import annotations

import re

from coordinator.releases.records import CanaryEvidence, LifecycleState, Release, ReleaseAction
from outrider.core.errors import BadRequest
from outrider.wire.ticket import MAX_LABEL
from outrider.wire.v1 import coordinator_pb2 as pb

_LABEL = re.compile(r"[A-Za-z0-9._-]{0,64}")
_BEGINNING = re.compile(r"(sha256:)?[0-9a-f]{1,64}")
_ACTIONS = {pb.ReleaseAction.Value(f"RELEASE_ACTION_{action.name}"): action for action in ReleaseAction}


def offer_from_proto(request: pb.OfferReleaseRequest) -> tuple[str, str]:
    """Return the target's weights hash and the device's id. Raises BadRequest."""
    if not 0 < len(request.target) <= MAX_LABEL or not request.target.isprintable():
        raise BadRequest.bound("target", repr(request.target[:MAX_LABEL]), f"1 to {MAX_LABEL} printable letters")
    for field, value in (("device_id", request.device_id), ("in_use", request.in_use)):
        if not _LABEL.fullmatch(value):
            raise BadRequest.bound(field, repr(value[:64]), "at most 64 letters, digits, '.', '_' or '-'")
    return request.target, request.device_id


def offer_to_proto(serial: int, release: Release | None, base_url: str) -> pb.OfferReleaseResponse:
    if release is None:
        return pb.OfferReleaseResponse(serial=serial)
    return pb.OfferReleaseResponse(
        serial=serial,
        manifest=release.manifest,
        canary=release.state is LifecycleState.CANARY,
        base_url=base_url,
    )


def state_to_proto(state: LifecycleState) -> pb.ReleaseState:
    value: pb.ReleaseState = getattr(pb, f"RELEASE_STATE_{state.name}")
    return value


def hash_beginning(value: str) -> str:
    """Return the beginning of a release's hash. Raises BadRequest for anything else."""
    if not _BEGINNING.fullmatch(value):
        raise BadRequest.bound("release", repr(value[:80]), "1 to 64 hex digits, the beginning of the hash of its file")
    return value


def action_from_proto(request: pb.UpdateReleaseRequest) -> tuple[str, ReleaseAction]:
    """Return the beginning of a release's hash and the operator's action. Raises BadRequest."""
    action = _ACTIONS.get(request.action)
    if action is None:
        raise BadRequest.bound("action", request.action, "PROMOTE, ROLL_BACK, PIN or UNPIN")
    return hash_beginning(request.release), action


def release_to_proto(release: Release) -> pb.Release:
    return pb.Release(
        manifest=release.manifest,
        state=state_to_proto(release.state),
        share=release.share,
        since_unix=release.since_unix,
        reason=release.reason,
        pinned=release.pinned,
        evidence=_evidence_to_proto(release.evidence) if release.evidence else None,
    )


def _evidence_to_proto(evidence: CanaryEvidence) -> pb.ReleaseEvidence:
    return pb.ReleaseEvidence(**{f.name: getattr(evidence, f.name) for f in pb.ReleaseEvidence.DESCRIPTOR.fields})
