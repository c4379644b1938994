"""Test that the simulator's checks catch deliberately wrong devices, verifiers and verifications.

Every case names the promise that has to fail, so that no mutant is caught for a reason of the simulator's own.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from simulator import EOS, SOUND, Broken, Machine, run_schedule

from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Finish
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import Verified, verify

SCHEDULES = range(10_000) if os.environ.get("OUTRIDER_NIGHTLY") else range(1_000)
RARE = range(7_000, 7_100)
"""The schedules in which a verifier has kept a sequence that the device does not know: one in thousands."""


class AppendsBlindly(DeviceSession):
    """Ignore `start` of a Commit: its tokens are always taken for the next ones."""

    def on_commit(self, commit):
        return super().on_commit(replace(commit, start=len(self.received)))


class TakesAnyEpoch(DeviceSession):
    def on_commit(self, commit):
        return super().on_commit(replace(commit, epoch=self.epoch))


class NeverIdle(DeviceSession):
    def poll(self, *, resting):
        message = super().poll(resting=False)
        return message and replace(message, idle=False)


class IdleTooEarly(DeviceSession):
    def poll(self, *, resting):
        message = super().poll(resting=resting)
        return message and replace(message, idle=True)


class AnswersOnlyWithNodes(DeviceSession):
    def poll(self, *, resting):
        message = super().poll(resting=resting)
        return message if message and message.tokens else None


class ReportsNoBase(DeviceSession):
    """Drop rule 5: nothing is sent but nodes and `idle`."""

    def poll(self, *, resting):
        message = super().poll(resting=resting)
        return message if message and (message.tokens or message.idle) else None


class BaseOfTheAttach(DeviceSession):
    def attach(self, epoch, limits):
        self._attached_at = len(self.received)
        return super().attach(epoch, limits)

    def poll(self, *, resting):
        message = super().poll(resting=resting)
        return message and replace(message, base=self._attached_at)


class DraftsTwins(DeviceSession):
    """Do not check siblings."""

    def add(self, parent, token):
        if self.room <= 0 or not self.may_extend(parent):
            return None
        node_id, self._next_node = self._next_node, self._next_node + 1
        self.tree.add(node_id, parent, token)
        self._unsent[node_id] = None
        return node_id


class DraftsUnderEos(DeviceSession):
    def may_extend(self, parent):
        return super().may_extend(parent) or (
            parent in self.tree and self.tree[parent].token == EOS and not self.finished
        )


class IgnoresCredit(DeviceSession):
    def poll(self, *, resting):
        limits, self.limits = self.limits, replace(self.limits, in_flight=10_000)
        try:
            return super().poll(resting=resting)
        finally:
            self.limits = limits


class RootByItsOldId(DeviceSession):
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
        return replace(message, parents=tuple(parent or self._root_id for parent in message.parents))


class IdsGoOn(DeviceSession):
    def _restart(self):
        next_id = self._next_id
        super()._restart()
        self._next_id = next_id


class SeenGoesOn(DeviceSession):
    def _restart(self):
        seen = self._seen
        super()._restart()
        self._seen = seen


class SurvivorsCountAsSent(DeviceSession):
    def _restart(self):
        ids = dict(self._wire_ids)
        super()._restart()
        self._unsent = {}
        self._wire_ids = ids


class KeepsTooLargeATree(DeviceSession):
    def _shrink_to(self, limits):
        pass


class DeviceDropsBelowTheBonus(DeviceSession):
    """Start an empty tree after every Commit, though its last token had a node with descendants."""

    def on_commit(self, commit):
        delivery = super().on_commit(commit)
        if delivery and delivery.tokens:
            self.tree.clear()
            self._forget_dropped()
        return delivery


class NeverEmptied(TokenTree):
    def advance(self, token):
        if self.child(ROOT, token) is not None:
            return super().advance(token)
        self.position += 1
        return None


class KeepsRejectedNodes(DeviceSession):
    """Keep all nodes when a token arrives that has no node."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.tree = NeverEmptied()


