"""Convert records to what Redis keeps and back.

Telemetry is kept as the bytes of its protobuf message, in base64, in the field `telemetry`. Beside it stand the fields
that Lua scripts read:

    verifier:<id>    instance, capacity, name, weights_hash, tokenizer_hash, class, live, draining
                     (place.lua, report.lua, register.lua, update_verifier.lua, release_trial.lua)
    telemetry:<id>   verifier, epoch, folded, window (record_telemetry.lua)
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from coordinator.records import (
    Prior,
    Report,
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

_FACTS = 6
"""Facts of each session in the answer of report.lua."""
_WINDOW = len(fields(Window))
_DECISION = tuple(field.name for field in fields(WindowDecision) if field.name not in ("window", "verifier_id"))
_TARGET = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")


def registration_fields(registration: VerifierRegistration) -> list[Any]:
    """Return the fields and values of the hash verifier:<id>, but for `instance`, which register.lua sets."""
    target = registration.target
    found = ["address", registration.address, "tls", int(registration.tls), "capacity", registration.capacity]
    found += ["class", target.numerics_class]
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


def session_bytes(session: SessionTelemetry) -> bytes:
    """Return the telemetry in base64, without the acceptance history, which record_telemetry.lua adds to the prior."""
    message = codec.session_telemetry_to_proto(replace(session, acceptance_history=b""))
    return base64.b64encode(message.SerializeToString())


def verifier_status(verifier_id: str, record: Mapping[str, str], ttl_ms: int, cordon: int) -> VerifierStatus:
    written = base64.b64decode(record.get("telemetry", ""))
    telemetry = codec.verifier_telemetry_from_proto(telemetry_pb2.VerifierTelemetry.FromString(written))
    return VerifierStatus(registration_from(verifier_id, record), telemetry, max(ttl_ms, 0) / 1000, bool(cordon))


def session_status(
    session_id: str, placed_on: str, reported: Mapping[str, str], placed: Mapping[str, str]
) -> SessionStatus:
    """Decode `reported`, the hash telemetry:<id>, empty before the first report, and `placed`, that of session:<id>."""
    telemetry = SessionTelemetry(session_id)
    if "telemetry" in reported:
        written = base64.b64decode(reported["telemetry"])
        telemetry = codec.session_telemetry_from_proto(telemetry_pb2.SessionTelemetry.FromString(written))
    telemetry = replace(
        telemetry,
        tenant=telemetry.tenant or placed.get("tenant", ""),
        draft_release=telemetry.draft_release or placed.get("draft", ""),
        traffic_class=telemetry.traffic_class or placed.get("traffic", ""),
    )
    verifier_id = reported.get("verifier", placed_on)
    standby = placed.get("standby", "")  # the device is on its standby by now, if it had to go there
    return SessionStatus(telemetry, verifier_id, standby if standby != verifier_id else "", bool(reported))


def workloads(session_ids: Sequence[str], facts: Sequence[str], drafts: Sequence[str]) -> dict[str, WorkloadKey]:
    """Return the workload keys by session id, of the sessions that still draft with the release they were placed with.

    facts: those of report.lua, for each session. drafts: the release that each is reported to draft with; empty if none
    is reported. While a history holds outcomes of two releases its session has no workload key.
    """
    found = {}
    for session_id, (tenant, weights, draft, traffic, *_), now in zip(session_ids, _facts(facts), drafts, strict=True):
        if draft and now in ("", draft):
            found[session_id] = WorkloadKey(tenant, draft, traffic, weights)
    return found


def device_ids(session_ids: Sequence[str], facts: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the devices' ids of the sessions that were placed here, by session id. facts: those of report.lua, of
    which a report alone tells the tenant."""
    return {name: ids for name, (_, weights, _, _, *ids) in zip(session_ids, _facts(facts), strict=True) if weights}


def _facts(flat: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the facts of one session after another."""
    for start in range(0, len(flat), _FACTS):
        yield flat[start : start + _FACTS]


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
    """Decode decisions; none for nothing, and for what a coordinator of another version has written."""
    try:
        return tuple(
            WindowDecision(
                **dict(zip(_DECISION, row[_WINDOW:], strict=True)),
                window=Window(*row[:_WINDOW]),
                verifier_id=verifier_id,
            )
            for row in json.loads(written or "[]")
        )
    except (TypeError, ValueError):
        return ()


def report_to_json(report: Report) -> str:
    """Encode a report for the coordinator that decides from it."""
    verifier, sessions, workloads, store_unix = report
    message = codec.verifier_telemetry_to_proto(verifier).SerializeToString()
    told = [
        (_text(codec.session_telemetry_to_proto(s).SerializeToString()), [*vars(w).values()] if w else None)
        for s in sessions
        for w in [workloads.get(s.session_id)]
    ]
    return json.dumps([_text(message), store_unix, told], separators=(",", ":"))


def report_from_json(written: str) -> Report:
    """Decode a report that another coordinator has received. Raises ValueError or BadRequest if it is damaged."""
    message, store_unix, told = json.loads(written)
    verifier = codec.verifier_telemetry_from_proto(telemetry_pb2.VerifierTelemetry.FromString(_bytes(message)))
    messages = (telemetry_pb2.SessionTelemetry.FromString(_bytes(one)) for one, _ in told)
    sessions = tuple(map(codec.session_telemetry_from_proto, messages))
    workloads = {s.session_id: WorkloadKey(*w) for s, (_, w) in zip(sessions, told, strict=True) if w}
    return verifier, sessions, workloads, float(store_unix)


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode()


def _bytes(written: str) -> bytes:
    return base64.b64decode(written)


def bounds_to_json(bounds: WindowBounds) -> str:
    return json.dumps(asdict(bounds))


def bounds_from_json(written: str | None) -> WindowBounds | None:
    """Decode bounds; None for nothing, and for what a coordinator of another version has written."""
    try:
        found = json.loads(written) if written else None
        return WindowBounds(Window(**found["window"]), found["pinned"]) if found else None
    except (KeyError, TypeError, ValueError):
        return None
