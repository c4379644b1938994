"""Convert recorded output from the engine process to passages of the traffic log."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import NO_PROMPT, Passage
from outrider.wire.v1 import engine_pb2 as pb


@dataclass(frozen=True)
class Source:
    """Whose text it is, as the session's ticket has it."""

    session_id: str
    tenant: str
    traffic_class: str
    weights_hash: str
    """Of the target."""
    temperature: float
    keep_s: float
    """Seconds that what is produced may be kept."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT, compare=False)
    """`[p]`: its end, or all of it; empty where it may not be kept."""


def passage_from_proto(message: pb.Produced, source: Source, now: float) -> Passage:
    """now: seconds since 1970. Raises ValueError where its arrays do not fit together."""
    shape = len(message.token), message.top
    return Passage(
        session_id=source.session_id,
        tenant=source.tenant,
        traffic_class=source.traffic_class,
        draft_release=message.draft_release,
        weights_hash=source.weights_hash,
        start=message.start,
        tokens=np.asarray(message.token, dtype=np.int32),
        top_ids=np.frombuffer(message.top_ids, dtype="<u4").astype(np.int32).reshape(shape),
        top_log_probs=np.frombuffer(message.top_log_probs, dtype="<f2").astype(np.float32).reshape(shape),
        tail=np.frombuffer(message.tail, dtype="<f2").astype(np.float32),
        guessed=np.frombuffer(message.guessed, dtype=np.uint8),
        temperature=source.temperature,
        time_unix=now,
        expires_unix=now + source.keep_s,
        prompt=NO_PROMPT if message.start else source.prompt,
    )
