"""Test that a tenant's n-gram store holds what several of its sessions share, and goes out only if that helps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafts import ListedLog, passage

from cloud_verifier.distill import cli, ngram_store
from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.data.dataset import session_lot
from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.distill.errors import TooLittleTraffic
from cloud_verifier.distill.factory import target_hashes
from cloud_verifier.distill.publishing.publisher import TargetHashes
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.errors import BadRequest
from outrider.core.ngram import ORDER, NgramTable

TARGET = TargetHashes("target", "tokens")
PLAN = DatasetPlan(heldout_share=0.25)
MODEL = Path(__file__).resolve().parents[3] / "models" / "target"


def build(passages: Sequence[Passage], tenant: str = "a", least: int = 3, dataset: DatasetPlan = PLAN, **limits: int):
    target = dataclasses.replace(TARGET, tenant=tenant)
    return ngram_store.build(ListedLog(passages), target, dataset, 500.0, least, **limits)


def phrases(count: int, seed: int = 0, shared: int = 40, tenant: str = "a") -> list[Passage]:
    """Return sessions that each consist of phrases which many have in common, in an order of their own."""
    common = np.random.default_rng(seed).integers(0, 500, (shared, 12))
    made = []
    for number in range(count):
        order = np.random.default_rng([seed, number]).integers(0, shared, 25)
        made.append(passage(f"{tenant}{number}", 0, common[order].ravel().tolist(), tenant=tenant))
    return made


def unlike(count: int) -> list[Passage]:
    """Return sessions that have nothing in common."""
    return [
        passage(f"u{number}", 0, np.random.default_rng(number).integers(0, 5_000, 300).tolist(), tenant="a")
        for number in range(count)
    ]


def sessions_by_ngram(passages: Sequence[Passage]) -> dict[tuple[int, ...], set[str]]:
    """Return all n-grams of a context and its follower, with the sessions that have them without a gap."""
    found: dict[tuple[int, ...], set[str]] = {}
    for one in passages:
        tokens = one.tokens.tolist()
        for end in range(2, len(tokens) + 1):
            for length in range(2, min(ORDER + 1, end) + 1):
                found.setdefault(tuple(tokens[end - length : end]), set()).add(one.session_id)
    return found


def holds(table: NgramTable, ngram: Sequence[int]) -> bool:
    from outrider.core.ngram import _hashes

    entries = table.followers(_hashes(ngram[-2::-1]))
    return len(entries) == len(ngram) - 1 and ngram[-1] in entries[-1][2]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=3), max_size=7),
    st.integers(2, 4),
)
def test_no_ngram_of_fewer_sessions_is_in_a_store_and_every_other_one_is(
    texts: list[list[list[int]]], least: int
) -> None:
    passages = []
    for session, spans in enumerate(texts):
        start = 0
        for tokens in spans:  # with a gap after each, as where secrets were left out
            passages.append(passage(f"s{session}", start, tokens, tenant="a"))
            start += len(tokens) + 5
    dataset = DatasetPlan(heldout_share=1e-9)
    if len(texts) < least:
        with pytest.raises(TooLittleTraffic):
            build(passages, "a", least, dataset)
        return
    store, _ = build(passages, "a", least, dataset)
    expected = sessions_by_ngram(passages)
    kept = {ngram for ngram, sessions in expected.items() if len(sessions) >= least}
    assert all(holds(store.table, ngram) for ngram in kept)
    assert not any(holds(store.table, ngram) for ngram in expected.keys() - kept)
    assert len(store.table.tokens) == len(kept)  # and nothing else, such as n-grams over a gap


def test_a_session_that_repeats_itself_counts_once() -> None:
    said = [1, 2, 3, 4] * 20
    alone = [passage("one", 0, said, tenant="a"), *(passage(f"o{i}", 0, [7, 8, 9 + i], tenant="a") for i in range(9))]
    store, _ = build(alone, "a", 2, DatasetPlan(heldout_share=1e-9))
    assert holds(store.table, [7, 8]) and not holds(store.table, [1, 2])


def test_a_store_is_of_one_tenant_and_one_target_alone() -> None:
    others = [dataclasses.replace(one, session_id=f"x{one.session_id}") for one in phrases(20, seed=1, tenant="b")]
    elsewhere = [dataclasses.replace(one, weights_hash="another") for one in phrases(20, seed=2)]
    mixed, _ = build([*phrases(20), *others, *elsewhere])
    alone, _ = build(phrases(20))
    assert (mixed.tenant, mixed.sessions) == ("a", alone.sessions)
    assert all(np.array_equal(array, alone.table.arrays()[name]) for name, array in mixed.table.arrays().items())
    with pytest.raises(TooLittleTraffic, match="tenant 'c'"):
        build(phrases(20), "c")


def test_prompts_are_in_no_store() -> None:
    asked = np.arange(900, 920, dtype=np.int32)
    store, _ = build([dataclasses.replace(one, prompt=asked) for one in phrases(20)])
    assert int(store.table.tokens.max()) < 900
    assert not holds(store.table, [901, 902])


def test_what_is_held_out_is_what_drafts_are_measured_on() -> None:
    passages = phrases(60)
    store, texts = build(passages)
    assert {text.session_id for text in texts} == {
        one.session_id for one in passages if session_lot(one.session_id) < PLAN.heldout_share
    }
    assert store.sessions == 60 - len(texts)


def test_a_store_of_fewer_than_two_sessions_or_of_nobody_is_refused() -> None:
    with pytest.raises(BadRequest, match="least_sessions is 1"):
        build(phrases(20), "a", 1)
    with pytest.raises(BadRequest, match="one tenant"):
        build(phrases(20), "")


@pytest.mark.parametrize("kib", [64, 16, 4, 1])
def test_the_rarest_ngrams_are_dropped_until_a_store_is_small_enough(kib: int) -> None:
    whole, _ = build(phrases(60))
    small, _ = build(phrases(60), max_bytes=kib << 10)
    assert small.size <= kib << 10 < whole.size
    NgramTable.of(small.table.arrays())
    if len(small.table.counts):
        rarest = int(small.table.counts.min())
        assert int((whole.table.counts >= rarest).sum()) == len(small.table.counts)


def test_a_store_that_helps_passes_the_gate_and_one_of_other_texts_does_not() -> None:
    store, texts = build(phrases(80))
    verdict = ngram_store.judge(store, None, texts, GateRule())
    assert verdict.passed and verdict.fresh is not None and verdict.fresh.chain_gain > 0.5
    again = ngram_store.judge(store, store, texts, GateRule())
    assert not again.passed and again.fresh is not None and again.fresh.chain_gain == 0.0
    other, _ = build(phrases(80, seed=1))
    useless = ngram_store.judge(other, None, texts, GateRule())
    assert not useless.passed and any("tokens per step" in reason for reason in useless.reasons)


def test_sessions_that_share_nothing_make_no_store_that_passes() -> None:
    store, texts = build(unlike(60))
    assert not ngram_store.judge(store, None, texts, GateRule()).passed


def test_too_few_held_out_sessions_are_no_proof() -> None:
    store, texts = build(phrases(80))
    verdict = ngram_store.judge(store, None, texts[:3], GateRule())
    assert not verdict.passed and "held-out sessions" in verdict.reasons[0]


@pytest.mark.parametrize(("passages", "status"), [(phrases(300), 0), (unlike(150), cli.EXIT_REFUSED)])
def test_the_command_writes_a_store_that_passed(
    passages: list[Passage], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_hashes(MODEL)
    writer = SegmentWriter(str(tmp_path / "traffic"))
    for one in passages:
        writer.add(dataclasses.replace(one, weights_hash=target.weights_hash, expires_unix=1e11))
    writer.flush()
    assert len(list(SegmentLog(str(tmp_path / "traffic")).read())) == len(passages)
    out = tmp_path / "a.safetensors"
    settings = ("--traffic", str(tmp_path / "traffic"), "--target", str(MODEL), "--draft", "-", "--artifacts", "-")
    with pytest.raises(SystemExit) as ended:
        cli.main(["store", "a", "--out", str(out), *settings])
    assert ended.value.code == status
    assert json.loads(capsys.readouterr().out)["passed"] is (status == 0)
    assert out.exists() is (status == 0)
    if not status:
        store = NgramStore.load(out, vocabulary=500)
        store.check(weights_hash=target.weights_hash, tokenizer_hash=target.tokenizer_hash, tenant="a")
        assert store.least_sessions == 3
