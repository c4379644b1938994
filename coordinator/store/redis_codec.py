"""What the store keeps in hashes: records as fields, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.records import Load, Registration, Seat, SessionStats, SessionStatus, Verifier
from outrider.wire.ticket import Target


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


def of_load(load: Load) -> dict[str, Any]:
    return {
        "live": load.live_sessions,
        "step_ms": load.step_ms,
        "kv_used": load.kv_used,
        "kv_capacity": load.kv_capacity,
        "tokens_per_s": load.tokens_per_s,
        "draining": int(load.draining),
        "node_ms": load.node_ms,
        "timing_ms": json.dumps(dict(load.timing_ms)),
        "step_cost_ms": json.dumps(dict(load.step_cost_ms)),
        "session_cost_ms": load.session_cost_ms,
        "min_acceptance": load.min_acceptance,
        "evaluated": load.evaluated,
        "accepted": load.accepted,
        "rtt_ms": load.rtt_ms,
    }


def flat(fields: Mapping[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _target(record: Mapping[str, str]) -> Target:
    names = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")
    return Target(*(record.get(name, "") for name in names))


def seat(verifier_id: str, flat: Sequence[str]) -> Seat:
    record = dict(zip(flat[::2], flat[1::2], strict=True))
    return Seat(verifier_id, record["address"], record["tls"] == "1", _target(record))


def verifier(verifier_id: str, record: Mapping[str, str], ttl_ms: int, cordon: int) -> Verifier:
    registration = Registration(
        verifier_id,
        record["address"],
        record["tls"] == "1",
        _target(record),
        int(record["capacity"]),
        int(record["instance"]),
    )
    load = Load(
        int(record.get("live", 0)),
        float(record.get("step_ms", 0)),
        int(record.get("kv_used", 0)),
        int(record.get("kv_capacity", 0)),
        float(record.get("tokens_per_s", 0)),
        record.get("draining") == "1",
        float(record.get("node_ms", 0)),
        json.loads(record.get("timing_ms", "{}")),
        {int(rows): ms for rows, ms in json.loads(record.get("step_cost_ms", "{}")).items()},
        float(record.get("session_cost_ms", 0)),
        float(record.get("min_acceptance", 0)),
        int(record.get("evaluated", 0)),
        int(record.get("accepted", 0)),
        float(record.get("rtt_ms", 0)),
    )
    return Verifier(registration, load, max(ttl_ms, 0) / 1000, bool(cordon))


def seated(session_id: str, seat_on: str, record: Mapping[str, str], placed: Mapping[str, str]) -> SessionStatus:
    """record: what its verifier reports; empty where that has not come yet. placed: what it was placed as."""
    epoch, steps, committed, evaluated, accepted = (int(record.get(name, 0)) for name in _COUNTS)
    stats = SessionStats(
        session_id,
        record.get("tenant", placed.get("tenant", "")),
        record.get("verifier", seat_on),
        epoch,
        steps,
        committed,
        evaluated,
        accepted,
        float(record.get("rtt_ms", 0)),
        draft=placed.get("draft", ""),
        traffic=placed.get("traffic", ""),
    )
    standby = placed.get("standby", "")  # where its device is by now, if it had to go there
    return SessionStatus(stats, bool(record), standby if standby != stats.verifier_id else "")


_COUNTS = ("epoch", "steps", "committed", "evaluated", "accepted")
