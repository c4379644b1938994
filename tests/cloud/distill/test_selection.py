"""Test which texts a dataset takes: a mix of ages and classes, capped tenants, few near-duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafts import passage

from cloud_verifier.distill.data import selection
from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.distill.data.selection import (
    age,
    tenant_cap,
    water_filled,
)
from cloud_verifier.traffic.passage import Passage

LENGTH = 20


def select(pieces: Sequence[Passage], **changes: Any) -> tuple[list[Passage], Counter[str]]:
    fields: dict[str, Any] = {
        "tokens": 10_000,
        "replay_share": 0.3,
        "tenant_share": 0.5,
        "tenant_tokens": 0,
        "copies": 2,
        "repeated_share": 0.8,
        "seed": 0,
    }
    since = changes.pop("since", 100.0)
    fields |= changes
    tokens = fields["tokens"]
    return selection.select(pieces, DatasetPlan(**fields | {"tokens": max(1, tokens)}), tokens, since)


def texts(count: int, name: str, *, time: float = 200.0, tenant: str = "", same: bool = False) -> list[Passage]:
    """Return pieces of 20 labels each."""
    rng = np.random.default_rng(sum(f"{name}{time}{tenant}".encode()))
    rows = rng.integers(0, 1 << 20, (1 if same else count, LENGTH)).astype(np.int32)
    return [
        passage(
            f"{name}-{tenant}-{time}-{i}",
            0,
            rows[i % len(rows)],
            top=0,
            tenant=tenant,
            traffic_class=name,
            time_unix=time,
        )
        for i in range(count)
    ]


def amounts(chosen: list[Passage]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for one in chosen:
        sums[one.traffic_class, age(one, 100.0)] += len(one)
    return sums


def test_old_traffic_of_every_class_has_its_share_beside_what_is_fresh() -> None:
    offered = [*texts(900, "sums"), *texts(900, "code", time=10), *texts(900, "prose", time=20)]
    chosen, _ = select(offered, tokens=10_000, replay_share=0.3)
    assert amounts(chosen) == {("sums", "fresh"): 7000, ("code", "old"): 1500, ("prose", "old"): 1500}


def test_held_out_text_of_a_class_that_is_old_is_measured_however_little_is_fresh() -> None:
    offered = [*texts(100, "sums"), *texts(5000, "code", time=10), *texts(300, "sums", time=10)]
    chosen, _ = select(offered, tokens=10_000, since=math.inf)
    found = amounts(chosen)
    assert found["code", "old"] == found["sums", "fresh"] + found["sums", "old"] == 5000


def test_a_tenant_that_floods_gives_no_more_than_its_share() -> None:
    offered = [*texts(5000, "code", tenant="flood"), *texts(40, "code", tenant="a"), *texts(40, "code", tenant="b")]
    chosen, left_out = select(offered, tokens=1_000_000, tenant_share=0.5)
    given_by = Counter[str]()
    for one in chosen:
        given_by[one.tenant] += len(one)
    assert given_by == {"flood": 1600, "a": 800, "b": 800}
    assert left_out["over_cap"] == 5000 * 20 - 1600


def test_a_tenant_that_invents_classes_gives_no_more_than_its_share_of_all() -> None:
    made_up = [one for i in range(200) for one in texts(75, f"class-{i}", tenant="flood")]
    chosen, _ = select([*texts(15_000, "code", tenant="a"), *made_up], tokens=300_000)
    by_flood = sum(len(one) for one in chosen if one.tenant == "flood")
    assert by_flood <= 150_000
    assert sum(len(one) for one in chosen) > 270_000


def test_near_duplicates_are_taken_a_few_times_only() -> None:
    chosen, left_out = select([*texts(50, "code", same=True), *texts(10, "code", time=150)], copies=2)
    assert len(chosen) == 12
    assert left_out["duplicates"] == 48 * 20


def test_the_same_seed_chooses_the_same_texts_in_any_order_of_the_log() -> None:
    offered = texts(300, "code")
    first, _ = select(offered, tokens=1000)
    again, _ = select(offered[::-1], tokens=1000)
    other, _ = select(offered, tokens=1000, seed=1)
    assert [one.session_id for one in first] == [one.session_id for one in again]
    assert {one.session_id for one in first} != {one.session_id for one in other}


@given(
    st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000), min_size=1),
    st.integers(0, 3000),
    st.floats(0.1, 10),
)
def test_water_filling_gives_all_there_is_and_nothing_that_is_not(
    available: dict[str, int], total: int, weight: float
) -> None:
    given_out = water_filled(available, {"a": weight}, total)
    assert all(0 <= given_out[name] <= amount for name, amount in available.items())
    assert sum(given_out.values()) <= total
    assert sum(given_out.values()) >= min(total, sum(available.values())) - len(available)


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=8), st.sampled_from([0.2, 0.5, 0.7, 1.0]))
def test_no_tenant_gives_more_than_its_share_of_what_is_given(amounts: list[int], share: float) -> None:
    cap = tenant_cap(amounts, share, 0)
    given_out = [min(amount, cap) for amount in amounts]
    assert max(given_out) <= max(share, 1 / len(amounts)) * sum(given_out) + len(amounts)
    assert sum(given_out) > 0
