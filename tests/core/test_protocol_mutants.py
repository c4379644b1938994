"""Test that the simulator's checks catch deliberately wrong devices, verifiers and verifications.

Every case names the promise that has to fail, so that no mutant is caught for a reason of the simulator's own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from session_messages import changed
from simulator import EOS, Broken, Machine, run_schedule
from single_walk import verify

from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Finish, append_message, parents_of
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import Verified

D, V = DeviceSession, VerifierSession
SCHEDULES = range(10_000) if os.environ.get("OUTRIDER_NIGHTLY") else range(1_000)
RARE = range(7_000, 7_100)
"""The schedules in which a verifier has kept a sequence that the device does not know: one in thousands."""


class BaseOfTheAttach(D):
    def attach(self, epoch, limits):
        self._attached_at = len(self.received)
        return super().attach(epoch, limits)

    def poll(self, *, resting):
        message = super().poll(resting=resting)
        return message and changed(message, base=self._attached_at)


class DraftsTwins(D):
    """Do not check siblings."""

    def add(self, parent, token):
        if self.room <= 0 or not self.may_extend(parent):
            return None
        node_id, self._next_node = self._next_node, self._next_node + 1
        self.tree.add(node_id, parent, token)
        self._unsent[node_id] = None
        return node_id


class IgnoresCredit(D):
    def poll(self, *, resting):
        limits, self.limits = self.limits, replace(self.limits, in_flight=10_000)
        try:
            return super().poll(resting=resting)
        finally:
            self.limits = limits


class RootByItsOldId(D):
    """Send a parent that became the root by its former id."""

    _root_id = ROOT

    def _restart(self):
        super()._restart()
        self._root_id = ROOT

    def on_commit(self, commit):
        ids = dict(self._wire_ids)
        delivery = super().on_commit(commit)
        if delivery and delivery.tokens:
            self._root_id = ids.get(delivery.path[-1], ROOT) if delivery.proposed[-1] else ROOT
        return delivery

    def _append(self, nodes, idle):
        message = super()._append(nodes, idle)
        parents = [parent or self._root_id for parent in parents_of(message)]
        return append_message(message.epoch, message.first_id, message.base, parents, message.token, idle=message.idle)


class IdsGoOn(D):
    def _restart(self):
        next_id = self._next_id
        super()._restart()
        self._next_id = next_id


class SeenGoesOn(D):
    def _restart(self):
        seen = self._seen
        super()._restart()
        self._seen = seen


class SurvivorsCountAsSent(D):
    def _restart(self):
        ids = dict(self._wire_ids)
        super()._restart()
        self._unsent = {}
        self._wire_ids = ids


class DeviceDropsBelowTheBonus(D):
    """Start an empty tree after every Commit, though its last token had a node with descendants."""

    def on_commit(self, commit):
        delivery = super().on_commit(commit)
        if delivery and delivery.tokens:
            self.tree.clear()
            self._forget_dropped()
        return delivery


class NeverEmptied(TokenTree):
    def advance(self, tokens):
        carried = []
        for token in tokens:
            if self.child(ROOT, token) is not None:
                carried += super().advance((token,))
            else:
                self.position += 1
        return carried


class KeepsRejectedNodes(D):
    """Keep all nodes when a token arrives that has no node."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.tree = NeverEmptied()


class AliasesDropped(V):
    def commit(self, batch, verified):
        commit = super().commit(batch, verified)
        self._aliases.clear()
        return commit


class LateNodesDie(V):
    """Drop rule 12: a late node is dead even if it equals the committed token."""

    def _ingest(self, node_id, parent, token, base):
        super()._ingest(node_id, parent, token, base)
        self._aliases.pop(node_id, None)


class DeadIdsUnseen(V):
    """Leak credit: ids of dead nodes are not counted in `seen`."""

    _counted = 0

    def _ingest(self, node_id, parent, token, base):
        dead = self.dead
        super()._ingest(node_id, parent, token, base)
        if self.dead == dead:
            self._counted = node_id

    def commit(self, batch, verified):
        return changed(super().commit(batch, verified), seen=self._counted)


class SeenOfAccepted(V):
    """Count in `seen` only the nodes that verification accepted."""

    _counted = 0

    def commit(self, batch, verified):
        self._counted = max([self._counted, *(batch.ids[row - 1] for row in verified.rows)])
        return changed(super().commit(batch, verified), seen=self._counted)


class VerifierDropsBelowTheBonus(V):
    def commit(self, batch, verified):
        commit = super().commit(batch, verified)
        if len(verified.tokens) > len(verified.rows):
            self.tree.clear()
        return commit


class TrustsKept(V):
    """Use a kept sequence although the device's is not its prefix."""

    def __init__(self, attach, limits, *, kept=(), **rest):
        received = tuple(attach.tokens)
        super().__init__(attach, limits, kept=(*received, *kept[len(received) :]), **rest)


class ScoresWithoutEnd(V):
    """Do not end a sequence that is scored alone."""

    def score(self, logprobs):
        commits = super().score(logprobs)
        self.finish = Finish.NONE
        return [changed(commit, finish=Finish.NONE) for commit in commits]


def takes_any_child(batch, target_token, ends) -> Verified:
    """Accept a child although it is not the target's token."""
    children = dict(zip(batch.parents, batch.tokens, strict=True))
    return verify(batch, lambda row, path: children.get(row, target_token(row, path)), ends)


def forgets_the_bonus(batch, target_token, ends) -> Verified:
    """Commit the accepted nodes alone."""
    verified = verify(batch, target_token, ends)
    kept = max(1, len(verified.rows))
    return Verified(verified.tokens[:kept], verified.rows[:kept])


