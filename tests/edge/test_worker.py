"""Test the thread that owns a draft: where it cannot begin."""

from __future__ import annotations

import contextlib

import pytest

from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.worker import DraftWorker


def test_what_a_draft_had_taken_before_it_failed_is_released() -> None:
    held: list[str] = []

    class Failing(Draft):
        def drafter(self, owned: contextlib.ExitStack) -> Drafter:
            held.append("a context")
            owned.callback(held.clear)
            raise MemoryError("measuring failed")

    worker = DraftWorker(Failing("d"))
    with pytest.raises(MemoryError, match="measuring"):
        worker.ready.result(timeout=60)
    assert held == []
