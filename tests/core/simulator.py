"""Simulate random schedules of the session protocol: a real device, real verifiers, and a network at its worst.

A `World` offers every event that can happen next (draft, send, deliver, begin or end a step, reconnect, ...) as a
method, and checks the promises of the protocol after each one against a ledger of its own: the ledger knows, for every
node id, the whole token sequence that the device meant by it, and nothing of how either side stores it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from session_messages import attach
from single_walk import verify

from outrider.core.errors import ProtocolViolation
from outrider.core.protocol.device import DeviceSession, ReattachNeeded
from outrider.core.protocol.messages import (
    Append,
    Attach,
    Cancel,
    Commit,
    Finish,
    SessionLimits,
    TokenLogprobs,
    pack_logprobs,
    parents_of,
)
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT
from outrider.core.verification import TreeBatch, Verified, tree_batch_of

EOS = 99
PROMPT = (1, 2, 3, 4, 5)
MAX_EVENTS = 4_000

Sequence = tuple[int, ...]
Event = Callable[[], None]


class Broken(AssertionError):
    """Report a promise of the protocol that did not hold."""


@dataclass(frozen=True)
class Scenario:
    """Set what one schedule of the simulator does."""

    max_tokens: int = 16
    vocabulary: int = 4
    eos_one_in: int = 0
    """One prefix in so many is followed by EOS; 0 for none."""
    tie_one_in: int = 0
    """At one prefix in so many the second verifier breaks a tie the other way; 0 for none."""
    limits: tuple[SessionLimits, ...] = (SessionLimits(8, 6, 12, 8),)
    """The limits of the epochs, in turn."""
    nodes_per_step: int = 6
    whole_batches: bool = False
    """Every step takes all the nodes that it may, rather than a random ancestor-closed subset."""
    match: float = 0.8
    """Probability that the drafter proposes the target's token."""
    chain: float = 0.7
    """Probability that the drafter extends its latest node, rather than any."""
    rest: float = 0.05
    """Probability that the drafter rests although it could go on."""
    thinks_for_ever: bool = False
    """The drafter neither drafts nor rests."""
    patient: bool = True
    """The verifiers wait for nodes or for `idle`, with no deadline: only the device's answer gets them going."""
    chaos: int = 0
    """Reconnects, failovers, replays, losses and the cancel that may happen."""
    chaos_rate: float = 0.05
    """Probability that an event is one of these."""
    weights: tuple[int, int, int, int, int] = (1, 1, 1, 1, 1)
    """Relative probabilities of draft, poll, deliver up, deliver down and step."""


def draw_scenario(rng: random.Random) -> Scenario:
    pick = rng.random

    def one_of(*options):
        return options[int(pick() * len(options))]

    def limits() -> SessionLimits:
        return SessionLimits(
            nodes=one_of(1, 2, 3, 5, 8, 10),
            depth=one_of(1, 2, 3, 4, 6),
            in_flight=one_of(1, 2, 4, 6, 9, 14),
            run_ahead=one_of(1, 2, 3, 4, 7, 10),
        )

    first = limits()
    thinks = pick() < 0.05
    length = int(pick() * 17)
    return Scenario(
        max_tokens=0 if length == 16 else 6 + length,
        vocabulary=one_of(2, 4),
        eos_one_in=one_of(0, 0, 7, 15),
        tie_one_in=one_of(0, 0, 2),
        limits=(first,) if pick() < 0.7 else (first, limits(), first),
        nodes_per_step=one_of(0, 1, 2, 4, 8),
        whole_batches=pick() < 0.3,
        match=one_of(0.0, 0.5, 0.8, 0.95, 1.0),
        chain=one_of(0.3, 0.7, 0.95),
        rest=one_of(0.0, 0.02, 0.15),
        thinks_for_ever=thinks,
        patient=not thinks and pick() < 0.5,
        chaos=one_of(0, 1, 2, 3, 6),
        chaos_rate=one_of(0.03, 0.1),
        weights=(one_of(2, 6), one_of(1, 4), one_of(1, 2, 6), one_of(1, 2, 6), one_of(1, 2, 4)),
    )


