"""Convert records to what Redis keeps and back.

Telemetry is kept as the bytes of its protobuf message, in base64, in the field `telemetry`. Beside it stand the fields
that Lua scripts read:

    verifier:<id>    instance, capacity, name, weights_hash, tokenizer_hash, live, draining
                     (place.lua, report.lua, register.lua, update_verifier.lua)
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coordinator.records import Prior, WorkloadKey
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.telemetry import session_telemetry_to_proto, verifier_telemetry_to_proto
from outrider.wire.ticket import Target, target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2, telemetry_pb2

_TARGET = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")


def registration_fields(registration: pb.RegisterRequest) -> list[Any]:
    """Return the fields and values of the hash verifier:<id>, but for `instance`, which register.lua sets."""
    target = registration.target
    found = ["address", registration.address, "tls", int(registration.tls), "capacity", registration.capacity_sessions]
    return found + [part for name in _TARGET for part in (name, getattr(target, name))]


def grant(verifier_id: str, flat: Sequence[str]) -> tuple[pb.Grant, Target]:
    """Return how a verifier is reached, and its target. flat: fields and values in turn, as a script returns a hash."""
    record = dict(zip(flat[::2], flat[1::2], strict=True))
    return pb.Grant(verifier_id=verifier_id, address=record["address"], tls=record["tls"] == "1"), _target(record)


def _target(record: Mapping[str, str]) -> Target:
    return Target(*(record.get(name, "") for name in _TARGET))


def verifier_telemetry_fields(verifier: VerifierTelemetry) -> list[Any]:
    """Return the fields and values that a report changes in the hash verifier:<id>."""
    written = base64.b64encode(verifier_telemetry_to_proto(verifier).SerializeToString())
    return ["live", verifier.live_sessions, "draining", int(verifier.draining), "telemetry", written]


def target_to_json(target: session_pb2.TargetIdentity) -> str:
    return json.dumps([getattr(target, name) for name in _TARGET])


@functools.lru_cache(maxsize=1_024)
def target_from_json(written: str) -> Target:
    """Decode a target; most verifiers have the same one, which is decoded once."""
    return Target(*json.loads(written))


def session_text(session: SessionTelemetry) -> str:
    """Return the telemetry in base64, without the acceptance history, which record_telemetry.lua adds to the prior."""
    message = session_telemetry_to_proto(session)
    message.ClearField("acceptance_history")
    return base64.b64encode(message.SerializeToString()).decode()


def verifier_status(verifier_id: str, record: Mapping[str, str], ttl_ms: int, cordon: int) -> pb.VerifierStatus:
    return pb.VerifierStatus(
        verifier_id=verifier_id,
        address=record["address"],
        target=target_to_proto(_target(record)),
        capacity_sessions=int(record["capacity"]),
        lease_s=max(ttl_ms, 0) / 1000,
        cordoned=bool(cordon),
        telemetry=telemetry_pb2.VerifierTelemetry.FromString(base64.b64decode(record.get("telemetry", ""))),
    )


def session_status(
    session_id: str, placed_on: str, reported: str | None, placed: Mapping[str, str]
) -> pb.SessionStatus:
    """Decode `reported`, the session's field of the hash telemetry:<verifier>, None before the verifier's first report
    of it, and `placed`, the hash session:<id>."""
    written = base64.b64decode((reported or "").rpartition(" ")[2])
    telemetry = telemetry_pb2.SessionTelemetry.FromString(written)
    telemetry.session_id = session_id
    for field, name in (("tenant", "tenant"), ("draft_release", "draft"), ("traffic_class", "traffic")):
        setattr(telemetry, field, getattr(telemetry, field) or placed.get(name, ""))
    standby = placed.get("standby", "")  # the device is on its standby by now, if it had to go there
    standby = standby if standby != placed_on else ""
    return pb.SessionStatus(telemetry=telemetry, verifier_id=placed_on, standby=standby, reported=bool(reported))


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
        bytes(int(digit) for digit in record.get("acceptance_history", "")),
        float(record.get("draft_ms", 0)),
        float(record.get("nodes_per_level", 0)),
    )


def written(text: str | None) -> bytes:
    """Return the bytes of a protobuf message as they were written: the client decodes replies as text that keeps them.
    None was not written."""
    return (text or "").encode("utf-8", "surrogateescape")


def bounds_from(found: Iterable[tuple[str, str | None]]) -> dict[str, pb.WindowBounds]:
    """Decode bounds by session id, of those that have any."""
    return {session_id: pb.WindowBounds.FromString(written(text)) for session_id, text in found if text}
