"""Implement the verifier's side of one epoch of a session (rules 9 to 18)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outrider.core.acceptance.history import AcceptanceHistory
from outrider.core.errors import Fenced, ProtocolViolation
from outrider.core.protocol.messages import (
    MAX_SCORED,
    Append,
    Attach,
    Cancel,
    Commit,
    Finish,
    SessionLimits,
    TokenLogprobs,
    pack_logprobs,
    parents_of,
    to_score,
)
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import TreeBatch, Verified

_FINISHES = {finish: f"FINISH_{finish.name}" for finish in Finish}


class VerifierSession:
    """Holds the verifier's state of one session in one epoch.

    kept: tokens that this verifier committed in an earlier epoch; used if the device's tokens are their prefix.
    Losslessness rests on `commit` alone: nothing that `append` takes in can change which tokens are committed.
    """

    def __init__(
        self,
        attach: Attach,
        limits: SessionLimits,
        *,
        eos_token_ids: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> None:
        self.attach = attach
        self.max_tokens = attach.max_tokens
        """Length of the whole generated sequence; 0 to score the prompt alone."""
        self.logprobs = attach.logprobs if attach.HasField("logprobs") else None
        """Alternatives to send with each token's log-probability; None to send neither."""
        self.to_score = to_score(attach)
        """Tokens of the prompt that are scored in all."""
        self.limits = limits
        self.epoch = attach.epoch
        self.end_token_ids = frozenset(attach.stop_token_ids) | (
            frozenset() if attach.ignore_eos else frozenset(eos_token_ids)
        )
        received = list(attach.tokens)
        self.scored = attach.scored
        """Tokens of the prompt whose log-probabilities were committed."""
        # Kept tokens have no log-probabilities: if the device asks for these, the tokens are computed again. And none
        # may come before the prompt's.
        usable = self.logprobs is None and not self.scoring and list(kept[: len(received)]) == received
        self.committed = list(kept) if usable else received
        self.base = len(received)
        self.seen = 0
        self.idle = False
        self.dead = 0
        """Nodes that arrived too late, or below such a node."""
        self.finish = self._finish_of(self.committed)
        self.tree = TokenTree(len(self.committed))
        self.history = AcceptanceHistory(len(self.committed))
        self._draft_from = 0
        """The last node id before the draft in use: another draft proposed the nodes up to it."""
        self.unreceived = 0
        """First position whose token the device cannot have received yet: late proposals for earlier positions do not
        count, or a device could pass for a good one by repeating what it has received."""
        self._aliases: dict[int, int] = {}
        """id of a node that equals a committed token -> the position after that token; only those after `base`"""
        self._sent: deque[tuple[int, int]] = deque([(self.base, 0)])
        """(tokens after a Commit, `seen` in it): what the device knew when it had received so many"""

    @property
    def position(self) -> int:
        """Return P, the number of generated tokens committed so far."""
        return len(self.committed)

    @property
    def scoring(self) -> bool:
        """Return whether log-probabilities of the prompt are missing, before which no token may be committed."""
        return self.scored < self.to_score

    @property
    def held(self) -> int:
        """Return the number of live and aliased nodes, never more than W although no message returns credit."""
        return len(self.tree) + len(self._aliases)

    @property
    def may_step(self) -> bool:
        """Return whether a step may begin (rule 16): a device that acknowledges nothing any more stops its verifier."""
        return self.finish is Finish.NONE and self.position - self.base < self.limits.run_ahead

    def resend(self) -> Commit | None:
        """Return a Commit of what the device misses of a kept sequence (rule 9); None if it has all of it.

        It must be called before anything else.
        """
        if self.position == self.base and self.finish is Finish.NONE:
            return None
        return self._commit_message(self.base, self.committed[self.base :], seen=0)

    def append(self, message: Append) -> None:
        """Take nodes in (rules 10 to 12). Raises ProtocolViolation, and then the session is to end.

        Only what needs the session's state is checked here. The shape of one message (as many parents as tokens, each
        parent's id smaller than its child's, token ids in the vocabulary) was checked where it was decoded. A parent
        that is not smaller would be unknown here, so that its child would be dead.
        """
        if message.epoch != self.epoch or self.finish is not Finish.NONE:
            return
        base = message.base
        self._check(message, base)
        self._acknowledge(base)
        for node_id, (parent, token) in enumerate(
            zip(parents_of(message), message.token, strict=True), message.first_id
        ):
            if node_id > self.seen:
                self._ingest(node_id, parent, token, base)
                self.seen = node_id
                self.idle = False  # only for new nodes, so that a replay does not undo a later `idle`
        # An idle device that has not yet received the latest Commit will answer that one.
        if message.idle and base == self.position:
            self.idle = True

    def score(self, logprobs: Sequence[TokenLogprobs]) -> list[Commit]:
        """Return the Commits that bring the log-probabilities of the prompt's next tokens.

        If no token is to be generated, the last one ends the sequence. They return no credit (`seen` is 0), since what
        the device has read of it is told by the tokens that it has received.
        """
        commits = []
        for first in range(0, len(logprobs), MAX_SCORED):
            part, before = logprobs[first : first + MAX_SCORED], self.scored
            self.scored += len(part)
            self.finish = self._finish_of(self.committed)
            commit = self._commit_message(self.position, (), seen=0)
            commit.prompt.start = before
            pack_logprobs(commit.prompt, part)
            commits.append(commit)
        if self.finish is not Finish.NONE:
            self._end(self.finish)
        return commits

    def change_draft(self) -> None:
        """Count in `history` from here on alone, since the device drafts with another model."""
        self._draft_from = self.seen
        self.history.restart()

    def cancel(self, message: Cancel) -> Commit | None:
        """End the session (rule 18) with a Commit that says CANCELLED; None for another epoch or a finished session."""
        if message.epoch != self.epoch or self.finish is not Finish.NONE:
            return None
        self._end(Finish.CANCELLED)
        return self._commit_message(self.position, ())

    def ends(self, token: int, position: int) -> bool:
        """Return whether the sequence ends with `token` at `position` (rule 14)."""
        return token in self.end_token_ids or position + 1 >= self.max_tokens

    def commit(self, batch: TreeBatch, verified: Verified, *, evaluated: int | None = None) -> Commit:
        """Commit the verified tokens, alias the nodes that carried them and keep only descendants (rules 14 and 15).

        evaluated: the device's nodes in the batch, all of them if not given. A batch may have nodes of the verifier's
        own, too, which leave no trace here: only the tokens of the walk are committed, and aliases are those of the
        device's tree. Raises Fenced if the session has moved on since the batch was made.
        """
        if batch.position != self.position or self.finish is not Finish.NONE:
            raise Fenced(f"a step begun at position {batch.position} ended at {self.position}; discard it")
        start = self.position
        proposals = self.tree.children(ROOT)
        for token in verified.tokens:
            self.history.commit(token, proposals, counts=next(iter(proposals.values()), 0) > self._draft_from)
            proposals = self.tree.children(proposals[token]) if token in proposals else {}
        path = self.tree.advance(verified.tokens)
        self._aliases |= zip(path, range(start + 1, start + 1 + len(path)), strict=True)
        self.committed += verified.tokens
        self.idle = False
        self.finish = self._finish_of(self.committed)
        self._sent.append((self.position, self.seen))
        if self.finish is not Finish.NONE:
            self._end(self.finish)
        return self._commit_message(
            start, verified.tokens, evaluated=len(batch.ids) if evaluated is None else evaluated
        )

    def _commit_message(
        self, start: int, tokens: Sequence[int], *, seen: int | None = None, evaluated: int = 0
    ) -> Commit:
        """Return a Commit of tokens from `start` on. seen: the credit that it returns, all of it if not given."""
        seen = self.seen if seen is None else seen
        finish = _FINISHES[self.finish]
        commit = Commit(epoch=self.epoch, start=start, token=tokens, seen=seen, evaluated=evaluated, finish=finish)
        if self.scored:
            commit.prompt.start = self.scored
        return commit

    def _check(self, message: Append, base: int) -> None:
        """Refuse ids and a base that an honest device never sends, before anything changes (rule 10)."""
        first_id = message.first_id
        if first_id > self.seen + 1:
            raise ProtocolViolation.bound("first_id", first_id, f"at most {self.seen + 1} (ids have no gaps)")
        if base > self.position:
            raise ProtocolViolation.bound("base", base, f"at most {self.position}, the tokens committed")
        last = first_id + len(message.token) - 1
        if last <= self.seen:
            return  # a replay, whatever its base, or a report of the base alone
        if base < self.base:
            raise ProtocolViolation.bound("base", base, f"at least {self.base} (it never goes back)")
        in_flight = last - self._seen_at(base)
        if in_flight > self.limits.in_flight:
            limit = f"must be at most {self.limits.in_flight}"
            raise ProtocolViolation(f"ids in flight are {in_flight}, {limit}", field="first_id")

    def _position_below(self, parent: int, base: int) -> int | None:
        """Return the position of a child of `parent`, None below a dead one (rule 11)."""
        if parent == ROOT:
            return base
        if parent in self._aliases:
            return self._aliases[parent]
        above = self.tree.get(parent)
        return above.position + 1 if above is not None else None

    def _ingest(self, node_id: int, parent: int, token: int, base: int) -> None:
        """Take one node in: live, an alias, or dead (rules 11 and 12). Raises ProtocolViolation, instead of taking it,
        for a depth, a sibling or a number of nodes held that no honest device sends."""
        position = self._position_below(parent, base)
        if position is None:
            self.dead += 1
            return
        if (depth := position - base + 1) > self.limits.depth:
            limit = f"must be at most {self.limits.depth}"
            raise ProtocolViolation(f"depth of node {node_id} is {depth}, {limit}", field="parent")
        late, owner = position < len(self.committed), ROOT if parent in self._aliases else parent
        if late:
            right = self.committed[position] == token
            if position >= self.unreceived:
                self.history.late(position, accepted=right)
            if not right:
                self.dead += 1
                return
        if position + 1 in self._aliases.values() if late else token in self.tree.children(owner):
            raise ProtocolViolation(
                f"token of node {node_id} is {token}, must be another than its siblings'", field="token"
            )
        if len(self.tree) + len(self._aliases) >= self.limits.nodes:
            limit = f"must be at most {self.limits.nodes}"
            raise ProtocolViolation(f"nodes held are {self.held + 1}, {limit}", field="token")
        if late:
            self._aliases[node_id] = position + 1
        else:
            self.tree.add(node_id, owner, token)

    def _acknowledge(self, base: int) -> None:
        """Forget what a device that has received `base` tokens can no longer refer to."""
        if base <= self.base:
            return
        self.base = base
        self._aliases = {node_id: after for node_id, after in self._aliases.items() if after > base}
        while len(self._sent) > 1 and self._sent[1][0] <= base:
            self._sent.popleft()

    def _seen_at(self, base: int) -> int:
        """Return the greatest `seen` that a device with `base` tokens can have read."""
        return next((seen for position, seen in reversed(self._sent) if position <= base), 0)

    def _finish_of(self, tokens: Sequence[int]) -> Finish:
        if self.scoring:
            return Finish.NONE
        if tokens and tokens[-1] in self.end_token_ids:
            return Finish.EOS
        return Finish.LENGTH if len(tokens) >= self.max_tokens else Finish.NONE

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self.tree.clear()
        self._aliases.clear()
