"""Make passages of recorded tokens for tests of the traffic log."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.recorder import TrafficRecorder
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import session_pb2

NOW = 1_800_000_000.0


def passage(n: int = 4, top: int = 3, seed: int = 0, **changes: Any) -> Passage:
    """Return a passage of random tokens, complete apart from the given changes."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(2.0, (n, top)), axis=1)
    made = {
        "session_id": "s",
        "tenant": "acme",
        "traffic_class": "code",
        "draft_release": "ab12",
        "weights_hash": "sha256:cd",
        "start": 0,
        "tokens": rng.integers(0, 1 << 24, n, dtype=np.int32),
        "top_ids": rng.integers(0, 1 << 24, (n, top), dtype=np.int32),
        "top_log_probs": log_probs.astype(np.float32),
        "tail": rng.random(n, dtype=np.float32),
        "proposed_depths": rng.integers(0, 256, n, dtype=np.uint8),
        "temperature": 0.7,
        "time_unix": NOW,
        "expires_unix": NOW + 3600.0,
    }
    return Passage(**made | changes)


def begin(recorder: TrafficRecorder, session_id: str = "s", epoch: int = 1, prompt: list[int] | None = None) -> None:
    """Have a session of acme's recorded for a minute, with its prompt if there is one."""
    target = Target("t", "sha256:cd", "")
    claims = Claims(session_id, "acme", "v1", 1, 99, NOW, SessionLimits(), target, traffic_class="code", keep_s=60.0)
    claims = dataclasses.replace(claims, keep_prompts=prompt is not None)
    attach = session_pb2.Attach(epoch=epoch, prompt=prompt, sampling=session_pb2.Sampling(temperature=0.7))
    recorder.begin(attach, claims)


def same(one: Passage, other: Passage) -> bool:
    """Return whether two passages agree in every field."""
    fields = [field.name for field in dataclasses.fields(Passage)]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


def contents(passages: list[Passage]) -> list[tuple[str, int, list[int]]]:
    """Return session, start and tokens of each passage."""
    return [(p.session_id, p.start, p.tokens.tolist()) for p in passages]


@st.composite
def passages(draw: st.DrawFn) -> Passage:
    start = draw(st.integers(0, 131_071) | st.just(0))
    prompt = draw(st.lists(st.integers(0, 1 << 24), max_size=5)) if start == 0 else []
    return passage(
        draw(st.integers(0, 9)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 99)),
        session_id=draw(st.sampled_from(["s", "t", "ü"])),
        draft_release=draw(st.sampled_from(["", "ab12"])),
        start=start,
        prompt=np.array(prompt, dtype=np.int32),
        temperature=draw(st.sampled_from([0.0, 0.8])),
        time_unix=NOW + draw(st.floats(0.0, 3 * 86_400.0)),
        expires_unix=NOW + draw(st.sampled_from([1e3, 1e7])),
    )
