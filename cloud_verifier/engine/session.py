"""Run one session in the engine: its protocol, its nodes' acceptance, its device's timing, and the scheduler's view.

The keys and values of the session belong to the target's executor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from cloud_verifier.engine.device_sampling import SessionWalk
from cloud_verifier.engine.nodes import PendingNodes
from cloud_verifier.engine.row_allocation import Acceptances
from cloud_verifier.engine.sampling import Sampler, logprobs_of
from cloud_verifier.engine.scheduler import StepCandidate
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.acceptance.node_acceptance import NodeAcceptance
from outrider.core.constraint import GrammarState, constraint_of
from outrider.core.protocol.messages import Append, Commit, Directive, TokenLogprobs, pack_logprobs
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.sampling import SamplingParams
from outrider.core.text import counted
from outrider.core.verification import TreeBatch, Verified, tree_batch_of
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

EMPTY_ANSWERS = 2
"""Number of empty answers in a row, or of futile waits, after which a device is taken to draft nothing or to be out of
reach: its steps no longer wait for it, until it sends a node again."""
INITIAL_GAIN = 1.0
"""Tokens that a device's nodes are assumed to add to a step before any did."""
LATE_ANSWER = 1.5
"""Multiple of the mean time, beside the round trip, in which a device's first nodes come; later ones are late."""


@dataclass(frozen=True)
class Capabilities:
    """States what a target, with the software that runs it, can do for its sessions."""

    trees: bool
    """Whether a step evaluates trees; otherwise only the nodes of one path per session."""
    nodes_per_step: int
    """The most nodes of one session that a step evaluates."""
    max_sequence: int
    """The most positions of a session, prompt and output together."""
    vocabulary: int
    """V, the number of logits of a row."""

    def __str__(self) -> str:
        shape = "trees" if self.trees else "chains"
        nodes = counted(self.nodes_per_step, "node")
        return f"a step takes {shape} of up to {nodes}; a session has up to {self.max_sequence} tokens"


class DeviceTiming:
    """Measures how long a session's device takes to answer, by the times of commits and messages.

    rtt_s: round trip to the device; 0 if unknown. last_commit: time of the last commit, or of the session's begin.
    """

    def __init__(self, now: float) -> None:
        self.rtt_s = 0.0
        self.last_commit = now
        self._under_way: deque[tuple[float, int]] = deque()
        """(time, position after it) of commits that the device may not have received."""
        self._answer_s = MovingAverage(0.1)
        self._empty_answers = 0
        self._futile_waits = 0
        """Draft waits that ended without a node, since nodes came in time or were evaluated."""

    @property
    def answers_s(self) -> float:
        """Return the time after a commit that leaves no node in which the next nodes are expected; 0 if unknown."""
        return self.rtt_s + LATE_ANSWER * self._answer_s.value

    @property
    def expects_nothing(self) -> bool:
        """Return whether no node is expected of the device, by its empty answers or futile waits."""
        return self._empty_answers >= EMPTY_ANSWERS or self._futile_waits >= EMPTY_ANSWERS

    def delivered(self, now: float) -> int | None:
        """Return the position up to which commits may have reached the device by now; None if that has not changed."""
        position = None
        while self._under_way and (self.rtt_s == 0.0 or self._under_way[0][0] + self.rtt_s <= now):
            position = self._under_way.popleft()[1]
        return position

    def on_message(self, message: Append, now: float, *, first: bool) -> None:
        """Learn from a message. first: whether its nodes are the first after a commit that left none."""
        if first and self.rtt_s:
            self._futile_waits = 0
            self._answer_s.add(max(0.0, now - self.last_commit - self.rtt_s))
        if message.token:
            self._empty_answers = 0
        elif message.idle:
            self._empty_answers += 1

    def on_step(self, now: float, draft_wait_s: float) -> None:
        """Learn from a step that begins without a node of the device."""
        if draft_wait_s and now >= self.last_commit + draft_wait_s:
            self._futile_waits += 1

    def on_commit(self, now: float, position: int, *, evaluated: bool) -> None:
        """Learn from a commit. evaluated: whether the step evaluated nodes of the device."""
        self.last_commit = now
        self._under_way.append((now, position))
        if evaluated:
            self._futile_waits = 0


