"""Test malicious Appends: each is refused by a message that names field, value and bound, and changes no token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_messages import attach
from single_walk import verify

from outrider.core.errors import Fenced, ProtocolViolation
from outrider.core.protocol.messages import Append, Cancel, Finish, SessionLimits, append_message
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT
from outrider.core.verification import tree_batch_of

EPOCH = 3
EOS = 9
LIMITS = SessionLimits(nodes=4, depth=3, in_flight=6, run_ahead=5)


def target(prefix: list[int]) -> int:
    """Return the next token of 0, 1, 2, 0, 1, 2, ..., which has no end."""
    return len(prefix) % 3


def session(received: int = 0, limits: SessionLimits = LIMITS, max_tokens: int = 100) -> VerifierSession:
    tokens = tuple(i % 3 for i in range(received))
    opened = attach(EPOCH, (5, 6), tokens=tokens, max_tokens=max_tokens)
    return VerifierSession(opened, limits, eos_token_ids=(EOS,))


def step(verifier: VerifierSession, limit: int = 8):
    batch = tree_batch_of(verifier.tree, [node.id for node in verifier.tree][:limit])
    committed = list(verifier.committed)
    return verifier.commit(batch, verify(batch, lambda _, path: target([*committed, *path]), verifier.ends))


def append(first_id: int, base: int, *nodes: tuple[int, int], idle: bool = False, epoch: int = EPOCH) -> Append:
    """Return an Append with `nodes`, each a (parent, token)."""
    return append_message(epoch, first_id, base, [p for p, _ in nodes], [t for _, t in nodes], idle=idle)


def assert_refused(verifier: VerifierSession, message: Append, field: str, said: str) -> None:
    """Check that the refusal names this field and says these words, and that it changes no token."""
    before = list(verifier.committed)
    with pytest.raises(ProtocolViolation) as caught:
        verifier.append(message)
    assert verifier.committed == before
    assert caught.value.field == field and said in str(caught.value)


# --------------------------------------------------------------------------- refusals

TWIN = "token of node {} is {}, must be another than its siblings'"
STEP = None
"""Stands for a step of the verifier among the Appends that come before."""
REFUSED: dict[str, tuple[list[Append | None], Append, str, str]] = {
    "a gap in the ids": (
        [append(1, 0, (0, 5))],
        append(3, 0, (0, 6)),
        "first_id",
        "first_id is 3, must be at most 2",
    ),
    "a base beyond what was committed": ([STEP, STEP], append(1, 3), "base", "base is 3, must be at most 2"),
    "a base that goes back": (
        [STEP, STEP, append(1, 2)],
        append(1, 1, (0, 5)),
        "base",
        "base is 1, must be at least 2",
    ),
    "a twin in the same message": ([], append(1, 0, (0, 5), (0, 5)), "token", TWIN.format(2, 5)),
    "a twin below a new node": ([], append(1, 0, (0, 5), (1, 6), (1, 6)), "token", TWIN.format(3, 6)),
    "a twin of a live node": ([append(1, 0, (0, 5), (1, 6))], append(3, 0, (1, 6)), "token", TWIN.format(3, 6)),
    "a twin of an alias": ([append(1, 0, (0, 0)), STEP], append(2, 0, (0, 0)), "token", TWIN.format(2, 0)),
    "a twin of a late node": ([STEP, append(1, 0, (0, 0))], append(2, 0, (0, 0)), "token", TWIN.format(2, 0)),
    "a late twin in the same message": ([STEP], append(1, 0, (0, 0), (0, 0)), "token", TWIN.format(2, 0)),
    "a twin below an alias of the root": (
        [STEP, append(1, 0, (0, 0), (1, 7))],
        append(3, 0, (1, 7)),
        "token",
        TWIN.format(3, 7),
    ),
    "a twin below the root that an alias brought": (
        [STEP, append(1, 0, (0, 0), (1, 7))],
        append(3, 1, (0, 7)),
        "token",
        TWIN.format(3, 7),
    ),
    "the last of several nodes": (
        [STEP, append(1, 0, (0, 0), (1, 5))],
        append(3, 1, (0, 6), (3, 6), (3, 6)),
        "token",
        TWIN.format(5, 6),
    ),
    "a node deeper than allowed": (
        [],
        append(1, 0, (0, 5), (1, 5), (2, 5), (3, 5)),
        "parent",
        "depth of node 4 is 4, must be at most 3",
    ),
    "more nodes than allowed": (
        [append(1, 0, (0, 5), (0, 6), (0, 7))],
        append(4, 0, (0, 8), (1, 5)),
        "token",
        "nodes held are 5, must be at most 4",
    ),
}


@pytest.mark.parametrize(("before", "message", "field", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_an_append_may_not_hold_is_refused_by_name_and_changes_no_token(
    before: list[Append | None], message: Append, field: str, said: str
) -> None:
    verifier = session()
    for earlier in before:
        step(verifier) if earlier is STEP else verifier.append(earlier)
    assert_refused(verifier, message, field, said)


def test_depth_counts_from_the_base_and_not_from_what_the_verifier_committed() -> None:
    verifier = session()
    verifier.append(append(1, 0, (0, 0), (1, 1), (2, 2)))
    step(verifier, limit=1)
    # Node 3 is at depth 1 for the verifier, and at depth 3 for a device that has received nothing.
    assert_refused(verifier, append(4, 0, (3, 5)), "parent", "depth of node 4 is 4, must be at most 3")
    verifier.append(append(4, 2, (3, 5)))


def test_an_alias_that_the_device_still_holds_counts_as_held_until_the_device_has_received_its_token() -> None:
    verifier = session()
    verifier.append(append(1, 0, (0, 0), (1, 1), (2, 2), (2, 5)))
    step(verifier, limit=1)
    assert (len(verifier.tree), verifier.held) == (2, 4)  # nodes 1 and 2 are aliases
    assert_refused(verifier, append(5, 0, (2, 7)), "token", "nodes held are 5, must be at most 4")
    verifier.append(append(5, 2))
    assert verifier.held == 2


# --------------------------------------------------------------------------- what is no error


def test_a_batch_that_was_running_at_a_cancel_is_discarded() -> None:
    verifier = session()
    verifier.append(append(1, 0, (0, 0)))
    batch = tree_batch_of(verifier.tree, [node.id for node in verifier.tree])
    last = verifier.cancel(Cancel(epoch=EPOCH))
    assert last is not None
    assert (last.start, [*last.token], last.seen, last.finish) == (0, [], 1, Finish.CANCELLED)
    with pytest.raises(Fenced):
        verifier.commit(batch, verify(batch, lambda _, path: target(list(path)), verifier.ends))
    assert verifier.committed == []
    assert verifier.held == 0


# --------------------------------------------------------------------------- fuzz

NODE = st.tuples(st.integers(0, 14), st.integers(0, 3))
"""(how much smaller the parent's id is, token)"""


def sent(epoch: int, first_id: int, base: int, nodes: list[tuple[int, int]], idle: bool) -> Append:
    """Return an Append whose parents may be none at all."""
    ups, tokens = [up for up, _ in nodes], [token for _, token in nodes]
    return Append(epoch=epoch, first_id=first_id, base=base, up=ups, token=tokens, idle=idle)


APPENDS = st.builds(
    sent,
    st.sampled_from([EPOCH] * 9 + [EPOCH - 1]),
    st.integers(0, 14),
    st.integers(0, 9),
    st.lists(NODE, max_size=6),
    st.booleans(),
)


def honest_ids(verifier: VerifierSession) -> st.SearchStrategy[Append]:
    """Draw Appends whose ids and base fit, so that the fuzz gets past the first checks."""
    return st.builds(
        lambda back, nodes, idle: sent(
            EPOCH, verifier.seen + 1, max(verifier.base, verifier.position - back), nodes, idle
        ),
        st.integers(0, 3),
        st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, verifier.seen + 3)), st.integers(0, 3)), max_size=4),
        st.booleans(),
    )


