"""Read what Redis keeps. Protobuf messages are kept as their bytes, which the client decodes as text without loss."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from coordinator.window import Prior, WorkloadKey
from outrider.wire.ticket import Target, target_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2, telemetry_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry


def written(text: str | None) -> bytes:
    """Return the bytes of a protobuf message as they were written. None was not written."""
    return (text or "").encode("utf-8", "surrogateescape")


@functools.lru_cache(maxsize=1_024)
def target_from(text: str) -> Target:
    """Decode a target; most verifiers have the same one, which is decoded once."""
    return target_from_proto(session_pb2.TargetIdentity.FromString(written(text)))


def verifier_status(record: Mapping[str, str], ttl_ms: int, cordon: int, instances: str | None) -> pb.VerifierStatus:
    registration = pb.RegisterRequest.FromString(written(record["registration"]))
    return pb.VerifierStatus(
        verifier_id=registration.verifier_id,
        address=registration.address,
        target=registration.target,
        capacity_sessions=registration.capacity_sessions,
        lease_s=max(ttl_ms, 0) / 1000,
        cordoned=bool(cordon),
        telemetry=telemetry_pb2.VerifierTelemetry.FromString(written(record.get("telemetry"))),
        restarts=int((instances or "0").split()[-1]),
    )


def session_status(
    session_id: str,
    placed_on: str,
    reported: str | None,
    placed: Mapping[str, str],
    decided: pb.WindowDecision | None,
) -> pb.SessionStatus:
    """Decode `reported`, the session's field of the hash telemetry:<verifier>, None before the verifier's first report
    of it, and `placed`, the hash session:<id>. decided: on its window, None if nothing is."""
    telemetry = telemetry_pb2.SessionTelemetry.FromString(written(reported))
    telemetry.session_id = session_id
    for field, name in (("tenant", "tenant"), ("draft_release", "draft"), ("traffic_class", "traffic")):
        setattr(telemetry, field, getattr(telemetry, field) or placed.get(name, ""))
    standby = placed.get("standby", "")  # the device is on its standby by now, if it had to go there
    standby = standby if standby != placed_on else ""
    if decided is not None and (bounds := placed.get("bounds")):
        decided.bounds.MergeFromString(written(bounds))
    return pb.SessionStatus(
        telemetry=telemetry, verifier_id=placed_on, standby=standby, reported=bool(reported), window=decided
    )


Facts = Sequence[str]
"""What report.lua tells of a session: its state, tenant, weights hash, draft release, traffic class, id of the device,
and bounds."""


def workloads(known: Iterable[tuple[SessionTelemetry, Facts]]) -> dict[str, WorkloadKey]:
    """Return the workload keys by session id, of the sessions that still draft with the release they were placed with.

    While a history holds outcomes of two releases its session has no workload key.
    """
    return {
        session.session_id: WorkloadKey(tenant, draft, traffic, weights)
        for session, (_, tenant, weights, draft, traffic, *_) in known
        if draft and session.draft_release in ("", draft)
    }


def devices(known: Iterable[tuple[SessionTelemetry, Facts]]) -> dict[str, str]:
    """Return the devices' ids of the sessions that were placed here, by session id; a report alone tells the tenant."""
    return {session.session_id: device for session, (_, _, weights, _, _, device, _) in known if weights}


def prior_from(record: Mapping[str, str]) -> Prior:
    return Prior(
        written(record.get("acceptance_history")),
        float(record.get("draft_ms", 0)),
        float(record.get("nodes_per_level", 0)),
    )


def bounds_from(found: Iterable[tuple[str, str | None]]) -> dict[str, pb.WindowBounds]:
    """Decode bounds by session id, of those that have any."""
    return {session_id: pb.WindowBounds.FromString(written(text)) for session_id, text in found if text}