class ScoresBlindly(DeviceSession):
    """Ignore where a Commit's log-probabilities of the prompt begin: they are always taken for the next ones."""

    def on_commit(self, commit):
        return super().on_commit(replace(commit, scored=len(self.scored)))


class AliasesDropped(VerifierSession):
    def commit(self, batch, verified):
        commit = super().commit(batch, verified)
        self._aliases.clear()
        return commit


class LateNodesDie(VerifierSession):
    """Drop rule 12: a late node is dead even if it equals the committed token."""

    def _ingest(self, node_id, parent, token, base):
        super()._ingest(node_id, parent, token, base)
        self._aliases.pop(node_id, None)


class LateNodesLive(VerifierSession):
    """Break rule 11: parent 0 is the present root, whatever `base` says."""

    def _position_below(self, parent, base):
        return super()._position_below(parent, self.position if parent == ROOT else base)


class DeadIdsUnseen(VerifierSession):
    """Leak credit: ids of dead nodes are not counted in `seen`."""

    _counted = 0

    def _ingest(self, node_id, parent, token, base):
        dead = self.dead
        super()._ingest(node_id, parent, token, base)
        if self.dead == dead:
            self._counted = node_id

    def commit(self, batch, verified):
        return replace(super().commit(batch, verified), seen=self._counted)


class SeenOfAccepted(VerifierSession):
    """Count in `seen` only the nodes that verification accepted."""

    _counted = 0

    def commit(self, batch, verified):
        self._counted = max([self._counted, *(batch.ids[row - 1] for row in verified.rows)])
        return replace(super().commit(batch, verified), seen=self._counted)


class VerifierTakesAnyEpoch(VerifierSession):
    def append(self, message):
        super().append(replace(message, epoch=self.epoch))


class TakesReplays(VerifierSession):
    """Do not skip ids already seen: the same nodes come again as new ones."""

    def append(self, message):
        super().append(replace(message, first_id=max(message.first_id, self.seen + 1)))


class VerifierDropsBelowTheBonus(VerifierSession):
    def commit(self, batch, verified):
        commit = super().commit(batch, verified)
        if len(verified.tokens) > len(verified.rows):
            self.tree.clear()
        return commit


class StepsForEver(VerifierSession):
    """Break rule 16 in a verifier's session."""

    @property
    def may_step(self):
        return self.finish is Finish.NONE


class ForgetsTheBase(VerifierSession):
    def _acknowledge(self, base):
        pass


class GoesPastEos(VerifierSession):
    def ends(self, token, position):
        return position + 1 >= self.attach.max_tokens


class GoesPastTheMaximum(VerifierSession):
    def ends(self, token, position):
        return token in self.end_token_ids


class SilentAboutKept(VerifierSession):
    """Use a longer kept sequence without ever sending it."""

    def resend(self):
        return None


class TrustsKept(VerifierSession):
    """Use a kept sequence although the device's is not its prefix."""

    def __init__(self, attach, limits, *, kept=(), **rest):
        received = attach.tokens
        super().__init__(attach, limits, kept=(*received, *kept[len(received) :]), **rest)


class DeafToCancel(VerifierSession):
    def cancel(self, message):
        return None


class StopsScoring(VerifierSession):
    """Commit tokens when half of the prompt is scored."""

    @property
    def scoring(self):
        return self.scored < self.attach.to_score // 2


class ScoresWithoutEnd(VerifierSession):
    """Do not end a sequence that is scored alone."""

    def score(self, logprobs):
        commits = super().score(logprobs)
        self.finish = Finish.NONE
        return [replace(commit, finish=Finish.NONE) for commit in commits]


class ScoresReturnCredit(VerifierSession):
    """Return credit with log-probabilities of the prompt, which no `base` can tell."""

    def score(self, logprobs):
        return [replace(commit, seen=self.seen) for commit in super().score(logprobs)]


