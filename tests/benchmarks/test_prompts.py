"""Test that the prompts are complete: of every category as many as benchmarks expect, each with an id of its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
CATEGORIES = {
    **dict.fromkeys(("translation", "summary", "question answering", "retrieval"), 12),
    **dict.fromkeys(("chat", "reasoning", "code"), 16),
}


def test_prompts_are_of_seven_categories_and_no_two_are_alike() -> None:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert Counter(row["category"] for row in rows) == CATEGORIES
    assert len({row["id"] for row in rows}) == len({row["turns"][0] for row in rows}) == 96
    assert all(len(row["turns"]) == (2 if row["category"] == "chat" else 1) for row in rows)