def flaws(verifier: VerifierSession, limits: SessionLimits) -> list[str]:
    """Return the violated invariants, of those that hold whatever a device sends."""
    nodes = list(verifier.tree)
    batch = tree_batch_of(verifier.tree, [node.id for node in nodes])
    invariants = {
        "held": verifier.held <= limits.nodes,
        "position": verifier.tree.position == verifier.position == len(verifier.committed),
        "ids": all(0 < node.id <= verifier.seen for node in nodes),
        "parents": all(node.parent == ROOT or node.parent < node.id for node in nodes),
        "children": all(verifier.tree.child(node.parent, node.token) == node.id for node in nodes),
        "depth": all(node.position - verifier.base + 1 <= limits.depth for node in nodes),
        "batch": len(batch.ids) == len(nodes) and all(parent <= row for row, parent in enumerate(batch.parents)),
        "committed": verifier.committed == [i % 3 for i in range(verifier.position)],
    }
    return [name for name, holds in invariants.items() if not holds]


@settings(max_examples=100)
@given(data=st.data(), limits=st.sampled_from([LIMITS, SessionLimits(2, 2, 3, 2), SessionLimits(9, 6, 12, 9)]))
def test_no_append_corrupts_a_session_or_changes_what_is_committed(data: st.DataObject, limits: SessionLimits) -> None:
    verifier = session(data.draw(st.integers(0, 2), label="received"), limits, max_tokens=20)
    for _ in range(data.draw(st.integers(1, 12), label="events")):
        if verifier.may_step and data.draw(st.integers(0, 3), label="step") == 0:
            step(verifier, data.draw(st.integers(0, 5), label="limit"))
        else:
            message = data.draw(st.one_of(honest_ids(verifier), APPENDS), label="message")
            take_or_refuse(verifier, message)
        assert flaws(verifier, limits) == []


def take_or_refuse(verifier: VerifierSession, message: Append) -> bool:
    """Return whether it was refused, which must change no token."""
    refused, committed = False, list(verifier.committed)
    try:
        verifier.append(message)
    except ProtocolViolation as violation:
        assert violation.field in {"first_id", "base", "parent", "token"}
        refused = True
    assert verifier.committed == committed
    return refused
