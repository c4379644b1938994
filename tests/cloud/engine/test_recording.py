"""Test that a session's recording holds the target's own distribution, at the committed positions and no others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rig import LIMITS, Client, Rig, adversary, attach_of, client, nodes, nothing, perfect, prompt_of
from test_engine_lossless import SAMPLING
from tiny_targets import EOS, VOCAB, Reference

from cloud_verifier.engine import recording as module
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.recording import LEAST_LOG_PROB, RecordedTokens, Recording, proposed_depths
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import Append, Directive
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import Verified

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


def run(rig: Rig) -> list[RecordedTokens]:
    """Step until every session has finished."""
    recorded_tokens: list[RecordedTokens] = []
    for _ in range(2_000):
        if all(one.ended for one in rig.clients.values()):
            return recorded_tokens
        rig.turn()
        recorded_tokens += rig.engine.take_recorded()
    raise AssertionError("some sessions never end")


def of(recorded_tokens: list[RecordedTokens], session_id: str) -> list[RecordedTokens]:
    return [one for one in recorded_tokens if one.session_id == session_id]


def tokens_of(recorded_tokens: list[RecordedTokens]) -> list[int]:
    return [token for one in recorded_tokens for token in one.tokens]


@torch.inference_mode()
def log_softmax(plain: Reference, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities `[n, V]`, from one forward pass over the whole sequence."""
    logits = plain.module(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).numpy()


def check(
    recorded_tokens: list[RecordedTokens], plain: Reference, prompt: list[int], tokens: list[int], first: int = 0
) -> None:
    """Check every position from `first` on, once and in order, with the target's distribution."""
    assert tokens_of(recorded_tokens) == tokens[first:]
    starts = [one.start for one in recorded_tokens]
    assert starts == [first + sum(len(one.tokens) for one in recorded_tokens[:i]) for i in range(len(recorded_tokens))]
    expected = log_softmax(plain, prompt, tokens)[first:]
    ids = np.concatenate([one.top_ids for one in recorded_tokens])
    log_probs = np.concatenate([one.top_log_probs for one in recorded_tokens])
    assert ids.shape == log_probs.shape == (len(expected), CONFIG.record_top)
    np.testing.assert_allclose(log_probs, -np.sort(-expected, axis=1)[:, : CONFIG.record_top], atol=2e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, ids.astype(np.int64), axis=1), log_probs, atol=2e-4)
    tail = 1.0 - np.exp(log_probs).sum(axis=1)
    np.testing.assert_allclose(np.concatenate([one.tail for one in recorded_tokens]), tail, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_what_is_recorded_is_transformers_own_log_softmax(kind: str, target: Target, reference: Plain) -> None:
    expected = reference(kind).generate(PROMPT, 40, ignore_eos=True)
    rig = Rig(target(kind), CONFIG)
    attach(rig, "s", client(PROMPT, adversary(expected), max_tokens=40, ignore_eos=True))
    recorded_tokens = run(rig)
    assert tokens_of(recorded_tokens) == expected
    check(recorded_tokens, reference(kind), PROMPT, expected)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_temperature_filters_and_penalties_are_not_in_it(
    sampling: SamplingParams, target: Target, reference: Plain
) -> None:
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "s", client(PROMPT, nothing, max_tokens=24, ignore_eos=True, sampling=sampling))
    recorded_tokens = run(rig)
    assert len(tokens_of(recorded_tokens)) == 24
    check(recorded_tokens, reference("llama"), PROMPT, rig.clients["s"].device.received)


def test_the_depths_of_accepted_nodes_are_recorded(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 40, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "knows", client(PROMPT, perfect(expected), max_tokens=40, ignore_eos=True))
    attach(rig, "drafts nothing", client(PROMPT, nothing, max_tokens=40, ignore_eos=True))
    recorded_tokens = run(rig)
    for one in of(recorded_tokens, "knows"):
        n = len(one.tokens)
        assert one.proposed_depths in (bytes(range(1, n + 1)), bytes([*range(1, n), 0]))
    assert max(depth for one in of(recorded_tokens, "knows") for depth in one.proposed_depths) > 1
    assert not any(b"".join(one.proposed_depths for one in of(recorded_tokens, "drafts nothing")))


