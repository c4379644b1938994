"""Implement the device's side of a session, through all its epochs (rules 1 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import Fenced, ProtocolViolation
from outrider.core.protocol.messages import (
    MAX_APPEND_NODES,
    Append,
    Attach,
    Cancel,
    Commit,
    Finish,
    SessionLimits,
    TokenLogprobs,
    append_message,
    logprobs_of,
    sampling_of,
    to_score,
)
from outrider.core.tree import ROOT, TokenTree


class ReattachNeeded(Fenced):
    """Tokens before this Commit are missing (rule 6); attach again with a greater epoch."""


@dataclass(frozen=True)
class Delivery:
    """The new tokens that one Commit brought, and how the tree moved."""

    tokens: tuple[int, ...]
    proposed: tuple[bool, ...]
    """For each token, whether a node of the device's tree carried it."""
    accepted: tuple[bool, ...]
    """For each token, whether the verifier had evaluated and accepted that node; the target found the others itself."""
    path: tuple[int, ...]
    """Nodes that carried the first tokens, from the old root down; they have left the tree."""
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token if the request asked for them."""
    verified: bool = True
    """False if the draft model wrote the tokens without a target."""


class DeviceSession:
    """Holds the durable state of a session: prompt, committed tokens and the tree below them.

    Node ids here are local and last across epochs; ids on the wire restart with every attach.
    """

    def __init__(self, request: Attach, eos_token_ids: Sequence[int] = ()) -> None:
        """request: what every epoch asks for. eos_token_ids: the target's. Raises BadRequest for wrong sampling."""
        self.request = request
        self.prompt, self.max_tokens = tuple(request.prompt), request.max_tokens
        self.sampling = sampling_of(request.sampling)
        self.end_token_ids = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            self.end_token_ids |= frozenset(eos_token_ids)
        self.limits = SessionLimits()
        self.epoch = 0
        self.received: list[int] = []
        self.finish = Finish.NONE
        self.scored: list[TokenLogprobs] = []
        """Log-probabilities of the prompt's tokens from the second on, if the request asks for them."""
        self.tree = TokenTree()
        self._next_node = 1
        self._next_id = 1
        self._seen = 0
        self._last_base = 0
        self._reported_idle = False
        self._wire_ids: dict[int, int] = {}
        self._unsent: dict[int, None] = {}

    def extended(self, request: Attach) -> DeviceSession:
        """Return a new session that goes on behind the tokens of this one, of which `request` asks for more."""
        session = DeviceSession(request)
        session.end_token_ids, session.scored = self.end_token_ids, self.scored
        session.received, session.tree = [*self.received], TokenTree(len(self.received))
        return session

    @property
    def finished(self) -> bool:
        return self.finish is not Finish.NONE

    @property
    def progress(self) -> int:
        """Return a number that grows with every token, and every log-probability of the prompt, that is received."""
        return len(self.received) + len(self.scored)

    @property
    def room(self) -> int:
        """Return the number of nodes that may still be added (rule 2)."""
        return 0 if self.finished else self.limits.nodes - len(self.tree)

    @property
    def has_unsent(self) -> bool:
        """Return whether the tree has nodes that the verifier of this epoch was not sent."""
        return bool(self._unsent)

    @property
    def base_is_stale(self) -> bool:
        """Return whether the verifier must learn how many tokens were received (rule 5)."""
        return len(self.received) - self._last_base >= max(1, self.limits.run_ahead // 2)

    def attach(self, epoch: int, limits: SessionLimits) -> Attach:
        """Begin an epoch (rule 1). Surviving nodes are sent again under new ids. Raises Fenced if it is not greater."""
        if epoch <= self.epoch:
            raise Fenced(f"epoch is {epoch}, must be greater than {self.epoch}, the one in use")
        self.epoch = epoch
        self.limits = limits
        self._restart()
        self._shrink_to(limits)
        attach = Attach()
        attach.CopyFrom(self.request)
        attach.epoch, attach.scored = epoch, len(self.scored)
        attach.tokens[:] = self.received
        return attach

    def may_extend(self, parent: int) -> bool:
        """Return whether a child of `parent` (a node or ROOT) is within depth and length, and below no end (rule 2)."""
        if self.finished or (parent != ROOT and parent not in self.tree):
            return False
        if parent != ROOT and self.tree[parent].token in self.end_token_ids:
            return False
        return self.tree.depth(parent) < self.limits.depth and self.tree.position_under(parent) < self.max_tokens

    def add(self, parent: int, token: int) -> int | None:
        """Add a draft token below `parent` and return its id; None if the tree has no room for it or has it already."""
        if self.room <= 0 or not self.may_extend(parent) or self.tree.child(parent, token) is not None:
            return None
        node_id = self._next_node
        self._next_node += 1
        self.tree.add(node_id, parent, token)
        self._unsent[node_id] = None
        return node_id

    def was_sent(self, node: int) -> bool:
        """Return whether the live node was sent to the verifier in this epoch."""
        return node not in self._unsent

    def poll(self, *, resting: bool) -> Append | None:
        """Return the next Append to send, None if there is nothing to send (rules 3 to 5).

        resting: whether no more nodes will be added before the next Commit.
        """
        if self.finished or self.epoch == 0:
            return None
        credit = self.limits.in_flight - (self._next_id - 1 - self._seen)
        nodes = list(self._unsent)[: max(0, min(credit, MAX_APPEND_NODES))]
        idle = (resting and len(nodes) == len(self._unsent)) or len(nodes) == credit
        if not nodes and not (idle and not self._reported_idle) and not self.base_is_stale:
            return None
        self._reported_idle = idle
        return self._append(nodes, idle)

    def on_commit(self, commit: Commit) -> Delivery | None:
        """Take a Commit in (rules 6 to 8). Returns None if it belongs to another epoch or the session is over, or if it
        brings nothing but log-probabilities of the prompt.

        Raises ReattachNeeded on a gap, ProtocolViolation if a delivered token would change or too many come.
        """
        if commit.epoch != self.epoch or self.finished:
            return None
        overlap = len(self.received) - commit.start
        if overlap < 0:
            raise ReattachNeeded(f"commit starts at {commit.start}, only {len(self.received)} tokens were received")
        if self.received[commit.start : commit.start + len(commit.token)] != commit.token[:overlap]:
            raise ProtocolViolation(f"a commit at position {commit.start} changes tokens that were delivered")
        if (end := commit.start + len(commit.token)) > self.max_tokens:
            raise ProtocolViolation(f"a commit ends at {end}, must be at most {self.max_tokens}, the tokens asked for")
        wanted = self.request.HasField("logprobs")
        if len(commit.logprob) != (len(commit.token) if wanted else 0):
            raise ProtocolViolation(
                f"a commit of {len(commit.token)} tokens has {len(commit.logprob)} log-probabilities, must be "
                f"{'as many' if wanted else 'none'}; is the verifier older?"
            )
        self._score(commit)
        self._seen = max(self._seen, commit.seen)
        finish = Finish(commit.finish)
        if commit.prompt.logprob and not commit.token and finish is Finish.NONE:
            return None
        self._reported_idle = False
        tokens = tuple(commit.token[overlap:])
        path, most = tuple(self.tree.advance(tokens)), _most_accepted(commit) - overlap
        beyond = (False,) * (len(tokens) - len(path))
        proposed = (True,) * len(path) + beyond
        accepted = (*(index < most and self.was_sent(node) for index, node in enumerate(path)), *beyond)
        self.received += tokens
        self._forget_dropped()
        if finish is not Finish.NONE:
            self._end(finish)
        known = logprobs_of(commit)[overlap:]
        return Delivery(tokens, proposed, accepted, path, finish, known)

    def cancel(self) -> Cancel | None:
        """End the session (rule 8). Returns None if it is over already."""
        if self.finished:
            return None
        self._end(Finish.CANCELLED)
        return Cancel(epoch=self.epoch)

    def _score(self, commit: Commit) -> None:
        """Take in log-probabilities of the prompt, all of which come before the first token (rule 6)."""
        known, expected = len(self.scored), to_score(self.request)
        start = commit.prompt.start
        end = start + len(commit.prompt.logprob)
        if end > expected:
            raise ProtocolViolation(f"a commit scores {end} tokens of the prompt, must be at most {expected}")
        if start > known:
            raise ReattachNeeded(f"{start} tokens of the prompt were scored, only {known} were received")
        if max(known, end) < expected and (commit.token or Finish(commit.finish) in (Finish.EOS, Finish.LENGTH)):
            raise ProtocolViolation(
                f"tokens or the end came after log-probabilities of {max(known, end)} tokens of the prompt, must come "
                f"after {expected}; is the verifier older?"
            )
        self.scored += logprobs_of(commit.prompt)[known - start :]

    def _append(self, nodes: list[int], idle: bool) -> Append:
        first_id = self._next_id
        parents, tokens = [], []
        for node_id in nodes:
            node = self.tree[node_id]
            parents.append(ROOT if node.parent == ROOT else self._wire_ids[node.parent])
            tokens.append(node.token)
            self._wire_ids[node_id] = self._next_id
            self._next_id += 1
            del self._unsent[node_id]
        self._last_base = len(self.received)
        return append_message(self.epoch, first_id, self._last_base, parents, tokens, idle=idle)

    def _restart(self) -> None:
        self._next_id = 1
        self._seen = 0
        self._last_base = len(self.received)
        self._reported_idle = False
        self._wire_ids = {}
        self._unsent = {node.id: None for node in self.tree}

    def _shrink_to(self, limits: SessionLimits) -> None:
        """Keep the nodes that came first and fit, since another verifier may allow fewer."""
        fits = [node for node in self.tree if self.tree.depth(node.id) <= limits.depth][: limits.nodes]
        if len(fits) == len(self.tree):
            return
        smaller = TokenTree(self.tree.position)
        for node in fits:
            smaller.add(node.id, node.parent, node.token)
        self.tree = smaller
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        self._wire_ids = {node_id: wire for node_id, wire in self._wire_ids.items() if node_id in self.tree}
        self._unsent = {node_id: None for node_id in self._unsent if node_id in self.tree}

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self.tree.clear()
        self._forget_dropped()


def _most_accepted(commit: Commit) -> int:
    """Return how many of the first tokens can be nodes that the step evaluated (rule 14).

    The token after them is the target's alone, unless the sequence ended inside an accepted path.
    """
    ended = Finish(commit.finish) in (Finish.EOS, Finish.LENGTH)
    return min(commit.evaluated, len(commit.token) - (0 if ended else 1))