def polls(change):
    """Return a `poll` whose messages are changed before they are sent; None sends none."""

    def poll(self, *, resting):
        message = D.poll(self, resting=resting)
        return message and change(message)

    return poll


def _scored_from(commit, start):
    commit = changed(commit)
    commit.prompt.start = start
    return commit


def _from_id(message, first_id):
    """Return the nodes under other ids, below the same parents."""
    return append_message(message.epoch, first_id, message.base, parents_of(message), message.token, idle=message.idle)


def _under_eos(device, parent):
    return parent in device.tree and device.tree[parent].token == EOS and not device.finished


# (name, method, what it does instead, the promise that it breaks)
OF_A_DEVICE = [
    (
        "ignores where tokens begin",
        "on_commit",
        lambda s, c: D.on_commit(s, changed(c, start=len(s.received))),
        "is not the target's",
    ),
    (
        "takes any epoch",
        "on_commit",
        lambda s, c: D.on_commit(s, changed(c, epoch=s.epoch)),
        "a Commit of another epoch",
    ),
    (
        "ignores where scores begin",
        "on_commit",
        lambda s, c: D.on_commit(s, _scored_from(c, len(s.scored))),
        "an honest verifier drew a violation|scores are doubled",
    ),
    ("keeps too large a tree", "_shrink_to", lambda s, limits: None, "holds more than W nodes after an attach"),
    ("drafts under EOS", "may_extend", lambda s, p: D.may_extend(s, p) or _under_eos(s, p), "drafts under EOS"),
    ("is idle too early", "poll", polls(lambda m: changed(m, idle=True)), "an Append follows `idle`"),
    (
        "is never idle",
        "poll",
        lambda s, resting: (m := D.poll(s, resting=False)) and changed(m, idle=False),
        "deadlock",
    ),
    ("answers only with nodes", "poll", polls(lambda m: m if m.token else None), "deadlock"),
    ("reports no base (rule 5)", "poll", polls(lambda m: m if m.token or m.idle else None), "deadlock"),
]
OF_A_VERIFIER = [
    (
        "ignores a base (rule 11)",
        "_position_below",
        lambda s, p, b: V._position_below(s, p, b if p else s.position),
        "live nodes are",
    ),
    (
        "takes any epoch",
        "append",
        lambda s, m: V.append(s, changed(m, epoch=s.epoch)),
        "an Append of another epoch|drew a violation",
    ),
    (
        "takes replays",
        "append",
        lambda s, m: V.append(s, _from_id(m, max(m.first_id, s.seen + 1))),
        "live nodes are|drew a violation",
    ),
    ("steps for ever (rule 16)", "may_step", property(lambda s: s.finish is Finish.NONE), "a step begins"),
    ("forgets the base", "_acknowledge", lambda s, base: None, "deadlock"),
    (
        "goes past EOS",
        "ends",
        lambda s, token, at: at + 1 >= s.max_tokens,
        "a token came after EOS|is not the target's",
    ),
    (
        "goes past the maximum",
        "ends",
        lambda s, token, at: token in s.end_token_ids,
        "more tokens than the maximum|a commit ends at",
    ),
    ("is silent about what it kept", "resend", lambda s: None, "a gap where nothing was lost"),
    ("is deaf to a cancel", "cancel", lambda s, message: None, "does not know that the session is over"),
    (
        "stops scoring half-way",
        "scoring",
        property(lambda s: s.scored < s.to_score // 2),
        "an honest verifier drew a violation",
    ),
    (
        "returns credit with scores",
        "score",
        lambda s, p: [changed(c, seen=s.seen) for c in V.score(s, p)],
        "more than F ids are in flight",
    ),
]
WHOLE = [
    (BaseOfTheAttach, "base is not the number of tokens received"),
    (DraftsTwins, "token of node"),
    (IgnoresCredit, "more than F ids are in flight"),
    (RootByItsOldId, "sent by its old id"),
    (IdsGoOn, "ids do not follow one another"),
    (SeenGoesOn, "more than F ids are in flight"),
    (SurvivorsCountAsSent, "KeyError|a node is sent before its parent|drew a violation|died"),
    (DeviceDropsBelowTheBonus, "trees differ"),
    (KeepsRejectedNodes, "does not descend from the root"),
    (AliasesDropped, "live nodes are"),
    (LateNodesDie, "live nodes are"),
    (DeadIdsUnseen, "speculation died"),
    (SeenOfAccepted, "speculation died"),
    (VerifierDropsBelowTheBonus, "live nodes are"),
    (TrustsKept, "is not the target's"),
    (ScoresWithoutEnd, "the session should be LENGTH now|deadlock|drew a violation"),
    (takes_any_child, "is not the target's"),
    (forgets_the_bonus, "evaluated twice"),
]


def machine(wrong: Any) -> Machine:
    part = "verify" if not isinstance(wrong, type) else "device" if issubclass(wrong, D) else "verifier"
    return Machine(**{part: wrong})


MUTANTS = [
    *((name, Machine(device=type("Device", (D,), {method: wrong})), said) for name, method, wrong, said in OF_A_DEVICE),
    *(
        (name, Machine(verifier=type("Other", (V,), {method: wrong})), said)
        for name, method, wrong, said in OF_A_VERIFIER
    ),
    *((wrong.__name__, machine(wrong), said) for wrong, said in WHOLE),
]


@pytest.mark.parametrize(("machine", "promise"), [case[1:] for case in MUTANTS], ids=[case[0] for case in MUTANTS])
def test_a_wrong_variant_breaks_the_promise_that_it_should(machine: Machine, promise: str) -> None:
    with pytest.raises(Broken, match=promise):
        for seed in (*SCHEDULES, *RARE):
            try:
                run_schedule(seed, machine)
            except Broken as broken:
                if any(part in str(broken) for part in promise.split("|")):
                    raise
