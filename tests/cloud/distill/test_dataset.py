"""Test that datasets hold what the traffic log recorded, and survive the disk."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_drafts import TOP, ListedLog, passage

from cloud_verifier.distill.dataset import OTHERS, DatasetCard, DatasetPlan, Session, build, cut, fairly, spans, taken
from cloud_verifier.distill.run_folder import StageFailed
from cloud_verifier.distill.texts import HELDOUT, TRAIN, VALIDATION, Text, load_texts
from cloud_verifier.traffic.passage import Passage


def plan(**changes: Any) -> DatasetPlan:
    return DatasetPlan(**({"weights_hash": "target", "top": TOP, "window": 64, "heldout_share": 0.25} | changes))


def all_texts(folder: Path) -> list[Text]:
    return [*load_texts(folder / TRAIN), *load_texts(folder / VALIDATION), *load_texts(folder / HELDOUT)]


def sessions(count: int, **changes: Any) -> list[Passage]:
    """Return sessions of 40 tokens in two passages each."""
    found = []
    for number in range(count):
        tokens = np.random.default_rng([number, *changes.get("traffic_class", "").encode()]).integers(0, 200, 40)
        for start in (0, 25):
            part = tokens[start : start + 25].tolist()
            found.append(passage(f"{changes.get('traffic_class', '')}{number}", start, part, **changes))
    return found


def test_a_prompt_is_read_before_a_text_and_is_no_label(tmp_path: Path) -> None:
    asked = np.full(6, 250, np.int32)
    passages = [p if p.start else dataclasses.replace(p, prompt=asked) for p in sessions(20)]
    build(ListedLog(passages), tmp_path / "d", plan(prompt=4), now=500.0)
    build(ListedLog(passages), tmp_path / "without", plan(prompt=0), now=500.0)
    texts = all_texts(tmp_path / "d")
    assert len(texts) == 20
    known = {tuple(one.tokens.tolist()): one for one in passages}
    for text in texts:
        assert (text.first, text.tokens[:4].tolist()) == (4, [250] * 4)
        assert (text.top_ids[:4] == -1).all() and (text.tail[:4] == 0).all()
        assert 250 not in text.tokens[4:]
        source = known[tuple(text.tokens[4:29].tolist())]
        assert np.array_equal(text.top_ids[4:29], source.top_ids)
    # What is counted is what is learnt from or measured on: here also each session's first token, and no prompt.
    assert sum(text.label_count for text in texts) == 20 * 40
    assert not any(250 in text.tokens for text in load_texts(tmp_path / "without" / TRAIN))


def positions(texts: list[Text]) -> list[tuple[bytes, int]]:
    return [(text.tokens.tobytes(), text.first) for text in texts]


def test_every_recorded_position_is_learnt_from_or_held_out(tmp_path: Path) -> None:
    log = ListedLog(sessions(40))
    card = build(log, tmp_path / "d", plan(), now=500.0)
    train, held = load_texts(tmp_path / "d" / TRAIN), load_texts(tmp_path / "d" / HELDOUT)
    # Of each session all but its first token, for which nothing speaks.
    assert sum(text.label_count for text in all_texts(tmp_path / "d")) == 40 * 39
    assert card.train_tokens == sum(text.label_count for text in train)
    assert card.heldout_sessions == {"code": len(held)}
    assert 2 <= len(held) <= 20
    assert DatasetCard.read(tmp_path / "d") == card


def test_a_text_has_the_distributions_of_its_own_positions(tmp_path: Path) -> None:
    log = ListedLog(sessions(12))
    build(log, tmp_path / "d", plan(), now=500.0)
    known = {(one.session_id, one.start): one for one in log.passages}
    by_tokens = {tuple(known[str(n), 0].tokens.tolist()): n for n in range(12)}
    for text in all_texts(tmp_path / "d"):
        number = by_tokens[tuple(text.tokens[:25].tolist())]
        for start in (0, 25):
            source = known[str(number), start]
            labels = max(1, start)  # for a session's first token nothing speaks
            here, there = slice(labels, start + len(source)), slice(labels - start, None)
            assert np.array_equal(text.top_ids[here], source.top_ids[there])
            np.testing.assert_allclose(text.top_log_probs[here], source.top_log_probs[there], rtol=2e-3)
            np.testing.assert_allclose(text.tail[here], source.tail[there], atol=1e-6)


def test_a_held_out_session_is_held_out_in_every_dataset(tmp_path: Path) -> None:
    few, many = sessions(20), sessions(60)
    build(ListedLog(few), tmp_path / "few", plan(seed=1), now=500.0)
    build(ListedLog(many), tmp_path / "many", plan(seed=2), now=500.0)
    assert set(positions(load_texts(tmp_path / "few" / HELDOUT))) <= set(
        positions(load_texts(tmp_path / "many" / HELDOUT))
    )
    assert not set(positions(load_texts(tmp_path / "many" / TRAIN))) & set(
        positions(load_texts(tmp_path / "few" / HELDOUT))
    )


def test_only_text_of_the_target_is_taken(tmp_path: Path) -> None:
    log = ListedLog([*sessions(20, weights_hash="before", traffic_class="x"), *sessions(20)])
    build(log, tmp_path / "d", plan(), now=500.0)
    assert {text.traffic_class for text in all_texts(tmp_path / "d")} == {"code"}


def test_what_expires_before_a_run_ends_is_left_out_and_the_rest_says_when_it_expires(tmp_path: Path) -> None:
    soon, later = sessions(20, traffic_class="x", expires_unix=559.0), sessions(20, expires_unix=700.0)
    card = build(ListedLog([*soon, *later]), tmp_path / "d", plan(lasts_s=60.0), now=500.0)
    assert card.expires_unix == 700.0
    assert {text.traffic_class for text in all_texts(tmp_path / "d")} == {"code"}
    with pytest.raises(StageFailed, match="lasts for 1 minutes"):
        build(ListedLog(soon), tmp_path / "d", plan(lasts_s=60.0), now=500.0)


@pytest.mark.parametrize(("count", "share", "said"), [(0, 0.5, "no passage"), (1, 0.5, "all are needed")])
def test_a_log_with_too_little_is_refused_with_what_it_holds(
    count: int, share: float, said: str, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match=said):
        build(ListedLog(sessions(count)), tmp_path / "d", plan(heldout_share=share), now=500.0)


def test_the_gate_sees_old_classes_whatever_the_replay_share(tmp_path: Path) -> None:
    old = sessions(80, traffic_class="code", time_unix=50.0, expires_unix=900.0)
    log = ListedLog([*old, *sessions(20, traffic_class="sums")])
    card = build(log, tmp_path / "d", plan(fresh_since_unix=80.0, heldout_tokens=100_000), now=500.0)
    all_old = build(ListedLog(old), tmp_path / "old", plan(heldout_tokens=100_000), now=500.0)
    assert card.heldout_sessions["code"] == all_old.heldout_sessions["code"] > 0


def test_what_chooses_the_best_checkpoint_is_not_what_the_gate_measures_on(tmp_path: Path) -> None:
    build(ListedLog(sessions(200)), tmp_path / "d", plan(), now=500.0)
    parts = [set(positions(load_texts(tmp_path / "d" / part))) for part in (TRAIN, VALIDATION, HELDOUT)]
    assert all(parts) and sum(map(len, parts)) == len(set.union(*parts)) == 200
    assert len(parts[1]) < len(parts[2])


def test_nothing_is_learnt_that_is_the_same_as_what_is_held_out(tmp_path: Path) -> None:
    twins = []
    for number in range(40):
        tokens = np.random.default_rng(number).integers(0, 200, 40).tolist()
        twins += [passage(f"{number}-{turn}", 0, tokens) for turn in ("a", "b")]
    build(ListedLog(twins), tmp_path / "d", plan(), now=500.0)
    trained = {text.tokens.tobytes() for text in load_texts(tmp_path / "d" / TRAIN)}
    assert trained and not trained & {text.tokens.tobytes() for text in load_texts(tmp_path / "d" / HELDOUT)}


def test_old_traffic_has_its_share_beside_what_is_fresh_of_which_the_card_names_the_classes(tmp_path: Path) -> None:
    old = [*sessions(200, traffic_class="code", time_unix=10.0), *sessions(200, traffic_class="prose", time_unix=20.0)]
    log = ListedLog([*old, *sessions(400, traffic_class="sums"), *sessions(10, traffic_class="rare")])
    card = build(log, tmp_path / "d", plan(fresh_since_unix=80.0, tokens=4_000, replay_share=0.3), now=500.0)
    found = Counter[str]()
    for text in load_texts(tmp_path / "d" / TRAIN):
        found[text.traffic_class] += text.label_count
    assert card.fresh == ("sums",)
    assert found["code"] == pytest.approx(600, abs=80) == found["prose"]
    assert found["sums"] + found["rare"] == pytest.approx(2_800, abs=80)


def test_classes_beyond_a_number_are_one(tmp_path: Path) -> None:
    made_up = [one for number in range(40) for one in sessions(2, traffic_class=f"class-{number}")]
    build(ListedLog([*made_up, *sessions(60)]), tmp_path / "d", plan(), now=500.0)
    names = {text.traffic_class for text in all_texts(tmp_path / "d")}
    assert len(names) <= 33 and {"code", OTHERS} <= names


def test_a_tenant_that_floods_takes_no_more_of_what_is_chosen_than_others_have() -> None:
    flood = [Session(f"f{number}", "flood", f"class-{number % 3}", 20) for number in range(5_000)]
    others = [Session(f"{name}{number}", name, "code", 20) for name in "ab" for number in range(40)]
    chosen = Counter(one.tenant for one in taken(fairly([*flood, *others], lambda one: one.tenant), 2_400))
    assert chosen == {"flood": 40, "a": 40, "b": 40}


def shown(found: list[Passage]) -> list[tuple[int, list[int]]]:
    return [(one.start, one.tokens.tolist()) for one in found]


def test_a_gap_cuts_a_sessions_text_and_what_two_have_recorded_is_taken_once() -> None:
    found = spans([passage("a", 5, [6]), passage("a", 0, [1, 2]), passage("a", 3, [4, 5])])
    assert shown(found) == [(0, [1, 2]), (3, [4, 5, 6])]
    found = spans([passage("a", 0, [1, 2, 3], time_unix=5.0), passage("a", 2, [8, 4], time_unix=9.0)])
    assert shown(found) == [(0, [1, 2, 3]), (3, [4])]


def test_texts_cover_every_position_but_the_first_exactly_once() -> None:
    (span,) = spans([passage("a", 0, list(range(300)))])
    texts = list(cut(span, plan(window=32), "code", 0))
    assert [token for text in texts for token in text.tokens[text.first :]] == list(range(1, 300))
    assert all(len(text.tokens) <= 32 for text in texts)
    for text in texts:
        assert text.tokens.tolist() == list(range(text.tokens[0], text.tokens[0] + len(text.tokens)))
