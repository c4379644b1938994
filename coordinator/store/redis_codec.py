"""Read what Redis keeps. Protobuf messages are kept as their bytes, which the client decodes as text without loss."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from coordinator.store import keys
from outrider.core.errors import BadRequest
from outrider.wire.ticket import Target, target_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2, telemetry_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

log = logging.getLogger(__name__)

_M = TypeVar("_M", bound=Message)


def written(text: str | None) -> bytes:
    """Return the bytes of a protobuf message as they were written. None was not written."""
    return (text or "").encode("utf-8", "surrogateescape")


def read(kind: type[_M], text: str | None, key: str) -> _M:
    """Decode a message that is kept under a key. A damaged one counts as not written, since it must not fail what is
    asked of all others; the log names it, once."""
    try:
        return kind.FromString(written(text))
    except DecodeError as error:
        _note_damaged(key, str(error))
        return kind()


@functools.lru_cache(maxsize=1_024)
def _note_damaged(key: str, why: str) -> None:
    log.error("%s in Redis is damaged (%s) and counts as not written; if it stays so, remove it there", key, why)


def target_from(text: str, verifier_id: str) -> Target | None:
    """Decode the target of a verifier; None if it is damaged."""
    try:
        return _target_from(text)
    except (DecodeError, BadRequest) as error:
        _note_damaged(keys.verifier(verifier_id), str(error))
        return None


@functools.lru_cache(maxsize=1_024)
def _target_from(text: str) -> Target:
    """Decode a target; most verifiers have the same one, which is decoded once."""
    return target_from_proto(session_pb2.TargetIdentity.FromString(written(text)))


def verifier_status(
    name: str, record: Mapping[str, str], ttl_ms: int, cordon: int, instances: str | None
) -> pb.VerifierStatus:
    registration = read(pb.RegisterRequest, record["registration"], keys.verifier(name))
    return pb.VerifierStatus(
        verifier_id=name,
        address=registration.address,
        target=registration.target,
        capacity_sessions=registration.capacity_sessions,
        lease_s=max(ttl_ms, 0) / 1000,
        cordoned=bool(cordon),
        telemetry=read(telemetry_pb2.VerifierTelemetry, record.get("telemetry"), keys.verifier(name)),
        restarts=int((instances or "0").split()[-1]),
    )


def session_status(
    session_id: str,
    placed_on: str,
    reported: SessionTelemetry | None,
    placed: Mapping[str, str],
    decided: pb.WindowDecision | None,
) -> pb.SessionStatus:
    """Return a session's status. reported: by its verifier, None before the first report of it. placed: the hash
    session:<id>. decided: on its window, None if nothing is."""
    telemetry = reported or SessionTelemetry(session_id=session_id)
    for field, name in (("tenant", "tenant"), ("draft_release", "draft"), ("traffic_class", "traffic")):
        setattr(telemetry, field, getattr(telemetry, field) or placed.get(name, ""))
    standby = placed.get("standby", "")  # the device is on its standby by now, if it had to go there
    standby = standby if standby != placed_on else ""
    if decided is not None and (bounds := placed.get("bounds")):
        decided.bounds.MergeFrom(read(pb.WindowBounds, bounds, keys.session(session_id)))
    return pb.SessionStatus(
        telemetry=telemetry, verifier_id=placed_on, standby=standby, reported=reported is not None, window=decided
    )


def sessions_from(text: str | None, verifier_id: str) -> dict[str, SessionTelemetry]:
    """Return the sessions that a verifier has reported last, by id."""
    return {one.session_id: one for one in read(pb.ReportRequest, text, keys.telemetry(verifier_id)).sessions}


def decisions_from(text: str | None, verifier_id: str) -> dict[str, pb.WindowDecision]:
    """Return the last decisions on a verifier's sessions, by session id."""
    return {one.session_id: one for one in read(pb.WindowDecisions, text, keys.windows(verifier_id)).decisions}


def prior_from(record: Mapping[str, str]) -> SessionTelemetry:
    """Return what was measured of earlier sessions: outcomes, and the usual time and nodes of a level."""
    return SessionTelemetry(
        acceptance_history=written(record.get("acceptance_history")),
        draft_ms=float(record.get("draft_ms", 0)),
        nodes_per_level=float(record.get("nodes_per_level", 0)),
    )
