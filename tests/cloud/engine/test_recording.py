"""Test that a session's recording holds the target's own distribution, at the committed positions and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rig import LIMITS, Client, Rig, adversary, attach_of, client, nodes, nothing, perfect, prompt_of
from session_messages import append, directive
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.wire.v1 import engine_pb2 as pb

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
CONFIG = EngineConfig(kv_slots=1024, max_sessions=16, record_top=8)
PROMPT = prompt_of(12)


def attach(rig: Rig, session_id: str, joining: Client, epoch: int = 1, **options: Any) -> None:
    """Attach a client as Rig.attach does, to a session that is recorded."""
    message = joining.device.attach(epoch, joining.limits)
    options = {"record": True, "draft_release": "r1"} | options
    rig.engine.start(session_id, message, joining.limits, joining.directive, joining.salt, **options)
    rig.clients[session_id] = joining


def run(rig: Rig) -> list[pb.EngineEvent]:
    """Step until every session has finished."""
    recorded_tokens: list[pb.EngineEvent] = []
    for _ in range(2_000):
        if all(one.ended for one in rig.clients.values()):
            return recorded_tokens
        rig.turn()
        recorded_tokens += rig.engine.take_recorded()
    raise AssertionError("some sessions never end")


def of(recorded_tokens: list[pb.EngineEvent], session_id: str) -> list[pb.EngineEvent]:
    return [one for one in recorded_tokens if one.session_id == session_id]


def tokens_of(recorded_tokens: list[pb.EngineEvent]) -> list[int]:
    return [token for one in recorded_tokens for token in one.recorded.token]


@torch.inference_mode()
def log_softmax(plain: Reference, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities `[n, V]`, from one forward pass over the whole sequence."""
    logits = plain.module(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).numpy()


def check(
    recorded_tokens: list[pb.EngineEvent], plain: Reference, prompt: list[int], tokens: list[int], first: int = 0
) -> None:
    """Check every position from `first` on, once and in order, with the target's distribution."""
    assert tokens_of(recorded_tokens) == tokens[first:]
    starts = [one.recorded.start for one in recorded_tokens]
    assert starts == [
        first + sum(len(one.recorded.token) for one in recorded_tokens[:i]) for i in range(len(recorded_tokens))
    ]
    expected = log_softmax(plain, prompt, tokens)[first:]
    ids, log_probs, tails = (
        np.frombuffer(b"".join(getattr(one.recorded, name) for one in recorded_tokens), dtype)
        for name, dtype in (("top_ids", "<u4"), ("top_log_probs", "<f2"), ("tail", "<f2"))
    )
    ids, log_probs = ids.reshape(-1, CONFIG.record_top), log_probs.reshape(-1, CONFIG.record_top).astype(np.float32)
    assert ids.shape == log_probs.shape == (len(expected), CONFIG.record_top)
    np.testing.assert_allclose(log_probs, -np.sort(-expected, axis=1)[:, : CONFIG.record_top], atol=5e-3)
    np.testing.assert_allclose(np.take_along_axis(expected, ids.astype(np.int64), axis=1), log_probs, atol=5e-3)
    tail = 1.0 - np.exp(log_probs).sum(axis=1)
    np.testing.assert_allclose(tails, tail, atol=5e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_what_is_recorded_is_transformers_own_log_softmax(kind: str, target: Target, reference: Plain) -> None:
    expected = reference(kind).generate(PROMPT, 40, ignore_eos=True)
    rig = Rig(target(kind), CONFIG)
    attach(rig, "s", client(PROMPT, adversary(expected), max_tokens=40, ignore_eos=True))
    recorded_tokens = run(rig)
    assert tokens_of(recorded_tokens) == expected
    check(recorded_tokens, reference(kind), PROMPT, expected)


def test_the_depths_of_accepted_nodes_are_recorded(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 40, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "knows", client(PROMPT, perfect(expected), max_tokens=40, ignore_eos=True))
    attach(rig, "drafts nothing", client(PROMPT, nothing, max_tokens=40, ignore_eos=True))
    recorded_tokens = run(rig)
    for one in of(recorded_tokens, "knows"):
        n = len(one.recorded.token)
        assert one.recorded.proposed_depths in (bytes(range(1, n + 1)), bytes([*range(1, n), 0]))
    assert max(depth for one in of(recorded_tokens, "knows") for depth in one.recorded.proposed_depths) > 1
    assert not any(b"".join(one.recorded.proposed_depths for one in of(recorded_tokens, "drafts nothing")))


def test_another_draft_is_named_and_counted_from_there(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 20, ignore_eos=True)
    wrong = [(token + 1) % VOCAB for token in expected]
    rig = Rig(target("llama"), CONFIG)
    rig.engine.start(
        "s",
        attach_of(PROMPT, ignore_eos=True, max_tokens=20),
        LIMITS,
        directive(draft_wait_ms=0),
        draft_release="r1",
        record=True,
    )
    rig.engine.append("s", nodes(wrong[0]))
    rig.engine.step()
    [first] = rig.engine.take_recorded()
    stats = rig.engine.telemetry["s"]
    assert (first.recorded.draft_release, stats.draft_release, stats.positions, stats.first_accepted) == (
        "r1",
        "r1",
        1,
        0,
    )

    rig.engine.append("s", append(1, 2, 1, (0,), (wrong[1],)))  # of the old draft, still
    rig.engine.set_draft_release("s", "r2")
    rig.engine.step()
    stats = rig.engine.telemetry["s"]
    assert (stats.draft_release, stats.positions, stats.first_accepted) == ("r2", 0, 0)

    rig.engine.append("s", append(1, 3, 2, (0, 3), (expected[2], wrong[3])))
    rig.engine.step()
    rig.engine.step()
    stats = rig.engine.telemetry["s"]
    assert (stats.positions, stats.first_accepted) == (3, 1)
    assert rig.engine.take_recorded()[0].recorded.draft_release == "r2"
    rig.engine.set_draft_release("nobody", "r3")  # of one that has gone