class EngineSession:
    """Runs one epoch of a session in the engine.

    tokens: prompt and output. computed: how many of them, from the first on, have keys and values in the target.
    blocked: whether the target has dropped its keys and values and has no room for them now. had_rows: whether any
    step had rows of the session. last_step: number of the last step that had, or before which the session came. salt:
    only sessions with the same one share prefixes.
    """

    scores: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's next tokens that are not committed yet, if the device asks for them."""

    def __init__(
        self,
        session_id: str,
        protocol: VerifierSession,
        sampling: SamplingParams,
        directive: Directive,
        *,
        request: bytes,
        salt: str,
        acceptance: NodeAcceptance,
        now: float,
        step: int,
        draft_release: str = "",
        record: bool = False,
        capabilities: Capabilities,
        grammar: GrammarState | None = None,
        server_gain: float = 0.0,
    ) -> None:
        """Begin an epoch. request: the fingerprint of what is asked for. acceptance: of the tenant's sessions, from
        which this one's starts, and which learns from it.

        server_gain: tokens that the verifier's own nodes have added to a step without the device's in other sessions.
        draft_release: release that the device drafts with. record: whether the session's tokens are recorded.
        capabilities: of the target. grammar: that of the sampling parameters, before the first token. Raises BadRequest
        if it forbids what was generated.
        """
        attach = protocol.attach
        self.session_id = session_id
        self.protocol = protocol
        self.draft_release = draft_release
        self.record = record
        self.request = request
        self.tokens: list[int] = [*attach.prompt, *protocol.committed]
        self.salt = salt
        self.computed = 0
        self.blocked = False
        self.began = now
        self.had_rows = False
        self.last_step = step
        self.timing = DeviceTiming(now)
        constraint = constraint_of(grammar, protocol.end_token_ids, attach.min_tokens, protocol.committed)
        self.sampler = Sampler(sampling, attach.prompt, protocol.committed, constraint)
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        """Those of tokens that are verified and not committed yet, if the device asks for them."""
        self._steps = self._committed = self._evaluated = self._accepted = 0
        """Verification steps, committed tokens, and its device's evaluated and accepted nodes."""
        self.nodes = PendingNodes(
            protocol,
            NodeAcceptance(acceptance),
            directive,
            most=capabilities.nodes_per_step,
            trees=capabilities.trees,
        )
        self._nodes_per_level = MovingAverage(0.1)
        self.nodes.server_gain.add(server_gain)
        self._with_device = MovingAverage(0.1)
        """Accepted nodes, whoever proposed them, of a step that had nodes of the device."""
        self._with_device.add(server_gain + INITIAL_GAIN)
        self._device_nodes = MovingAverage(0.1)
        """Nodes of the device in such a step."""

    @property
    def lossy(self) -> bool:
        """Return whether the session's acceptance rule lets draft tokens change its output."""
        return self.sampler.params.lossy

    @property
    def pending(self) -> int:
        """Return the number of known tokens without keys and values: at least 1, since the last one never has any."""
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """Return how many known tokens need no row if the target has their keys and values.

        The last one's row gives the next token, and those from which the prompt is scored give log-probabilities.
        """
        return self.protocol.scored if self.protocol.scoring else len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Return the number of tokens that the session may still generate."""
        return self.protocol.max_tokens - self.protocol.position

    @property
    def state(self) -> str:
        """Return the session's state, one of stats.STATES, for the counters."""
        if not self.had_rows:
            return "queued"
        if self.pending > 1:
            return "prefill"
        return "decode" if self.protocol.may_step else "stalled"

    @property
    def telemetry(self) -> SessionTelemetry:
        """Return the engine's measurements of the session; the front adds what only it knows."""
        history = self.protocol.history
        return SessionTelemetry(
            session_id=self.session_id,
            epoch=self.protocol.epoch,
            steps=self._steps,
            committed=self._committed,
            evaluated=self._evaluated,
            accepted=self._accepted,
            acceptance_history=history.outcomes(siblings=self.nodes.trees),
            nodes_per_level=self._nodes_per_level.value,
            draft_release=self.draft_release,
            positions=history.positions,
            first_accepted=history.first_accepted,
            lossy=self.lossy,
            dead=self.protocol.dead,
            ignored=self.nodes.ignored,
            server_gain=self.nodes.server_gain.value,
        )

    def append(self, message: Append, now: float) -> None:
        """Take nodes in (rules 10 to 12). Raises ProtocolViolation."""
        protocol = self.protocol
        if (delivered := self.timing.delivered(now)) is not None:
            protocol.unreceived = delivered
        without = self._steps > 0 and not protocol.tree and message.base == protocol.position
        protocol.append(message)
        self.timing.on_message(message, now, first=without and bool(protocol.tree))
        self.nodes.changed()

    def set_directive(self, directive: Directive) -> None:
        """Follow another directive. Nodes outside a smaller window are no violation: the device may have sent them
        before it received the directive."""
        self.nodes.follow(directive)

    # The scheduler's view

    def candidate(self, step: int) -> StepCandidate:
        """Return the session as the scheduler sees it before step number `step`."""
        protocol, nodes, timing = self.protocol, self.nodes, self.timing
        server_gain = nodes.server_gain.value
        ends_next = protocol.position + 1 >= protocol.max_tokens
        return StepCandidate(
            session_id=self.session_id,
            pending=self.pending,
            acceptances=self.acceptances(),
            may_step=protocol.may_step and not self.blocked,
            idle=nodes.most == 0 or protocol.idle or ends_next or timing.expects_nothing,
            draft_wait_s=nodes.draft_wait_s,
            rtt_s=timing.rtt_s,
            answers_s=timing.answers_s,
            gain=max(0.0, self._with_device.value - server_gain),
            last_commit=timing.last_commit,
            skipped=step - self.last_step,
            scores=protocol.scoring,
            device_nodes=self._device_nodes.value,
            server_gain=server_gain,
        )

    def acceptances(self) -> Acceptances:
        """Return the acceptance of the nodes that a step may take, those of the verifier's sources among them if they
        were merged."""
        return tuple([acceptance for acceptance, _ in self.nodes.best(self.nodes.most)])

    # A step

    def begin(self, step: int, now: float) -> None:
        """Begin a step that has rows of the session."""
        self.last_step = step
        self.had_rows = True
        if not self.protocol.tree and self.pending == 1:
            self.timing.on_step(now, self.nodes.draft_wait_s)

    def batch(self, nodes: int) -> TreeBatch:
        """Return the last committed token and so many nodes, those of greatest acceptance."""
        return tree_batch_of(self.nodes.tree, {node for _, node in self.nodes.best(nodes)})

    def scored_rows(self, chain: int) -> range:
        """Return which rows of the next `chain` known tokens score the prompt: each one the token after its own."""
        if not self.protocol.scoring:
            return range(0)
        first, end = self.protocol.scored - self.computed, self.protocol.to_score - self.computed
        return range(max(0, first), max(0, first, min(chain, end)))

    def score(self, logits: torch.Tensor, chain: int) -> None:
        """Keep the log-probabilities of the prompt's tokens that the next `chain` rows score. logits: `[n, V]`."""
        rows = self.scored_rows(chain)
        first, end = self.computed + rows.start + 1, self.computed + rows.stop + 1
        self.scores = logprobs_of(logits, self.tokens[first:end], self.protocol.attach.prompt_logprobs)

    def commit_scores(self) -> list[Commit]:
        """Commit the prompt's log-probabilities that are kept, and return the messages for the device."""
        scores, self.scores = self.scores, ()
        return self.protocol.score(scores)

    def walk(self, batch: TreeBatch, first: int) -> SessionWalk:
        """Return the walk down a batch whose first row is number `first` of the step's logits."""
        return SessionWalk(batch, self.protocol.ends, self.sampler, first)

    def keep_logprobs(self, verified: Verified, logits: torch.Tensor, first: int) -> None:
        """Keep log-probabilities of verified tokens, if the device asks for them. logits: `[R, V]` of the whole step.
        first: the session's first row among them."""
        if (top := self.protocol.logprobs) is not None:
            rows = [first + row for row in (0, *verified.rows)[: len(verified.tokens)]]
            chosen = logits.index_select(0, torch.tensor(rows, device=logits.device))
            self.logprobs = logprobs_of(chosen, verified.tokens, top)

    def commit(self, batch: TreeBatch, verified: Verified, now: float) -> Commit:
        """Commit the verified tokens and return the message for the device."""
        self.nodes.learn(batch, verified)
        device = self.nodes.device
        commit = self.protocol.commit(batch, verified, evaluated=device.evaluated)
        if self.logprobs:
            pack_logprobs(commit, self.logprobs)
            self.logprobs = ()
        self.tokens += verified.tokens
        self.sampler.commit(verified.tokens)
        self._steps += 1
        self._committed += len(verified.tokens)
        self._evaluated += device.evaluated
        self._accepted += device.accepted
        self.timing.on_commit(now, self.protocol.position, evaluated=device.evaluated > 0)
        if device.evaluated:
            self._nodes_per_level.add(device.evaluated / device.levels)
            self._with_device.add(len(verified.rows))
            self._device_nodes.add(device.evaluated)
        return commit