def takes_any_child(batch, target_token, ends) -> Verified:
    """Accept a child although it is not the target's token."""
    children = dict(zip(batch.parents, batch.tokens, strict=True))
    return verify(batch, lambda row, path: children.get(row, target_token(row, path)), ends)


def forgets_the_bonus(batch, target_token, ends) -> Verified:
    """Commit the accepted nodes alone."""
    verified = verify(batch, target_token, ends)
    kept = max(1, len(verified.rows))
    return Verified(verified.tokens[:kept], verified.rows[:kept])


def device(mutant: type[DeviceSession]) -> Machine:
    return Machine(device=mutant)


def verifier(mutant: type[VerifierSession]) -> Machine:
    return Machine(verifier=mutant)


MUTANTS = [
    (device(AppendsBlindly), "is not the target's"),
    (device(TakesAnyEpoch), "a Commit of another epoch"),
    (device(NeverIdle), "deadlock"),
    (device(IdleTooEarly), "an Append follows `idle`"),
    (device(AnswersOnlyWithNodes), "deadlock"),
    (device(ReportsNoBase), "deadlock"),
    (device(BaseOfTheAttach), "base is not the number of tokens received"),
    (device(DraftsTwins), "token of node"),
    (device(DraftsUnderEos), "drafts under EOS"),
    (device(IgnoresCredit), "more than F ids are in flight"),
    (device(RootByItsOldId), "sent by its old id"),
    (device(IdsGoOn), "ids do not follow one another"),
    (device(SeenGoesOn), "more than F ids are in flight"),
    (device(SurvivorsCountAsSent), "KeyError|a node is sent before its parent|drew a violation|died"),
    (device(KeepsTooLargeATree), "holds more than W nodes after an attach"),
    (device(DeviceDropsBelowTheBonus), "trees differ"),
    (device(KeepsRejectedNodes), "does not descend from the root"),
    (device(ScoresBlindly), "an honest verifier drew a violation|scores are doubled"),
    (verifier(AliasesDropped), "live nodes are"),
    (verifier(LateNodesDie), "live nodes are"),
    (verifier(LateNodesLive), "live nodes are"),
    (verifier(DeadIdsUnseen), "speculation died"),
    (verifier(SeenOfAccepted), "speculation died"),
    (verifier(VerifierTakesAnyEpoch), "an Append of another epoch|drew a violation"),
    (verifier(TakesReplays), "live nodes are|drew a violation"),
    (verifier(VerifierDropsBelowTheBonus), "live nodes are"),
    (verifier(StepsForEver), "a step begins"),
    (verifier(ForgetsTheBase), "deadlock"),
    (verifier(GoesPastEos), "a token came after EOS|is not the target's"),
    (verifier(GoesPastTheMaximum), "more tokens than the maximum|a commit ends at"),
    (verifier(SilentAboutKept), "a gap where nothing was lost"),
    (verifier(TrustsKept), "is not the target's"),
    (verifier(DeafToCancel), "does not know that the session is over"),
    (verifier(StopsScoring), "an honest verifier drew a violation"),
    (verifier(ScoresWithoutEnd), "the session should be LENGTH now|deadlock|drew a violation"),
    (verifier(ScoresReturnCredit), "more than F ids are in flight"),
    (Machine(verify=takes_any_child), "is not the target's"),
    (Machine(verify=forgets_the_bonus), "evaluated twice"),
]


def _name(machine: Machine) -> str:
    changed = [part for part, sound in zip(machine, SOUND, strict=True) if part is not sound]
    return changed[0].__name__


@pytest.mark.parametrize(("machine", "promise"), MUTANTS, ids=[_name(machine) for machine, _ in MUTANTS])
def test_a_wrong_variant_breaks_the_promise_that_it_should(machine: Machine, promise: str) -> None:
    with pytest.raises(Broken, match=promise):
        for seed in (*SCHEDULES, *RARE):
            try:
                run_schedule(seed, machine)
            except Broken as broken:
                if any(part in str(broken) for part in promise.split("|")):
                    raise
