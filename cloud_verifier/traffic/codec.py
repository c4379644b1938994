"""What the engine process tells the front of recorded sessions: to protobuf there, to passages here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import NO_PROMPT, Passage
from outrider.wire.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    from cloud_verifier.engine.produced import Produced  # needs torch, which the front has not


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


def produced_to_proto(produced: Produced) -> pb.Produced:
    visit = produced.visit
    return pb.Produced(
        start=visit.start,
        token=visit.tokens,
        top=produced.top_ids.shape[1],
        top_ids=produced.top_ids.astype("<u4").tobytes(),
        top_log_probs=produced.top_log_probs.astype("<f2").tobytes(),
        tail=produced.tail.astype("<f2").tobytes(),
        guessed=visit.guessed,
        draft_release=visit.draft,
    )


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
