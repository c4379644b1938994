"""Convert records to the fields of Redis hashes and back.

Telemetry is kept as the bytes of its protobuf message, in base64, in the field `telemetry`. Beside it stand the fields
that Lua scripts read:

    verifier:<id>   instance, capacity, name, weights_hash, tokenizer_hash, class, live, draining
                    (place.lua, report.lua, register.lua, steer.lua, release_trial.lua)
    stats:<id>      verifier, epoch, folded, window (observe.lua)
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from coordinator.records import (
    Registration,
    Seat,
    SessionStatus,
    VerifierStatus,
    Window,
    WindowBounds,
    WindowDecision,
)
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.telemetry import (
    session_telemetry_from_proto,
    session_telemetry_to_proto,
    verifier_telemetry_from_proto,
    verifier_telemetry_to_proto,
)
from outrider.wire.ticket import Target
from outrider.wire.v1 import telemetry_pb2


def of_registration(r: Registration) -> dict[str, Any]:
    t = r.target
    return {
        "address": r.address,
        "tls": int(r.tls),
        "capacity": r.capacity,
        "name": t.name,
        "weights_hash": t.weights_hash,
        "tokenizer_hash": t.tokenizer_hash,
        "dtype": t.dtype,
        "backend": t.backend,
        "hardware": t.hardware,
        "class": t.numerics_class,
    }


def of_telemetry(verifier: VerifierTelemetry) -> dict[str, Any]:
    return {
        "live": verifier.live_sessions,
        "draining": int(verifier.draining),
        "telemetry": base64.b64encode(verifier_telemetry_to_proto(verifier).SerializeToString()),
    }


def session_bytes(session: SessionTelemetry) -> bytes:
    """Return the telemetry in base64, without its acceptance history: observe.lua adds that to the workload's prior."""
    message = session_telemetry_to_proto(replace(session, acceptance_history=b""))
    return base64.b64encode(message.SerializeToString())


def flat(fields: Mapping[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _target(record: Mapping[str, str]) -> Target:
    names = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")
    return Target(*(record.get(name, "") for name in names))


def seat(verifier_id: str, flat: Sequence[str]) -> Seat:
    record = dict(zip(flat[::2], flat[1::2], strict=True))
    return Seat(verifier_id, record["address"], record["tls"] == "1", _target(record))


def verifier_status(verifier_id: str, record: Mapping[str, str], ttl_ms: int, cordon: int) -> VerifierStatus:
    registration = Registration(
        verifier_id,
        record["address"],
        record["tls"] == "1",
        _target(record),
        int(record["capacity"]),
        int(record["instance"]),
    )
    written = base64.b64decode(record.get("telemetry", ""))
    telemetry = verifier_telemetry_from_proto(telemetry_pb2.VerifierTelemetry.FromString(written))
    return VerifierStatus(registration, telemetry, max(ttl_ms, 0) / 1000, bool(cordon))


def session_status(
    session_id: str, seat_on: str, reported: Mapping[str, str], placed: Mapping[str, str]
) -> SessionStatus:
    """reported: the hash stats:<id>, empty before the first report. placed: the hash session:<id>."""
    telemetry = SessionTelemetry(session_id)
    if "telemetry" in reported:
        written = base64.b64decode(reported["telemetry"])
        telemetry = session_telemetry_from_proto(telemetry_pb2.SessionTelemetry.FromString(written))
    telemetry = replace(
        telemetry,
        tenant=telemetry.tenant or placed.get("tenant", ""),
        draft_release=telemetry.draft_release or placed.get("draft", ""),
        traffic_class=telemetry.traffic_class or placed.get("traffic", ""),
    )
    verifier_id = reported.get("verifier", seat_on)
    standby = placed.get("standby", "")  # where its device is by now, if it had to go there
    return SessionStatus(telemetry, verifier_id, standby if standby != verifier_id else "", bool(reported))


def decision_to_json(decision: WindowDecision) -> str:
    return json.dumps(asdict(decision))


def decision_from_json(verifier_id: str, written: str) -> WindowDecision | None:
    """None for what a coordinator of another version has written."""
    try:
        fields = json.loads(written)
        return WindowDecision(**{**fields, "window": Window(**fields["window"]), "verifier_id": verifier_id})
    except (KeyError, TypeError, ValueError):
        return None


def bounds_to_json(bounds: WindowBounds) -> str:
    return json.dumps(asdict(bounds))


def bounds_from_json(written: str | bytes | None) -> WindowBounds | None:
    """None for nothing, and for what a coordinator of another version has written."""
    try:
        fields = json.loads(written) if written else None
        return WindowBounds(Window(**fields["window"]), fields["pinned"]) if fields else None
    except (KeyError, TypeError, ValueError):
        return None
