"""Test the bounds of the store of responses."""

from __future__ import annotations

import json

from edge_agent.http.responses_api.store import ResponseStore


def store(count: int = 100, size: int = 10_000, age: float = 60.0) -> tuple[ResponseStore, list[float]]:
    now = [0.0]
    return ResponseStore(count, size, age, lambda: now[0]), now


def test_the_oldest_go_when_there_are_too_many() -> None:
    kept, _ = store(count=2)
    for name in "abc":
        kept.keep(name, {"name": name})
    assert kept.get("a") is None and kept.get("b") == {"name": "b"} and kept.get("c") == {"name": "c"}


def test_the_bytes_of_all_are_bounded_and_one_that_is_too_large_drops_no_other() -> None:
    kept, _ = store(size=100)
    size = len(json.dumps({"text": "x" * 28}, separators=(",", ":")))
    for name in "abcd":
        kept.keep(name, {"text": "x" * 28})
        assert kept.bytes <= 100
    assert kept.bytes == size * (100 // size) and kept.get("d") is not None and kept.get("a") is None
    kept.keep("e", {"text": "x" * 200})
    assert kept.get("e") is None and kept.get("d") is not None
    kept.keep("d", {})
    assert kept.get("d") == {} and kept.bytes == size + 2


def test_what_is_too_old_is_gone_and_its_bytes_are_free() -> None:
    kept, now = store(age=60.0)
    kept.keep("a", {})
    now[0] = 50.0
    kept.keep("b", {})
    now[0] = 61.0
    assert kept.get("a") is None and kept.get("b") == {} and len(kept) == 1 and kept.bytes == 2


def test_what_is_kept_does_not_change_with_what_was_given_or_got() -> None:
    kept, _ = store()
    given = {"items": [1]}
    kept.keep("a", given)
    given["items"].append(2)
    found = kept.get("a")
    assert found == {"items": [1]}
    found["items"].append(3)
    assert kept.get("a") == {"items": [1]} and kept.remove("a") and not kept.remove("a") and kept.bytes == 0
