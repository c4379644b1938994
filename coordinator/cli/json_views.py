"""Make the documents of `-o json`, whose names and units stay as they are. Tables are made of them, too.

Times end in `_s` or `_ms`, moments are ISO 8601 in UTC, shares go from 0 to 1, and null is what is not known.
"""

from __future__ import annotations

import datetime
from typing import Any

from google.protobuf.message import Message

from outrider.wire.manifest import read_unverified
from outrider.wire.v1 import coordinator_pb2 as pb

Document = dict[str, Any]

_RELEASE_STATES = {
    state: name.removeprefix("RELEASE_STATE_").lower() for name, state in pb.ReleaseState.items() if state
}


def verifier(v: pb.VerifierStatus) -> Document:
    t = v.telemetry
    return {
        "id": v.verifier_id,
        "address": v.address,
        "state": "draining" if t.draining else "cordoned" if v.cordoned else "serving",
        "cordoned": v.cordoned,
        "draining": t.draining,
        "target": {
            "name": v.target.name,
            "weights": v.target.weights_hash,
            "tokenizer": v.target.tokenizer_hash,
            **_fields(v.target, "dtype", "backend", "hardware"),
        },
        "sessions": t.live_sessions,
        "capacity": v.capacity_sessions,
        **_fields(t, "tokens_per_s", "min_acceptance", "evaluated", "accepted"),
        "acceptance": _share(t.accepted, t.evaluated),
        "rtt_ms": t.rtt_ms or None,
        **_fields(t, "kv_used", "kv_capacity"),
        "lease_s": v.lease_s,
        **_fields(t, "step_ms", "node_ms"),
        "step_parts_ms": dict(sorted(t.timing_ms.items())),
        "step_cost_ms": {str(rows): ms for rows, ms in sorted(t.step_cost_ms.items())},
        "session_cost_ms": t.session_cost_ms,
    }


def session(s: pb.SessionStatus) -> Document:
    t = s.telemetry
    return {
        "id": t.session_id,
        "tenant": t.tenant,
        "verifier": s.verifier_id,
        "standby": s.standby or None,
        "state": "live" if s.reported else "placed",
        **_fields(t, "epoch", "committed"),
        "tokens_per_step": _share(t.committed, t.steps) or None,
        **_fields(t, "evaluated", "accepted"),
        "acceptance": _share(t.accepted, t.evaluated),
        "rtt_ms": t.rtt_ms or None,
        "draft": t.draft_release or None,
        "lossy": t.lossy,
        "traffic_class": t.traffic_class or None,
    }


def window(d: pb.WindowDecision) -> Document:
    return {
        "session": d.session_id,
        "verifier": d.verifier_id,
        **_fields(d.window, "k", "depth", "nodes_per_level", "draft_wait_ms"),
        **_fields(d, "min_acceptance", "speedup", "tokens_per_step", "first_acceptance", "observations"),
        **_fields(d, "rtt_ms", "draft_ms"),
        "bounds": bounds(d.bounds) if d.HasField("bounds") else None,
        "reason": d.reason,
    }


def bounds(b: pb.WindowBounds) -> Document:
    w = b.window
    return {
        **_fields(w, "k", "depth"),
        "pinned": b.pinned,
        "draft_wait_ms": w.draft_wait_ms if w.HasField("draft_wait_ms") else None,
        "nodes_per_level": w.nodes_per_level if w.HasField("nodes_per_level") else None,
    }


def tenant(t: pb.Tenant) -> Document:
    return {
        "name": t.name,
        "state": "configured" if t.configured else "revoked" if t.revoked_unix else "active",
        "created": moment(t.created_unix),
        "revoked": moment(t.revoked_unix),
        "configured": t.configured,
        "limits": {field.name: getattr(t.limits, field.name) or None for field in t.limits.DESCRIPTOR.fields},
        "use": {"places": t.use.places, "opens": round(t.use.opens), "tokens": round(t.use.tokens)},
    }


def release(r: pb.Release) -> Document:
    manifest, evidence = read_unverified(r.manifest), None
    if r.HasField("evidence"):
        evidence = _fields(r.evidence, *(field.name for field in r.evidence.DESCRIPTOR.fields))
    return {
        "release": manifest.digest,
        "version": manifest.version,
        "target": manifest.weights_hash,
        "tokenizer": manifest.tokenizer_hash,
        "state": _RELEASE_STATES.get(r.state, "unknown"),
        **_fields(r, "share", "pinned"),
        "since": moment(r.since_unix),
        "reason": r.reason,
        "size": manifest.size,
        "quantization": manifest.quantization,
        "urls": list(manifest.urls),
        "parent": manifest.parent or None,
        "signed_by": pb.SignedManifest.FromString(r.manifest).key_id,
        "created": moment(manifest.created_unix),
        "metrics": dict(sorted(manifest.metrics.items())),
        "evidence": evidence,
    }


def status(coordinator: str, s: pb.StatusResponse) -> Document:
    return {
        "coordinator": coordinator,
        "uptime_s": s.uptime_s,
        "store": s.store,
        "verifiers": list(map(verifier, s.verifiers)),
        "sessions": list(map(session, s.sessions)),
        "total_verifiers": s.total_verifiers,
        "total_sessions": s.total_sessions,
    }


def moment(unix: float) -> str | None:
    """Return a moment in ISO 8601, None for 0."""
    if not unix:
        return None
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _fields(message: Message, *names: str) -> Document:
    """Return fields that keep their names."""
    return {name: getattr(message, name) for name in names}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
