"""Convert records to what Redis keeps and back.

Telemetry is kept as the bytes of its protobuf message, in base64, in the field `telemetry`. Beside it stand the fields
that Lua scripts read:

    verifier:<id>    instance, capacity, name, weights_hash, tokenizer_hash, live, draining
                     (place.lua, report.lua, register.lua, update_verifier.lua)
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from coordinator.records import (
    Prior,
    SessionStatus,
    VerifierRegistration,
    VerifierStatus,
    Window,
    WindowBounds,
    WindowDecision,
    WorkloadKey,
)
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire import telemetry as codec
from outrider.wire.ticket import Target
from outrider.wire.v1 import telemetry_pb2

_WINDOW = len(fields(Window))
_DECISION = tuple(field.name for field in fields(WindowDecision) if field.name not in ("window", "verifier_id"))
_TARGET = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")


def registration_fields(registration: VerifierRegistration) -> list[Any]:
    """Return the fields and values of the hash verifier:<id>, but for `instance`, which register.lua sets."""
    target = registration.target
    found = ["address", registration.address, "tls", int(registration.tls), "capacity", registration.capacity]
    return found + [part for name in _TARGET for part in (name, getattr(target, name))]


def registration_from(verifier_id: str, record: Mapping[str, str]) -> VerifierRegistration:
    return VerifierRegistration(
        verifier_id,
        record["address"],
        record["tls"] == "1",
        Target(*(record.get(name, "") for name in _TARGET)),
        int(record["capacity"]),
        int(record["instance"]),
    )


def registration_from_reply(verifier_id: str, flat: Sequence[str]) -> VerifierRegistration:
    """Decode `flat`: fields and values in turn, as a script returns a hash."""
    return registration_from(verifier_id, dict(zip(flat[::2], flat[1::2], strict=True)))


def verifier_telemetry_fields(verifier: VerifierTelemetry) -> list[Any]:
    """Return the fields and values that a report changes in the hash verifier:<id>."""
    written = base64.b64encode(codec.verifier_telemetry_to_proto(verifier).SerializeToString())
    return ["live", verifier.live_sessions, "draining", int(verifier.draining), "telemetry", written]


def target_to_json(target: Target) -> str:
    return json.dumps([getattr(target, name) for name in _TARGET])


@functools.lru_cache(maxsize=1_024)
def target_from_json(written: str) -> Target:
    """Decode a target; most verifiers have the same one, which is decoded once."""
    return Target(*json.loads(written))


def session_text(session: SessionTelemetry) -> str:
    """Return the telemetry in base64, without the acceptance history, which record_telemetry.lua adds to the prior."""
    message = codec.session_telemetry_to_proto(session)
    message.ClearField("acceptance_history")
    return base64.b64encode(message.SerializeToString()).decode()


def verifier_status(verifier_id: str, record: Mapping[str, str], ttl_ms: int, cordon: int) -> VerifierStatus:
    written = base64.b64decode(record.get("telemetry", ""))
    telemetry = codec.verifier_telemetry_from_proto(telemetry_pb2.VerifierTelemetry.FromString(written))
    return VerifierStatus(registration_from(verifier_id, record), telemetry, max(ttl_ms, 0) / 1000, bool(cordon))


def session_status(session_id: str, placed_on: str, reported: str | None, placed: Mapping[str, str]) -> SessionStatus:
    """Decode `reported`, the session's field of the hash telemetry:<verifier>, None before the verifier's first report
    of it, and `placed`, the hash session:<id>."""
    telemetry = SessionTelemetry(session_id)
    if reported:
        written = base64.b64decode(reported.rpartition(" ")[2])
        telemetry = codec.session_telemetry_from_proto(telemetry_pb2.SessionTelemetry.FromString(written))
    telemetry = replace(
        telemetry,
        tenant=telemetry.tenant or placed.get("tenant", ""),
        draft_release=telemetry.draft_release or placed.get("draft", ""),
        traffic_class=telemetry.traffic_class or placed.get("traffic", ""),
    )
    standby = placed.get("standby", "")  # the device is on its standby by now, if it had to go there
    return SessionStatus(telemetry, placed_on, standby if standby != placed_on else "", bool(reported))


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


def decisions_to_json(decisions: Iterable[WindowDecision]) -> str:
    """Encode decisions as lists of their fields' values, but for the verifier, whose they all are."""
    rows = [[*vars(one.window).values(), *(vars(one)[name] for name in _DECISION)] for one in decisions]
    return json.dumps(rows, separators=(",", ":"))


def decisions_from_json(verifier_id: str, written: str | None) -> tuple[WindowDecision, ...]:
    """Decode decisions; none for nothing, and for what cannot be read.

    A coordinator of another version may have written more fields, at the end, or fewer of those that need not be there.
    """
    try:
        return tuple(
            WindowDecision(
                **dict(zip(_DECISION, row[_WINDOW:], strict=False)),
                window=Window(*row[:_WINDOW]),
                verifier_id=verifier_id,
            )
            for row in json.loads(written or "[]")
        )
    except (TypeError, ValueError):
        return ()


def bounds_to_json(bounds: WindowBounds) -> str:
    return json.dumps(asdict(bounds))


def bounds_from(written: Iterable[tuple[str, str | None]]) -> dict[str, WindowBounds]:
    """Decode bounds by session id, but for nothing, and for what a coordinator of another version has written."""
    found = {}
    for session_id, text in written:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if text:
                fields = json.loads(text)
                found[session_id] = WindowBounds(Window(**fields["window"]), fields["pinned"])
    return found
