"""The thread that owns a draft, where it cannot begin."""

from __future__ import annotations

import pytest

from edge_agent.drafter import Drafter
from edge_agent.worker import DraftWorker


def test_what_a_failing_build_had_taken_is_released() -> None:
    held: list[str] = []

    def build() -> Drafter:
        held.append("a context")
        raise MemoryError("measuring failed")

    worker = DraftWorker(build, held.clear)
    with pytest.raises(MemoryError, match="measuring"):
        worker.ready.result(timeout=5)
    assert held == []
