"""Protobuf to records of releases and back. Everything inbound is held against a bound here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from coordinator.releases.records import Evidence, Offer, Order, Release, State
from outrider.core.errors import BadRequest
from outrider.wire.ticket import MAX_LABEL
from outrider.wire.v1 import coordinator_pb2 as pb

_LABEL = re.compile(r"[A-Za-z0-9._-]{0,64}")
_BEGINNING = re.compile(r"(sha256:)?[0-9a-f]{1,64}")

_STATES: Mapping[State, pb.ReleaseState] = {
    State.CANDIDATE: pb.RELEASE_STATE_CANDIDATE,
    State.CANARY: pb.RELEASE_STATE_CANARY,
    State.STABLE: pb.RELEASE_STATE_STABLE,
    State.SUPERSEDED: pb.RELEASE_STATE_SUPERSEDED,
    State.ROLLED_BACK: pb.RELEASE_STATE_ROLLED_BACK,
}
_ORDERS: Mapping[int, Order] = {
    pb.RELEASE_ACTION_PROMOTE: Order.PROMOTE,
    pb.RELEASE_ACTION_ROLL_BACK: Order.ROLL_BACK,
    pb.RELEASE_ACTION_PIN: Order.PIN,
    pb.RELEASE_ACTION_UNPIN: Order.UNPIN,
}


def asking_from_proto(request: pb.OfferReleaseRequest) -> tuple[str, str]:
    """Weights hash and device."""
    if not 0 < len(request.target) <= MAX_LABEL or not request.target.isprintable():
        raise BadRequest.bound("target", repr(request.target[:MAX_LABEL]), f"1 to {MAX_LABEL} printable letters")
    for field, value in (("device_id", request.device_id), ("in_use", request.in_use)):
        if not _LABEL.fullmatch(value):
            raise BadRequest.bound(field, repr(value[:64]), "at most 64 letters, digits, '.', '_' or '-'")
    return request.target, request.device_id


def offer_to_proto(offer: Offer) -> pb.OfferReleaseResponse:
    release = offer.release
    if release is None:
        return pb.OfferReleaseResponse(serial=offer.serial)
    return pb.OfferReleaseResponse(
        serial=offer.serial,
        manifest=release.manifest,
        canary=release.state is State.CANARY,
        base_url=offer.base_url,
    )


def state_to_proto(state: State) -> pb.ReleaseState:
    return _STATES[state]


def state_from_proto(state: int) -> State | None:
    """None for one that only a newer coordinator knows."""
    return next((known for known, value in _STATES.items() if value == state), None)


def beginning(value: str) -> str:
    """Of a release's hash."""
    if not _BEGINNING.fullmatch(value):
        raise BadRequest.bound("release", repr(value[:80]), "1 to 64 hex digits, the beginning of the hash of its file")
    return value


def order_from_proto(request: pb.UpdateReleaseRequest) -> tuple[str, Order]:
    """Which release, and what is to become of it."""
    order = _ORDERS.get(request.action)
    if order is None:
        raise BadRequest.bound("action", request.action, "PROMOTE, ROLL_BACK, PIN or UNPIN")
    return beginning(request.release), order


def release_to_proto(release: Release) -> pb.Release:
    return pb.Release(
        manifest=release.manifest,
        state=_STATES[release.state],
        share=release.share,
        since_unix=release.since_unix,
        reason=release.reason,
        pinned=release.pinned,
        evidence=_evidence_to_proto(release.evidence) if release.evidence else None,
    )


def _evidence_to_proto(evidence: Evidence) -> pb.ReleaseEvidence:
    return pb.ReleaseEvidence(
        canary_samples=evidence.canary_samples,
        stable_samples=evidence.stable_samples,
        canary_acceptance=evidence.canary_right,
        stable_acceptance=evidence.stable_right,
        log_better=evidence.log_better,
        log_worse=evidence.log_worse,
    )
