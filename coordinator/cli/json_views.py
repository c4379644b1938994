"""What `-o json` and `-o yaml` show: plain data whose names and units stay as they are. Tables are made from it, too.

Times end in `_s` or `_ms`, moments are ISO 8601 in UTC, shares go from 0 to 1, and null is what is not known.
"""

from __future__ import annotations

import datetime
from typing import Any

from coordinator.releases.codec import state_from_proto
from outrider.wire.manifest import read_unverified
from outrider.wire.v1 import coordinator_pb2 as pb

Document = dict[str, Any]


def verifier(v: pb.VerifierStatus) -> Document:
    return {
        "id": v.verifier_id,
        "address": v.address,
        "state": "draining" if v.draining else "cordoned" if v.cordoned else "serving",
        "cordoned": v.cordoned,
        "draining": v.draining,
        "target": {
            "name": v.target.name,
            "weights": v.target.weights_hash,
            "tokenizer": v.target.tokenizer_hash,
            "dtype": v.target.dtype,
            "backend": v.target.backend,
            "hardware": v.target.hardware,
        },
        "sessions": v.live_sessions,
        "capacity": v.capacity_sessions,
        "tokens_per_s": v.tokens_per_s,
        "min_acceptance": v.min_acceptance,
        "evaluated": v.evaluated,
        "accepted": v.accepted,
        "acceptance": _share(v.accepted, v.evaluated),
        "rtt_ms": v.rtt_ms or None,
        "kv_used": v.kv_used,
        "kv_capacity": v.kv_capacity,
        "lease_s": v.lease_s,
        "step_ms": v.step_ms,
        "node_ms": v.node_ms,
        "step_parts_ms": dict(sorted(v.timing_ms.items())),
        "step_cost_ms": {str(rows): ms for rows, ms in sorted(v.step_cost_ms.items())},
        "session_cost_ms": v.session_cost_ms,
    }


def session(s: pb.SessionStatus) -> Document:
    return {
        "id": s.session_id,
        "tenant": s.tenant,
        "verifier": s.verifier_id,
        "standby": s.standby or None,
        "state": "live" if s.reported else "placed",
        "epoch": s.epoch,
        "committed": s.committed,
        "tokens_per_step": s.tokens_per_step or None,
        "evaluated": s.evaluated,
        "accepted": s.accepted,
        "acceptance": _share(s.accepted, s.evaluated),
        "rtt_ms": s.rtt_ms or None,
        "draft": s.draft_release or None,
        "traffic_class": s.traffic_class or None,
    }


def window(w: pb.SessionWindow) -> Document:
    return {
        "session": w.session_id,
        "verifier": w.verifier_id,
        "k": w.k,
        "depth": w.depth,
        "nodes_per_level": w.nodes_per_level,
        "draft_wait_ms": w.draft_wait_ms,
        "min_acceptance": w.min_acceptance,
        "speedup": w.speedup,
        "tokens_per_step": w.tokens_per_step,
        "hits": w.hits,
        "verdicts": w.verdicts,
        "rtt_ms": w.rtt_ms,
        "draft_ms": w.draft_ms,
        "bounds": bounds(w.bounds) if w.HasField("bounds") else None,
        "reason": w.reason,
    }


def bounds(b: pb.WindowBounds) -> Document:
    return {
        "k": b.k,
        "depth": b.depth,
        "pinned": b.pinned,
        "draft_wait_ms": b.draft_wait_ms if b.HasField("draft_wait_ms") else None,
        "nodes_per_level": b.nodes_per_level if b.HasField("nodes_per_level") else None,
    }


def tenant(t: pb.Tenant) -> Document:
    return {
        "name": t.name,
        "state": "configured" if t.configured else "revoked" if t.revoked_unix else "active",
        "created": moment(t.created_unix),
        "revoked": moment(t.revoked_unix),
        "configured": t.configured,
    }


def release(r: pb.Release) -> Document:
    manifest = read_unverified(r.manifest)
    state, e = state_from_proto(r.state), r.evidence
    return {
        "release": manifest.digest,
        "version": manifest.version,
        "target": manifest.weights_hash,
        "tokenizer": manifest.tokenizer_hash,
        "state": state.value if state else "unknown",
        "share": r.share,
        "pinned": r.pinned,
        "since": moment(r.since_unix),
        "reason": r.reason,
        "size": manifest.size,
        "quantization": manifest.quantization,
        "urls": list(manifest.urls),
        "parent": manifest.parent or None,
        "signed_by": pb.SignedManifest.FromString(r.manifest).key_id,
        "created": moment(manifest.created_unix),
        "metrics": dict(sorted(manifest.metrics.items())),
        "evidence": {
            "canary_samples": e.canary_samples,
            "canary_right": e.canary_right,
            "stable_samples": e.stable_samples,
            "stable_right": e.stable_right,
            "log_better": e.log_better,
            "log_worse": e.log_worse,
        }
        if r.HasField("evidence")
        else None,
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
    """None for 0."""
    if not unix:
        return None
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