def logprobs_of(position: int, token: int) -> TokenLogprobs:
    """Return the log-probabilities that every verifier sends with a token at this position."""
    return TokenLogprobs(-float(position), ((token, -0.5),))


class Target:
    """Compute the next token as a deterministic function of the prefix, on verifier 0 or 1."""

    def __init__(self, scenario: Scenario, salt: int) -> None:
        self.scenario = scenario
        self.salt = salt

    def token(self, prefix: Sequence, verifier: int = 0) -> int:
        bits = hash((self.salt, prefix))  # tuples of ints hash the same in every process
        scenario = self.scenario
        if scenario.eos_one_in and bits % scenario.eos_one_in == 0:
            return EOS
        other = verifier == 1 and scenario.tie_one_in and (bits >> 8) % scenario.tie_one_in == 0
        return ((bits >> 16) + (1 if other else 0)) % scenario.vocabulary

    def allows(self, prefix: Sequence, token: int) -> bool:
        return token in (self.token(prefix, 0), self.token(prefix, 1))


@dataclass(eq=False)
class Stream:
    """Hold one epoch: the messages both ways, the verifier's session, and the ledger."""

    epoch: int
    server: int
    limits: SessionLimits
    base: int
    """Greatest base that reached the verifier."""
    up: deque[Attach | Append | Cancel] = field(default_factory=deque)
    down: deque[Commit] = field(default_factory=deque)
    session: VerifierSession | None = None
    batch: TreeBatch | None = None
    lossy: bool = False
    dead: bool = False
    """The verifier died or never took the session: only a reconnect helps."""
    # The ledger.
    meant: list[Sequence] = field(default_factory=lambda: [()])
    """Per node id, the whole generated sequence down to that node."""
    seen: int = 0
    """Greatest `seen` that reached the device."""
    ingested: int = 0
    """Greatest id that reached the verifier."""
    said_idle: bool = False
    appends: list[Append] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)


class Machine(NamedTuple):
    """Name the classes under test, which mutants replace."""

    device: type[DeviceSession] = DeviceSession
    verifier: type[VerifierSession] = VerifierSession
    verify: Callable[..., Verified] = verify


SOUND = Machine()