def test_draft_tokens_count_where_no_step_had_room_for_them(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 4, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    plain_steps = Directive(window_nodes=0, nodes_per_step=0, draft_wait_ms=0)
    rig.engine.start("s", attach_of(PROMPT, ignore_eos=True), LIMITS, plain_steps, record=True)
    rig.engine.append("s", nodes(expected[0], 0 if expected[0] else 1))
    rig.engine.append("s", Append(1, 3, 0, (1,), (expected[1],)))
    rig.engine.step()
    [one] = rig.engine.take_recorded()
    assert (one.tokens, one.proposed_depths) == ((expected[0],), b"\1")


def test_nothing_of_the_prompt_or_of_tokens_that_a_device_brings_is_recorded(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 30, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    returning = client(PROMPT, nothing, max_tokens=30, ignore_eos=True)
    returning.device.received += expected[:11]  # of another verifier's
    attach(rig, "s", returning, epoch=5)
    recorded_tokens = run(rig)
    assert {one.epoch for one in recorded_tokens} == {5}
    check(recorded_tokens, reference("llama"), PROMPT, expected, first=11)


def test_tokens_that_are_sent_once_more_are_not_recorded_once_more(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 20, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    forgetful = client(PROMPT, nothing, max_tokens=20, ignore_eos=True)
    attach(rig, "s", forgetful)
    recorded_tokens = [one for _ in range(8) for _ in [rig.turn()] for one in rig.engine.take_recorded()]
    assert 0 < len(tokens_of(recorded_tokens)) < 20
    rig.clients.clear()
    again = client(PROMPT, nothing, max_tokens=20, ignore_eos=True)  # it has received nothing of it
    attach(rig, "s", again, epoch=2)
    recorded_tokens += run(rig)
    assert again.device.received == expected
    check(recorded_tokens, reference("llama"), PROMPT, expected)


def test_sessions_that_are_not_recorded_leave_no_trace_and_commits_are_the_same(
    target: Target, reference: Plain
) -> None:
    expected = reference("llama").generate(PROMPT, 30, ignore_eos=True)
    commits = []
    for record in (True, False):
        rig = Rig(target("llama"), CONFIG)
        attach(rig, "s", client(PROMPT, adversary(expected), max_tokens=30, ignore_eos=True), record=record)
        attach(rig, "t", client(prompt_of(20), adversary(expected), max_tokens=30, ignore_eos=True), record=False)
        recorded_tokens, events = [], []
        while not all(one.ended for one in rig.clients.values()):
            events += rig.turn()
            recorded_tokens += rig.engine.take_recorded()
        assert {one.session_id for one in recorded_tokens} == ({"s"} if record else set())
        commits.append(events)
    assert commits[0] == commits[1]


def test_what_nobody_asks_for_is_gone_with_the_next_step(target: Target) -> None:
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "s", client(PROMPT, nothing, max_tokens=10, ignore_eos=True))
    for _ in range(5):
        rig.turn()
    [one] = rig.engine.take_recorded()
    assert one.start == 4
    assert rig.engine.take_recorded() == []


def test_steps_that_are_tried_one_by_one_are_recorded_too(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(target("llama"), CONFIG)
    forward = rig.executor.model.forward

    def only_alone(batch: Any, plan: Any) -> torch.Tensor:
        if len(batch.segments) > 1:
            raise RuntimeError("too many")
        return forward(batch, plan)

    monkeypatch.setattr(rig.executor.model, "forward", only_alone)
    prompts = {"s": PROMPT, "t": prompt_of(9)}
    for name, prompt in prompts.items():
        attach(rig, name, client(prompt, nothing, max_tokens=6, ignore_eos=True))
    recorded_tokens = run(rig)
    assert {name: len(tokens_of(of(recorded_tokens, name))) for name in prompts} == {"s": 6, "t": 6}
    for name, prompt in prompts.items():
        check(of(recorded_tokens, name), reference("llama"), prompt, rig.clients[name].device.received)


def test_another_draft_is_named_and_counted_from_there(target: Target, reference: Plain) -> None:
    expected = reference("llama").generate(PROMPT, 20, ignore_eos=True)
    wrong = [(token + 1) % VOCAB for token in expected]
    rig = Rig(target("llama"), CONFIG)
    rig.engine.start(
        "s",
        attach_of(PROMPT, ignore_eos=True, max_tokens=20),
        LIMITS,
        Directive(draft_wait_ms=0),
        draft_release="r1",
        record=True,
    )
    rig.engine.append("s", nodes(wrong[0]))
    rig.engine.step()
    [first] = rig.engine.take_recorded()
    stats = rig.engine.stats().sessions["s"]
    assert (first.draft_release, stats.draft_release, stats.positions, stats.first_accepted) == ("r1", "r1", 1, 0)

    rig.engine.append("s", Append(1, 2, 1, (0,), (wrong[1],)))  # of the old draft, still
    rig.engine.set_draft_release("s", "r2")
    rig.engine.step()
    stats = rig.engine.stats().sessions["s"]
    assert (stats.draft_release, stats.positions, stats.first_accepted) == ("r2", 0, 0)

    rig.engine.append("s", Append(1, 3, 2, (0, 3), (expected[2], wrong[3])))
    rig.engine.step()
    rig.engine.step()
    stats = rig.engine.stats().sessions["s"]
    assert (stats.positions, stats.first_accepted) == (3, 1)
    assert rig.engine.take_recorded()[0].draft_release == "r2"
    rig.engine.set_draft_release("nobody", "r3")  # of one that has gone


def recorded(logits: torch.Tensor, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is recorded of each row: ids and log-probabilities `[n, K]`, tail `[n]`."""
    recording = Recording(top)
    protocol = SimpleNamespace(tree=TokenTree(), epoch=1, position=0)
    session = cast(EngineSession, SimpleNamespace(session_id="s", draft_release="", protocol=protocol))
    for row in range(len(logits)):
        recording.note(session, Verified((0,), ()), logits, row)
    recorded_tokens = recording.take()
    ids, log_probs = (
        np.concatenate([getattr(one, name) for one in recorded_tokens]) for name in ("top_ids", "top_log_probs")
    )
    return ids, log_probs, np.concatenate([one.tail for one in recorded_tokens])


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    ids, log_probs, tail = recorded(torch.tensor([[0.0, 2.0, float("-inf")]]), 8)
    assert ids.tolist() == [[1, 0, 2]]
    np.testing.assert_allclose(log_probs, [[-0.126928, -2.126928, LEAST_LOG_PROB]], rtol=1e-5)
    assert 0.0 <= tail[0] < 1e-6


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(3, 5_000, generator=torch.manual_seed(1)).bfloat16()
    ids, log_probs, tail = recorded(logits, 4)
    expected = logits.float().log_softmax(-1)
    np.testing.assert_allclose(log_probs, expected.gather(1, torch.tensor(ids.astype(np.int64))), atol=1e-5)
    np.testing.assert_allclose(tail, 1.0 - expected.topk(4).values.exp().sum(1), atol=1e-5)


def test_depths_end_where_no_node_carries_the_token_and_at_255() -> None:
    tree = TokenTree()
    for node in range(1, 301):
        tree.add(node, node - 1 if node > 1 else ROOT, EOS)
    assert proposed_depths(tree, [EOS, EOS, EOS + 1, EOS]) == b"\1\2\0\0"
    assert proposed_depths(tree, [EOS] * 300)[-2:] == b"\xff\xff"


def test_what_cannot_be_noted_is_lost_and_its_session_goes_on(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise IndexError("a bug")

    monkeypatch.setattr(module, "proposed_depths", broken)
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "s", client(PROMPT, nothing, max_tokens=10, ignore_eos=True))
    assert run(rig) == []
    assert rig.clients["s"].device.received == reference("llama").generate(PROMPT, 10, ignore_eos=True)
    assert rig.engine.stats().unrecorded == 10


def test_without_memory_for_the_distributions_they_are_lost_and_sessions_go_on(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    rig = Rig(target("llama"), CONFIG)
    attach(rig, "s", client(PROMPT, nothing, max_tokens=10, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", no_room)
        rig.turn()
        assert rig.engine.take_recorded() == []
        rig.turn()
        assert rig.engine.take_recorded() == []
    expected = reference("llama").generate(PROMPT, 10, ignore_eos=True)
    check(run(rig), reference("llama"), PROMPT, expected, first=2)
    assert rig.engine.stats().unrecorded == 2
    assert caplog.text.count("cannot be recorded") == 1


def test_many_rows_are_looked_at_a_few_at_a_time(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, topk = [], torch.Tensor.topk

    def watching(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(logits))
        return topk(logits, *args, **options)

    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * 4 * VOCAB)
    monkeypatch.setattr(torch.Tensor, "topk", watching)
    expected = reference("llama").generate(PROMPT, 40, ignore_eos=True)
    rig = Rig(target("llama"), CONFIG)
    attach(rig, "s", client(PROMPT, perfect(expected), max_tokens=40, ignore_eos=True))
    recorded_tokens = run(rig)
    assert max(len(one.tokens) for one in recorded_tokens) > 3
    assert max(sizes) == 3
    check(recorded_tokens, reference("llama"), PROMPT, expected)
