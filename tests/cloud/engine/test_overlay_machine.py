"""Test under Hypothesis that the verifier's own nodes leave no trace in the protocol: tokens, ids, credit and counts.

One device and one verifier, both real, with a network in order between them. Each step merges trees of two sources,
which know the target's next tokens and mix them with wrong ones, with what the device has sent.
"""

from __future__ import annotations

import os
import random
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from session_messages import attach
from single_walk import verify

from cloud_verifier.engine.nodes import DEVICE, MergedTree, PendingNodes, ProposedTree
from outrider.core.acceptance.node_acceptance import NodeAcceptance
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Append, Commit, Directive, Finish, SessionLimits
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT
from outrider.core.verification import tree_batch_of

VOCABULARY, EOS = 4, 3
LIMITS = st.builds(
    SessionLimits,
    nodes=st.integers(1, 10),
    depth=st.integers(1, 6),
    in_flight=st.integers(1, 14),
    run_ahead=st.integers(1, 10),
)


class OverlayMachine(RuleBasedStateMachine):
    """Define every event of the session as a rule; the promises hold after each of them."""

    @initialize(
        limits=LIMITS, seed=st.integers(0, 2**32), trees=st.booleans(), ends=st.booleans(), length=st.integers(1, 20)
    )
    def open(self, limits: SessionLimits, seed: int, trees: bool, ends: bool, length: int) -> None:
        self.rng = random.Random(seed)
        self.truth = [self.rng.randrange(VOCABULARY - 1) for _ in range(length)]
        if ends:
            self.truth[self.rng.randrange(length)] = EOS
        self.limits = limits
        self.device = DeviceSession(attach(0, (1, 2), max_tokens=length), (EOS,))
        self.verifier = VerifierSession(self.device.attach(1, limits), limits, eos_token_ids=(EOS,))
        self.nodes = PendingNodes(self.verifier, NodeAcceptance(), Directive(), most=6, trees=trees)
        for name in ("a", "b"):
            self.nodes.acceptance_of(name, NodeAcceptance())
        self.up: deque[Append] = deque()
        self.down: deque[Commit] = deque()
        self.evaluated: set[tuple[int, ...]] = set()
        """Nodes of the device, by all generated tokens down to each."""

    @precondition(lambda self: not self.device.finished and self.device.room > 0)
    @rule(right=st.booleans())
    def draft(self, right: bool) -> None:
        parent = self.rng.choice([ROOT, *(node.id for node in self.device.tree)])
        position = len(self.device.received) + self.device.tree.depth(parent)
        good = right and position < len(self.truth)
        self.device.add(parent, self.truth[position] if good else self.rng.randrange(VOCABULARY))

    @rule()
    def wait(self) -> None:
        """Do nothing, which is all that is left after the end."""

    @precondition(lambda self: not self.device.finished)
    @rule(resting=st.booleans())
    def send(self, resting: bool) -> None:
        message = self.device.poll(resting=resting)
        if isinstance(message, Append):
            self.up.append(message)

    @precondition(lambda self: self.up)
    @rule()
    def take(self) -> None:
        self.verifier.append(self.up.popleft())
        self.nodes.changed()

    @precondition(lambda self: self.down)
    @rule()
    def receive(self) -> None:
        self.device.on_commit(self.down.popleft())

    @precondition(lambda self: self.verifier.may_step)
    @rule(most=st.integers(0, 6), window=st.integers(0, 6), right=st.sampled_from([0.0, 0.5, 1.0]))
    def step(self, most: int, window: int, right: float) -> None:
        self.nodes.follow(Directive(window_nodes=window, window_depth=window, nodes_per_step=window))
        before = self.verifier.position
        self.nodes.drafts = {name: self._proposed(right) for name in ("a", "b")}
        self.nodes.merge_drafts()
        room = min(most, self.nodes.most_together)
        batch = tree_batch_of(self.nodes.tree, {node for _, node in self.nodes.best(room)})
        assert len(batch.ids) <= self.limits.nodes  # for so many the target has room
        verified = verify(batch, lambda row, path: self.truth[before + len(path)], self.verifier.ends)
        assert list(verified.tokens) == self.truth[before : before + len(verified.tokens)]
        known = tuple(self.verifier.committed)
        tree = self.nodes.tree
        alone = not isinstance(tree, MergedTree)
        own = [(*known, *tree.path(node)) for node in batch.ids if alone or DEVICE in tree.sources[node]]
        assert self.evaluated.isdisjoint(own)  # no node of the device is evaluated twice
        self.evaluated |= set(own)
        self.nodes.learn(batch, verified)
        self.nodes.end_step()
        evaluated = self.nodes.device.evaluated
        commit = self.verifier.commit(batch, verified, evaluated=evaluated)
        assert commit.evaluated == len(own) == evaluated
        self.down.append(commit)

    def _proposed(self, right: float) -> ProposedTree:
        """Return a random tree whose nodes are right with this probability where their parent is."""
        tree = ProposedTree(self.verifier.position)
        for _ in range(self.rng.randrange(7)):
            parent = self.rng.choice([ROOT, *(node.id for node in tree)])
            position = tree.position_under(parent)
            good = position < len(self.truth) and self.rng.random() < right
            token = self.truth[position] if good else self.rng.randrange(VOCABULARY)
            if tree.child(parent, token) is None:
                tree.propose(parent, token, self.rng.randrange(7))
        return tree

    @invariant()
    def only_the_targets_tokens_are_delivered(self) -> None:
        assert self.device.received == self.truth[: len(self.device.received)]

    @invariant()
    def nodes_held_are_the_devices_alone(self) -> None:
        assert self.verifier.held <= self.limits.nodes
        assert all(node.id <= self.verifier.seen for node in self.verifier.tree)

    @invariant()
    def with_nothing_under_way_the_device_has_every_node_that_the_verifier_has(self) -> None:
        if self.up or self.down or self.device.finished:
            return
        device, verifier = self.device.tree, self.verifier.tree
        paths = {tuple(device.path(node.id)) for node in device}
        assert {tuple(verifier.path(node.id)) for node in verifier} <= paths
        assert device.position == verifier.position

    def teardown(self) -> None:
        """Run the session to its end: neither credit nor the sequence has suffered."""
        for _ in range(400):
            if self.device.finished:
                break
            self.send(resting=True)
            while self.up:
                self.take()
            if self.verifier.may_step:
                self.step(most=6, window=6, right=0.5)
            while self.down:
                self.receive()
        end = self.truth.index(EOS) + 1 if EOS in self.truth else len(self.truth)
        assert self.device.received == self.truth[:end]
        assert self.verifier.finish is not Finish.NONE


OverlayMachine.TestCase.settings = settings(
    max_examples=400 if os.environ.get("OUTRIDER_NIGHTLY") else 40,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestOverlayMachine = OverlayMachine.TestCase
