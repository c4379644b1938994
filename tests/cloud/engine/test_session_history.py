"""Test that the history keeps what outlives a session, and forgets the oldest."""

from __future__ import annotations

from cloud_verifier.engine.session_history import KEPT_S, SessionHistory

REQUEST = b"request"


def test_a_forgotten_session_leaves_neither_its_epoch_nor_its_tokens() -> None:
    memory = SessionHistory(max_sessions=2, max_tokens=10)
    for name in "ab":
        memory.see(name, 3)
        memory.keep(name, REQUEST, [1, 2, 3, 4, 5])
    memory.see("c", 1)
    assert (memory.epoch("a"), memory.kept("a", REQUEST)) == (0, [])
    memory.keep("c", REQUEST, [6, 7, 8, 9, 10])  # in the room that "a" left
    assert memory.kept("b", REQUEST) == [1, 2, 3, 4, 5]
    assert memory.kept("c", REQUEST) == [6, 7, 8, 9, 10]


def test_tokens_are_kept_for_some_minutes_and_epochs_for_longer() -> None:
    now = [50.0]
    memory = SessionHistory(max_sessions=5, max_tokens=100, clock=lambda: now[0])
    memory.see("a", 2)
    memory.keep("a", REQUEST, [1, 2])
    now[0] += KEPT_S
    memory.keep("b", REQUEST, [3])
    assert memory.kept("a", REQUEST) == [1, 2]
    now[0] += 1.0
    memory.keep("c", REQUEST, [4])
    assert [memory.kept(name, REQUEST) for name in "abc"] == [[], [3], [4]]
    assert memory.epoch("a") == 2
