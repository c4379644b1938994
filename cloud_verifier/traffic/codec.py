"""Convert recorded output from the engine process to passages of the traffic log."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import NO_PROMPT, Passage
from outrider.wire.v1 import engine_pb2 as pb


@dataclass(frozen=True)
class RecordedSession:
    """A session that is recorded, as its ticket describes it."""

    session_id: str
    tenant: str
    traffic_class: str
    weights_hash: str
    """Hash of the target's weights."""
    temperature: float
    keep_s: float
    """Seconds for which its output may be kept."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT, compare=False)
    """`[p]`: the end of its prompt, or all of it; empty if the prompt may not be kept."""


def passage_from_proto(message: pb.Produced, session: RecordedSession, now: float) -> Passage:
    """Convert what the engine told of a session. now: seconds since 1970. Raises ValueError if the message's arrays
    do not fit together."""
    shape = len(message.token), message.top
    return Passage(
        session_id=session.session_id,
        tenant=session.tenant,
        traffic_class=session.traffic_class,
        draft_release=message.draft_release,
        weights_hash=session.weights_hash,
        start=message.start,
        tokens=np.asarray(message.token, dtype=np.int32),
        top_ids=np.frombuffer(message.top_ids, dtype="<u4").astype(np.int32).reshape(shape),
        top_log_probs=np.frombuffer(message.top_log_probs, dtype="<f2").astype(np.float32).reshape(shape),
        tail=np.frombuffer(message.tail, dtype="<f2").astype(np.float32),
        guessed=np.frombuffer(message.guessed, dtype=np.uint8),
        temperature=session.temperature,
        time_unix=now,
        expires_unix=now + session.keep_s,
        prompt=NO_PROMPT if message.start else session.prompt,
    )
