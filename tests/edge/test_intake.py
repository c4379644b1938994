"""What the drafter grew comes in late: it is placed where it still belongs, or dropped."""

from __future__ import annotations

import random

from scripted import continuation, target

from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from edge_agent.drafting.tree_merge import Intake
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, SessionLimits
from outrider.core.tree import ROOT, TokenTree

PROMPT = (1, 2, 3)


class Device:
    """A session that has attached, and its intake."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.session = DeviceSession(PROMPT, max_tokens=500)
        self.session.attach(1, limits or SessionLimits())
        self.intake = Intake(self.session, 1000)

    def commit(self, *tokens: int) -> None:
        delivery = self.session.on_commit(Commit(1, len(self.session.received), tokens, 0))
        assert delivery is not None
        self.intake.moved(delivery)

    def grow(self, base: int, *nodes: tuple[int, int, int]) -> int:
        return self.intake.add(DraftUpdate(base, tuple(DraftNode(*node) for node in nodes), False))

    def paths(self) -> set[tuple[int, ...]]:
        return {tuple(self.session.tree.path(node.id)) for node in self.session.tree}


def test_nodes_join_below_their_parents() -> None:
    device = Device()
    assert device.grow(0, (1, ROOT, 10), (2, 1, 11), (3, 1, 12)) == 3
    assert device.paths() == {(10,), (10, 11), (10, 12)}


def test_a_node_whose_token_was_committed_meanwhile_still_carries_its_children() -> None:
    device = Device()
    device.commit(10, 11)
    assert device.grow(0, (1, ROOT, 10), (2, 1, 11), (3, 2, 12)) == 1
    assert device.paths() == {(12,)}


def test_what_contradicts_a_commit_is_dropped_with_all_below_it() -> None:
    device = Device()
    device.commit(10)
    assert device.grow(0, (1, ROOT, 9), (2, 1, 11), (3, 99, 12)) == 0
    assert device.paths() == set()


def test_children_of_a_node_that_became_a_token_hang_below_the_root() -> None:
    device = Device()
    device.grow(0, (1, ROOT, 10), (2, 1, 11))
    device.commit(10, 11)
    assert device.grow(0, (3, 2, 12)) == 1
    assert device.paths() == {(12,)}


def test_a_node_that_is_there_already_is_not_added_twice() -> None:
    device = Device()
    device.grow(0, (1, ROOT, 10))
    assert device.grow(0, (2, ROOT, 10), (3, 2, 11)) == 1
    assert device.paths() == {(10,), (10, 11)}


def test_what_the_session_has_no_room_for_is_left_out() -> None:
    device = Device(SessionLimits(nodes=1, depth=1))
    assert device.grow(0, (1, ROOT, 10), (2, 1, 11), (3, ROOT, 12)) == 1


def test_whatever_the_delay_the_sessions_tree_is_the_drafters_at_the_same_position() -> None:
    """The drafter's tree and the session's, with growth delayed by a random number of commits."""
    for seed in range(60):
        rng = random.Random(seed)
        device, mirror, right = Device(), TokenTree(), continuation(PROMPT, 200)
        late: list[tuple[int, DraftNode]] = []
        next_id = 1
        while len(device.session.received) < 100:
            for _ in range(rng.randint(0, 4)):
                parent = rng.choice([ROOT, *(node.id for node in mirror)])
                good = target([*PROMPT, *right[: mirror.position], *mirror.path(parent)])
                token = good if rng.random() < 0.8 else rng.randrange(97)
                if mirror.child(parent, token) is None and mirror.depth(parent) < 8 and len(mirror) < 40:
                    late.append((mirror.position, DraftNode(next_id, parent, token)))
                    mirror.add(next_id, parent, token)
                    next_id += 1
            if rng.random() < 0.5:
                count = rng.randint(1, 3)
                at = len(device.session.received)
                device.commit(*right[at : at + count])
            if rng.random() < 0.4:  # the drafter hears of the commits, after its growth so far has come in
                for base, node in late:
                    device.intake.add(DraftUpdate(base, (node,), False))
                late = []
                for token in right[mirror.position : len(device.session.received)]:
                    mirror.advance(token)
                assert device.paths() == {tuple(mirror.path(node.id)) for node in mirror}