class World:
    """Take one session through any events. Every public method without arguments but `run` is an event."""

    def __init__(self, scenario: Scenario, rng: random.Random, machine: Machine = SOUND) -> None:
        self.scenario = scenario
        self.rng = rng
        self.random = rng.random
        self.machine = machine
        self.target = Target(scenario, int(self.random() * 2**32))
        logprobs = 1 if self.target.salt % 2 else None  # every other schedule asks for them
        scores = 1 if self.target.salt % 3 == 0 or not scenario.max_tokens else None
        request = attach(0, PROMPT, max_tokens=scenario.max_tokens, logprobs=logprobs, prompt_logprobs=scores)
        self.device = machine.device(request, (EOS,))
        self.scores = [] if scores is None else [logprobs_of(at, token) for at, token in enumerate(PROMPT)][1:]
        """Log-probabilities that the device has to receive before the first token."""
        self.delivered: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """One for each delivered token, if the session asks for them."""
        self.rows: dict[tuple[int, int], int] = {}
        """(epoch, start) of a Commit -> nodes that its step accepted"""
        self.cancelled = False
        self.resting = False
        self.dirty = False
        """Whether the device may have something to send."""
        self.refused = 0
        self.latest = ROOT
        self.chaos_left = scenario.chaos
        self.old: list[Stream] = []
        self.owner: list[Stream | None] = [None, None]
        self.kept: list[Sequence] = [(), ()]
        self.steps = 0
        self.accepted = 0
        self.plain_though_wanting = 0
        self.happened: Counter[str] = Counter()
        """Corner cases that this schedule reached."""
        self._epoch = 0
        self.stream = self._attach(0)

    # ------------------------------------------------------------------ the device

    @property
    def over(self) -> bool:
        return self.device.finished

    @property
    def can_draft(self) -> bool:
        return not (self.over or self.resting or self.scenario.thinks_for_ever)

    def draft(self) -> None:
        """Let the drafter add a node or, if it has no place for one, rest."""
        device, scenario = self.device, self.scenario
        if device.room <= 0 or self.refused > 2 or self.random() < scenario.rest:
            self.resting = self.dirty = True
            return
        parent = self.latest
        if parent not in device.tree or self.random() >= scenario.chain:
            ids = [ROOT, *(node.id for node in device.tree)]
            parent = ids[int(self.random() * len(ids))]
        prefix = (*device.received, *device.tree.path(parent))
        token = (
            self.target.token(prefix) if self.random() < scenario.match else int(self.random() * scenario.vocabulary)
        )
        node_id = device.add(parent, token)
        if node_id is None:
            self.refused += 1
            return
        self.refused = 0
        self.dirty = True
        self.latest = node_id
        limits = self.stream.limits
        self._demand(len(device.tree) <= limits.nodes, "the device holds more than W nodes")
        self._demand(len(prefix) + 1 - len(device.received) <= limits.depth, "the device drafts deeper than D")
        self._demand(len(prefix) < scenario.max_tokens, "the device drafts past the maximum")
        self._demand(EOS not in prefix, "the device drafts under EOS")

    def poll(self) -> None:
        """Let the device send a message if it has one."""
        message = self.device.poll(resting=self.resting)
        if message is None:
            self.dirty = False
            return
        self._record(message)
        self.stream.up.append(message)

    def cancel(self) -> None:
        message = self.device.cancel()
        self.cancelled = True
        self.happened["cancel"] += 1
        if message is not None:
            self.stream.up.append(message)

    def reconnect(self, server: int | None = None) -> None:
        """Open a new stream to the same verifier; the old one may still carry its messages."""
        stream = self.stream
        server = stream.server if server is None else server
        if self.random() < 0.5:  # the connection died with what was under way
            _cut(stream.up, self.random())
            _cut(stream.down, self.random())
        self.old.append(stream)
        self.stream = self._attach(server)

    def fail_over(self) -> None:
        """Open a new stream to the other verifier; the old one goes on as a zombie, or dies with its state."""
        server = self.stream.server
        if self.random() < 0.3:
            self._die(self.stream)
        self.reconnect(1 - server)

    def _attach(self, server: int) -> Stream:
        self._epoch += 1
        limits = self.scenario.limits[self._epoch % len(self.scenario.limits)]
        survivors = len(self.device.tree)
        attach = self.device.attach(self._epoch, limits)
        self.happened["nodes survived an attach"] += bool(len(self.device.tree))
        self.happened["a smaller verifier shrank the tree"] += len(self.device.tree) < survivors
        self._demand(list(attach.tokens) == self.delivered, "Attach does not carry the tokens received")
        self._demand(len(self.device.tree) <= limits.nodes, "the device holds more than W nodes after an attach")
        stream = Stream(self._epoch, server, limits, base=len(attach.tokens))
        stream.up.append(attach)
        self.resting, self.dirty, self.refused, self.latest = False, True, 0, ROOT
        self.plain_though_wanting = 0
        return stream

    def _record(self, message: Append) -> None:
        """Check an Append against the rules for a device, and record the meaning of its nodes."""
        stream, received = self.stream, self.delivered
        self._demand(message.epoch == stream.epoch, "an Append carries an old epoch")
        self._demand(message.base == len(received), "base is not the number of tokens received")
        self._demand(message.first_id == len(stream.meant), "ids do not follow one another")
        self._demand(not stream.said_idle, "an Append follows `idle` before the next Commit")
        for parent, token in zip(parents_of(message), message.token, strict=True):
            self._demand(parent < len(stream.meant), "a node is sent before its parent")
            above = tuple(received) if parent == ROOT else stream.meant[parent]
            self._demand(parent == ROOT or len(above) > message.base, "a parent that is the root is sent by its old id")
            self._demand(above[: message.base] == tuple(received), "a node is sent that does not descend from the root")
            stream.meant.append((*above, token))
        flying = len(stream.meant) - 1 - stream.seen
        self._demand(flying <= stream.limits.in_flight, "more than F ids are in flight")
        stream.said_idle = message.idle
        stream.appends.append(message)

    # ------------------------------------------------------------------ the network

    def deliver_up(self, stream: Stream | None = None) -> None:
        """Deliver the next message of a stream to the verifier."""
        stream = stream or self.stream
        message = stream.up.popleft()
        if isinstance(message, Attach):
            self._take_session(stream, message)
        elif stream.session is not None:
            self._hand_over(stream, stream.session, message)

    def misroute(self) -> None:
        """Deliver a message that an old stream still holds to the verifier's newest session, too."""
        message = self.old[-1].up[0]
        if self.stream.session is not None and not isinstance(message, Attach):
            self._hand_over(self.stream, self.stream.session, message)

    def _hand_over(self, stream: Stream, session: VerifierSession, message: Append | Cancel) -> None:
        if isinstance(message, Cancel):
            last = session.cancel(message)
            if last is not None:
                stream.down.append(last)
                self._demand(len(session.tree) == 0 and not session.may_step, "a cancelled session goes on")
            return
        before = (session.seen, session.base, session.held, session.dead)
        aliased = session.held - len(session.tree)
        ignores = message.epoch != session.epoch or session.finish is not Finish.NONE
        try:
            session.append(message)
        except ProtocolViolation as violation:
            raise Broken(f"an honest device drew a violation: {violation}") from violation
        if ignores:
            self.happened["an Append was ignored"] += 1
            after = (session.seen, session.base, session.held, session.dead)
            self._demand(before == after, "an Append of another epoch or after the end had an effect")
            return
        self.happened["an Append came during a step"] += bool(stream.batch and message.token)
        self.happened["a node died"] += session.dead > before[3]
        self.happened["a late node became an alias"] += session.held - len(session.tree) > aliased
        self.happened["an Append was repeated"] += message.first_id <= before[0]
        stream.ingested = max(stream.ingested, message.first_id + len(message.token) - 1)
        stream.base = max(stream.base, message.base)
        self._demand(session.held <= stream.limits.nodes, "the verifier holds more than W live and aliased nodes")

    def deliver_down(self, stream: Stream | None = None) -> None:
        """Deliver the next Commit of a stream to the device."""
        stream = stream or self.stream
        commit = stream.down.popleft()
        device, before = self.device, self.device.finish
        try:
            delivery = device.on_commit(commit)
        except ReattachNeeded as gap:
            if stream is not self.stream or not stream.lossy:
                raise Broken(f"a gap where nothing was lost: {gap}") from gap
            self.happened["a gap made the device reattach"] += 1
            self.reconnect()
            return
        except ProtocolViolation as violation:
            raise Broken(f"an honest verifier drew a violation: {violation}") from violation
        for token in delivery.tokens if delivery else ():
            allowed = self.target.allows(tuple(self.delivered), token)
            self._demand(allowed, f"token {token} after {self.delivered} is not the target's")
            self._demand(EOS not in self.delivered, "a token came after EOS")
            self.delivered.append(token)
        scored = len(device.scored)
        self._demand(device.scored == self.scores[:scored], "the prompt's scores are doubled or another token's")
        self._demand(not self.delivered or scored == len(self.scores), "a token came before the prompt's scores")
        self.logprobs += delivery.logprobs if delivery else ()
        asked = (
            [] if not device.request.HasField("logprobs") else [logprobs_of(p, t) for p, t in enumerate(self.delivered)]
        )
        self._demand(self.logprobs == asked, "log-probabilities are missing, doubled or another token's")
        self._demand(device.received == self.delivered, "the delivered tokens are not those received, once, in order")
        if stream is not self.stream or before is not Finish.NONE:
            self.happened["a Commit was ignored"] += 1
            self._demand(delivery is None, "a Commit of another epoch or after the end had an effect")
            return
        if delivery is None:
            self.happened["the prompt was scored"] += 1
            self._demand(bool(commit.prompt.logprob) and not commit.token, "a Commit had no effect")
            self._demand(device.finish is self._finish_due(), f"the session should be {self._finish_due().name} now")
            return
        if len(delivery.tokens) == len(commit.token) > 0:
            inner = len(commit.token) - 1  # the last one may be a node where the sequence ends
            rows = min(self.rows.get((commit.epoch, commit.start), 0), inner)
            self._demand(sum(delivery.accepted[:inner]) == rows, "the device errs about what was accepted of its nodes")
        self.happened["a Commit overlapped"] += len(delivery.tokens) < len(commit.token)
        self.happened["the path ended in EOS"] += commit.finish == Finish.EOS and len(commit.token) > 1
        self.happened["the path ended by length"] += commit.finish == Finish.LENGTH and len(commit.token) > 1
        stream.seen = max(stream.seen, commit.seen)
        stream.said_idle = False
        self.resting, self.dirty, self.refused = False, True, 0
        self._demand(len(self.delivered) <= self.scenario.max_tokens, "more tokens than the maximum")
        self._demand(device.finish is self._finish_due(), f"the session should be {self._finish_due().name} now")
        self._demand(not device.finished or len(device.tree) == 0, "a finished session holds nodes")

    def replay_append(self) -> None:
        """Repeat an Append of this stream, as the network might."""
        sent = self.stream.appends
        self.stream.up.append(sent[int(self.random() * len(sent))])

    def replay_commit(self) -> None:
        """Repeat a Commit of this stream, as the network might."""
        sent = self.stream.commits
        self.stream.down.append(sent[int(self.random() * len(sent))])

    def lose_commit(self) -> None:
        """Lose a Commit. A stream that lost one is reconnected when nothing moves any more."""
        self.stream.lossy = True
        self.stream.down.popleft()

    # ------------------------------------------------------------------ the verifiers

    def _take_session(self, stream: Stream, attach: Attach) -> None:
        owner = self.owner[stream.server]
        if owner is not None:
            if owner.epoch > stream.epoch:  # the server's own fence
                stream.dead = True
                return
            self._release(owner)
        kept = self.kept[stream.server] if self.random() < 0.7 else ()
        stream.session = self.machine.verifier(attach, stream.limits, eos_token_ids=(EOS,), kept=kept)
        self.owner[stream.server] = stream
        fits = kept[: len(attach.tokens)] == tuple(attach.tokens)
        self.happened["a kept sequence did not fit"] += not fits and len(kept) > len(attach.tokens)
        resent = stream.session.resend()
        if resent is not None:
            self.happened["a kept sequence was longer"] += 1
            self._send(stream, resent)

    def _release(self, stream: Stream) -> None:
        if stream.session is not None:
            self.kept[stream.server] = tuple(stream.session.committed)
        stream.session = stream.batch = None
        stream.dead = True

    def _die(self, stream: Stream) -> None:
        if stream.session is not None:
            self.kept[stream.server] = ()
        stream.session = stream.batch = None
        stream.dead = True
        stream.up.clear()
        stream.down.clear()

    def may_begin(self, stream: Stream) -> bool:
        session = stream.session
        if session is None or stream.batch is not None or not session.may_step:
            return False
        # A zombie's deadline passes: it has nobody to wait for. And nobody waits before the prompt is read.
        waits = self.scenario.patient and not session.scoring and stream is self.stream
        return not waits or session.idle or len(session.tree) > 0

    def begin_step(self, stream: Stream | None = None) -> None:
        stream = stream or self.stream
        session = stream.session
        self.happened["a zombie made a step"] += stream is not self.stream
        ahead = session.position - stream.base
        self._demand(ahead < stream.limits.run_ahead, f"a step begins {ahead} positions ahead of base")
        if session.scoring:
            self._score(stream, session)
            return
        self._check_live(stream)
        if stream is self.stream:
            self._watch_speculation(stream)
        limit = self.scenario.nodes_per_step
        stream.batch = (
            tree_batch_of(session.tree, [node.id for node in session.tree][:limit])
            if self.scenario.whole_batches
            else self._some_nodes(session, limit)
        )
        for node_id in stream.batch.ids:
            self._demand(node_id not in stream.evaluated, f"node {node_id} is evaluated twice")
            stream.evaluated.add(node_id)

    def _score(self, stream: Stream, session: VerifierSession) -> None:
        """Score some of the prompt in a step that commits no token."""
        left = len(PROMPT) - 1 - session.scored
        first, count = session.scored, 1 + int(self.random() * left)
        for commit in session.score(self.scores[first : first + count]):
            self._send(stream, commit)

    def end_step(self, stream: Stream | None = None) -> None:
        stream = stream or self.stream
        session, batch = stream.session, stream.batch
        stream.batch = None
        if session.finish is not Finish.NONE:
            return
        prefix = tuple(session.committed)
        verified = self.machine.verify(
            batch, lambda _, path: self.target.token((*prefix, *path), stream.server), session.ends
        )
        commit = session.commit(batch, verified)
        self.rows[commit.epoch, commit.start] = len(verified.rows)
        if session.logprobs is not None:
            positions = enumerate(commit.token, start=commit.start)
            pack_logprobs(commit, [logprobs_of(position, token) for position, token in positions])
        whole = (*prefix, *verified.tokens)
        if stream.server and any(self.target.token(whole[:i]) != whole[i] for i in range(len(prefix), len(whole))):
            self.happened["a tie went the other way"] += 1
        if stream is self.stream:
            self.steps += 1
            self.accepted += len(verified.rows)
        self._send(stream, commit)
        self._demand(session.held <= stream.limits.nodes, "the verifier holds more than W live and aliased nodes")

    def _send(self, stream: Stream, commit: Commit) -> None:
        stream.down.append(commit)
        stream.commits.append(commit)

    def _some_nodes(self, session: VerifierSession, limit: int) -> TreeBatch:
        """Return a random ancestor-closed subset of the live nodes (rule 13)."""
        rows = {ROOT: 0}
        columns: list[tuple[int, int, int, int]] = []
        for node in session.tree:
            if node.parent in rows and len(columns) < limit and self.random() < 0.8:
                columns.append((node.id, rows[node.parent], node.token, session.tree.depth(node.id)))
                rows[node.id] = len(columns)
        ids, parents, tokens, depths = zip(*columns, strict=True) if columns else ((), (), (), ())
        return TreeBatch(ids, parents, tokens, depths, session.position)

    # ------------------------------------------------------------------ the promises

    def _finish_due(self) -> Finish:
        if self.cancelled:
            return Finish.CANCELLED
        if len(self.device.scored) < len(self.scores):
            return Finish.NONE
        if self.delivered and self.delivered[-1] == EOS:
            return Finish.EOS
        return Finish.LENGTH if len(self.delivered) >= self.scenario.max_tokens else Finish.NONE

    def _check_live(self, stream: Stream) -> None:
        """Check that the live nodes are exactly those that reached the verifier and extend its committed tokens."""
        session = stream.session
        committed = tuple(session.committed)
        live = _sequences(session.tree, committed)
        position = len(committed)
        due = {
            meant
            for meant in stream.meant[1 : stream.ingested + 1]
            if len(meant) > position and meant[:position] == committed
        }
        self._demand(live == due, f"live nodes are {sorted(live)}, must be {sorted(due)}")

    def settled(self) -> bool:
        """Return whether nothing is in flight on the current stream, and neither side has a message to send."""
        stream = self.stream
        return not (stream.up or stream.down or stream.batch or self.dirty or stream.session is None)

    def check_settled(self) -> None:
        """Check that both trees are equal if nothing is in flight, but for nodes that wait for credit."""
        stream = self.stream
        if stream.lossy or self.over or not self.settled():
            return
        session = stream.session
        self._demand(session.committed == self.delivered, "nothing is in flight, yet the two sides differ in tokens")
        prefix = tuple(self.delivered)
        mine = _sequences(self.device.tree, prefix)
        theirs = _sequences(session.tree, prefix)
        sent = mine.intersection(stream.meant)
        self._demand(theirs == sent, f"trees differ: device sent {sorted(sent)}, verifier holds {sorted(theirs)}")

    def _watch_speculation(self, stream: Stream) -> None:
        """Check that speculation does not stop: a plain step returns all credit to a device that waits for it."""
        wanting = len(self.device.tree) > 0 and len(stream.session.tree) == 0 and self.settled() and not stream.lossy
        self.plain_though_wanting = self.plain_though_wanting + 1 if wanting else 0
        self._demand(self.plain_though_wanting < 2, "speculation died: the device has nodes and no credit to send them")

    def _demand(self, holds: bool, promise: str) -> None:
        if not holds:
            raise Broken(promise)

    # ------------------------------------------------------------------ the schedule

    def events(self) -> list[tuple[int, Event]]:
        """Return (weight, event) of everything that can happen next, apart from chaos."""
        stream = self.stream
        draft, poll, up, down, step = self.scenario.weights
        found: list[tuple[int, Event]] = []
        if self.can_draft:
            found.append((draft, self.draft))
        if self.dirty and not self.over:
            found.append((poll, self.poll))
        if stream.up:
            found.append((up, self.deliver_up))
        if stream.down:
            found.append((down, self.deliver_down))
        if stream.batch is not None:
            found.append((step, self.end_step))
        elif self.may_begin(stream):
            found.append((step, self.begin_step))
        return found

    def zombie_events(self) -> list[tuple[Callable[..., None], tuple[Stream, ...]]]:
        found: list[tuple[Callable[..., None], tuple[Stream, ...]]] = []
        for stream in self.old[-2:]:
            if stream.up:
                found.append((self.deliver_up, (stream,)))
                if stream is self.old[-1]:
                    found.append((self.misroute, ()))
            if stream.down:
                found.append((self.deliver_down, (stream,)))
            if stream.batch is not None:
                found.append((self.end_step, (stream,)))
            elif self.may_begin(stream):
                found.append((self.begin_step, (stream,)))
        return found

    def chaos_events(self) -> list[Event]:
        found = [self.reconnect, self.fail_over, self.fail_over]
        if self.stream.appends:
            found.append(self.replay_append)
        if self.stream.commits:
            found.append(self.replay_commit)
        if self.stream.down:
            found.append(self.lose_commit)
        if self.random() < 0.15:
            found.append(self.cancel)
        return found

    def tick(self) -> bool:
        """Run one event, drawn at random; return False if nothing can happen any more."""
        if self.old and self.random() < 0.15:
            zombies = self.zombie_events()
            if zombies:
                method, arguments = zombies[int(self.random() * len(zombies))]
                method(*arguments)
                return True
        if self.chaos_left and not self.over and self.random() < self.scenario.chaos_rate:
            self.chaos_left -= 1
            found = self.chaos_events()
            found[int(self.random() * len(found))]()
            return True
        events = self.events()
        if not events:
            if self.over or not (self.stream.dead or self.stream.lossy):
                return False
            self.reconnect()
            return True
        at = self.random() * sum([weight for weight, _ in events])
        for weight, event in events:
            at -= weight
            if at < 0:
                event()
                break
        return True

    def run(self) -> None:
        """Go on until nothing moves. Raises Broken if a promise does not hold."""
        for _ in range(MAX_EVENTS):
            if not self.tick():
                break
            self.check_settled()
        else:
            raise Broken(f"no end after {MAX_EVENTS} events")
        self._demand(self.over, f"deadlock with {len(self.delivered)} tokens delivered")
        self._demand(self.device.finish is self._finish_due(), "the session ended for another reason than it should")
        session = self.stream.session
        stopped = session is None or self.stream.lossy or session.finish is not Finish.NONE
        self._demand(stopped, "the verifier does not know that the session is over")
        self._let_zombies_go_on()

    def _let_zombies_go_on(self) -> None:
        """Check that a zombie without a device stops by itself, and that the device ignores its messages."""
        for stream in self.old:
            for _ in range(stream.limits.run_ahead + len(self.scores) + 1):
                if stream.batch is not None:
                    self.end_step(stream)
                if not self.may_begin(stream):
                    break
                self.begin_step(stream)
            self._demand(not self.may_begin(stream), "a zombie goes on for ever")
            while stream.down:
                self.deliver_down(stream)


def _sequences(tree, prefix: Sequence) -> set[Sequence]:
    """Return every node as the whole generated sequence down to it: position, token and parent in one."""
    whole = {ROOT: prefix}
    for node in tree:
        whole[node.id] = (*whole[node.parent], node.token)
    del whole[ROOT]
    return set(whole.values())


def _cut(queue: deque, share: float) -> None:
    """Lose a random number of the latest messages; an Attach that is still there stays the first."""
    for _ in range(int(len(queue) * share)):
        queue.pop()


def run_schedule(seed: int, machine: Machine = SOUND) -> World:
    """Run one whole schedule; Broken names the seed."""
    rng = random.Random(seed)
    world = World(draw_scenario(rng), rng, machine)
    try:
        world.run()
    except Exception as error:
        raise Broken(f"schedule {seed}: {type(error).__name__}: {error}") from error
    return world
