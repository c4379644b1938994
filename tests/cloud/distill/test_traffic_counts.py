"""Test that traffic is counted once, and when it is reason to train."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from loop_fakes import TARGET, FakeLog, passage

from cloud_verifier.distill.data import traffic_counts as module
from cloud_verifier.distill.data.selection import OTHERS
from cloud_verifier.distill.data.traffic_counts import (
    LATE_S,
    MAX_TENANT_CLASSES,
    ClassTraffic,
    TrafficCounter,
    alarms,
    training_due,
    updated_usual,
)

FRESH = 1_000
OURS = "ab" * 32


def counter(log: FakeLog, window: int = 1_000) -> TrafficCounter:
    return TrafficCounter(log, TARGET.weights_hash, window=window)


def seen(*parts: tuple[int, float | None]) -> ClassTraffic:
    """Return a class of which the acceptance is measured over 200 tokens. parts: tokens, and their acceptance."""
    found = ClassTraffic(200)
    for tokens, share in parts:
        found.add(tokens, None if share is None else round(share * tokens))
    return found


def shown(traffic: Mapping[str, ClassTraffic]) -> dict[str, tuple[int, int, float | None]]:
    return {name: (one.tokens, one.judged, one.acceptance) for name, one in traffic.items()}


def test_tokens_and_acceptance_are_counted_by_class() -> None:
    log = FakeLog(
        [
            passage("a", 100, "code", 10.0, 0.8, draft_release=OURS),
            passage("b", 50, "sums", 11.0, 0.5, draft_release=f"sha256:{OURS}"),
            passage("c", 70, "code", 12.0, 0.1, draft_release="another"),
            passage("d", 60, "code", 13.0, 0.1, draft_release=OURS, weights_hash="sha256:another"),
        ]
    )
    traffic, newest_unix = counter(log, window=50).count(0.0, OURS)
    assert shown(traffic) == {"code": (170, 100, 0.8), "sums": (50, 50, 0.5)}
    assert newest_unix == 12.0


def test_looking_again_counts_only_what_is_new_even_if_it_comes_late() -> None:
    log = FakeLog([passage("a", 100, "code", 1_010.0)])
    counting = counter(log)
    counting.count(0.0, OURS)
    log.passages += [passage("a", 30, "code", 1_020.0, start=100), passage("b", 5, "code", 1_015.0)]
    assert counting.count(0.0, OURS)[0]["code"].tokens == 135
    log.passages.append(passage("late", 7, "code", 1_020.0 - LATE_S))
    assert counting.count(0.0, OURS)[0]["code"].tokens == 142
    assert counting.count(0.0, OURS)[0]["code"].tokens == 142


def test_a_session_of_two_verifiers_counts_whole_whichever_file_comes_first() -> None:
    here, there = ([passage("a", 10, "code", 1.0 + i, start=10 * i) for i in range(k, 9, 2)] for k in (0, 1))
    assert counter(FakeLog([*here, *there, *here])).count(0.0, OURS)[0]["code"].tokens == 90


def test_acceptance_is_that_of_the_latest_tokens() -> None:
    log = FakeLog(
        [passage(f"s{i}", 100, "code", float(i), 0.9 if i < 20 else 0.2, draft_release=OURS) for i in range(22, 0, -1)]
    )
    traffic, _ = counter(log, window=200).count(0.0, OURS)
    assert shown(traffic)["code"] == (2_200, 200, 0.2)
    assert traffic["code"].best == 0.9


def test_a_class_that_has_fallen_waits_for_enough_of_it_or_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_TOKENS", 500)
    usual = {"code": 0.81}
    traffic = {"code": seen((499, 0.7)), "sums": seen((400, None))}
    assert training_due(traffic, usual, FRESH) is None
    assert set(alarms(traffic, usual)) == {"code"}
    assert training_due({**traffic, "code": seen((500, 0.7))}, usual, FRESH) is not None
    cause = training_due({**traffic, "sums": seen((501, None))}, usual, FRESH)
    assert cause is not None and "'code'" in cause[0]


def test_a_class_with_lower_acceptance_than_usual_is_reason_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_TOKENS", 0)
    cause = training_due({"code": seen((200, 0.7))}, {"code": 0.81}, FRESH)
    assert cause is not None and cause[1] == ("code",)
    assert training_due({"code": seen((200, 0.72))}, {"code": 0.81}, FRESH) is None
    assert training_due({"code": seen((199, 0.1))}, {"code": 0.81}, FRESH) is None
    assert training_due({"code": seen((200, 0.8), (200, 0.69))}, {}, FRESH) is not None, "it was better before"


def test_usual_acceptance_moves_half_way_to_the_present_one_and_a_new_class_brings_its_own() -> None:
    traffic = {"code": seen((200, 0.4)), "sums": seen((200, 0.6)), "few": seen((199, 0.1))}
    assert updated_usual(traffic, {"code": 0.8, "old": 0.5}) == {
        "code": pytest.approx(0.6),
        "sums": pytest.approx(0.6),
        "old": 0.5,
    }


def test_a_tenant_that_invents_classes_has_a_few_and_the_rest_are_one() -> None:
    made_up = [passage(f"s{i}", 10, f"class-{i:03}", 10.0 + i, 0.0, tenant="flood") for i in range(100)]
    found = counter(FakeLog([*made_up, passage("a", 50, "code", 500.0, tenant="other")])).count(0.0, OURS)[0]
    assert len(found) == MAX_TENANT_CLASSES + 2
    assert found[OTHERS].tokens == 10 * (100 - MAX_TENANT_CLASSES) and found["code"].tokens == 50
