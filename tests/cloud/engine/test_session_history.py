"""Test that the history keeps what outlives a session, and forgets the oldest."""

from __future__ import annotations

from cloud_verifier.engine.session_history import KEPT_S, SessionHistory

REQUEST = b"request"


def test_tokens_are_kept_for_some_minutes_and_epochs_for_longer() -> None:
    now = [50.0]
    memory = SessionHistory(clock=lambda: now[0])
    memory.see("a", 2)
    memory.keep("a", REQUEST, [1, 2])
    now[0] += KEPT_S
    memory.keep("b", REQUEST, [3])
    assert memory.kept("a", REQUEST) == [1, 2]
    now[0] += 1.0
    memory.keep("c", REQUEST, [4])
    assert [memory.kept(name, REQUEST) for name in "abc"] == [[], [3], [4]]
    assert memory.epoch("a") == 2
