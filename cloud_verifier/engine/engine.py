"""The engine: sessions in, commits out; one thread, no I/O. The caller feeds it between steps.

while serving:
    wait until engine.next_deadline() or until something arrives
    engine.start / append / cancel / tune / stop ...
    for event in engine.step(): ...
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from cloud_verifier.engine.admission import Admission
from cloud_verifier.engine.batch import PackedBatch, Segment
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.counters import STATES, EngineCounters
from cloud_verifier.engine.kv_pool import KVPool
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.recording import Produced, Recording
from cloud_verifier.engine.row_allocation import AllocationPolicy, at_half_cost, by_acceptance
from cloud_verifier.engine.scheduler import Plan, RowAllocation, Wait, schedule
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.server_draft import ServerDraft
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.session_history import SessionHistory, TenantAcceptance, fingerprint
from cloud_verifier.engine.stats import EngineStats, Rate
from cloud_verifier.engine.step_profiler import StepProfiler, StepTimer
from cloud_verifier.engine.validation import check_attach
from outrider.core.errors import (
    Fenced,
    InternalError,
    ModelRefused,
    OutriderError,
    Overloaded,
    ProtocolViolation,
    Unavailable,
)
from outrider.core.protocol.messages import Append, Attach, Cancel, Commit, Directive, Finish, SessionLimits
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.core.verification import TreeBatch, Verified
from outrider.telemetry.logs import about

log = logging.getLogger(__name__)

STANDING_IN_THE_WAY_S = 5.0
"""After which a session that stands still goes where another finds no room."""
EXPLORE = 32
"""One step in so many takes nodes as if they cost half: the cost model must hear of more rows than it would choose."""


@dataclass(frozen=True)
class Committed:
    """Tokens for a session's device."""

    session_id: str
    commit: Commit


@dataclass(frozen=True)
class Failed:
    """A session that ended without a last commit; its slots are free."""

    session_id: str
    epoch: int
    error: OutriderError


Event = Committed | Failed


@dataclass(frozen=True)
class _Rows:
    """One session's part of a step."""

    session: EngineSession
    segment: Segment
    batch: TreeBatch | None
    """None while its prompt goes on."""


@dataclass(frozen=True)
class _Work:
    """A step in progress."""

    rows: tuple[_Rows, ...]
    packed: PackedBatch


class Engine:
    """Continuous verification of many sessions' trees by one target. Not thread-safe, on purpose."""

    def __init__(
        self,
        model: TargetModel,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        cost: StepCost | None = None,
        server_draft: LlamaServerDraft | None = None,
    ) -> None:
        """cost: what was measured of the target's steps (see profile.py); without it the engine learns from its own.

        colocated: drafts for the sessions whose devices do not.
        """
        if model.deviation is None:
            raise ModelRefused(f"{model.label} has not passed the self-test; call self_test(model) first")
        self.model = model
        self.config = config or EngineConfig()
        self._clock = clock
        self._ledger = StepProfiler(cost or StepCost({1: 1e-3}))
        self._counters = self._ledger.counters
        self.allocation: AllocationPolicy = by_acceptance
        """How the rows for nodes are allocated to sessions; a benchmark may put another policy here between steps."""
        self._server_draft = ServerDraft(server_draft) if server_draft else None
        self._odds = TenantAcceptance()
        self._decision: Plan | Wait | None = None
        """What `_decide` found; None after a change."""
        self._pool = KVPool(model.layers, self.config.kv_slots, dtype=model.torch_dtype, device=model.device)
        self._live: OrderedDict[str, EngineSession] = OrderedDict()
        """In the order in which the scheduler serves them."""
        self._ended: OrderedDict[str, SessionTelemetry] = OrderedDict()
        self._admission = Admission(self.config, self._pool, self._ledger, self._live)
        self._memory = SessionHistory(self.config.remembered_sessions, self.config.remembered_tokens)
        self._outbox: list[Event] = []
        self._recording = Recording(self.config.record_top)
        self._steps = self._committed = self._evaluated = self._accepted = self._prefilled = 0
        self._prefix_hits = self._prefix_tokens = 0
        self._rate = Rate(clock())
        self._looked = clock()
        """When it was last looked whether anybody stands still."""

    # What the caller may do between steps

    def start(
        self,
        session_id: str,
        attach: Attach,
        limits: SessionLimits,
        directive: Directive,
        salt: str = "",
        draft: str = "",
        record: bool = False,
    ) -> None:
        """Take a session (rule 9). Raises BadRequest, Fenced or Overloaded, and then nothing has changed.

        A live session of the same id in an older epoch is replaced.
        salt: only sessions with the same one, those of one tenant, share what was computed.
        draft: release that its device drafts with at first. record: whether `produced` tells of it.
        """
        check_attach(attach, limits, self.model, self._pool.slots)
        newest = self._memory.epoch(session_id)
        if attach.epoch <= newest:
            raise Fenced(f"epoch of session {session_id} is {attach.epoch}, must be greater than {newest}")
        older = self._live.get(session_id)
        request = fingerprint(attach, salt)
        same = older is not None and older.request == request
        kept = older.protocol.committed if older and same else self._memory.kept(session_id, request)
        protocol = VerifierSession(attach, limits, eos_token_ids=self.model.eos_token_ids, kept=kept)
        session = EngineSession(
            session_id,
            protocol,
            directive,
            self._pool,
            salt=salt,
            odds=self._odds.of(salt),
            now=self._clock(),
            step=self._steps,
            draft=draft,
            record=record,
        )
        self._make_room(session, older)

        self._decision = None
        self._memory.see(session_id, attach.epoch)
        if older is not None:
            self._close(older)
        self._ended.pop(session_id, None)
        session.reserve()
        self._prefix_hits += session.leased > 0
        self._prefix_tokens += session.leased
        self._live[session_id] = session
        self._publish(session, protocol.resend())

    def append(self, session_id: str, message: Append) -> None:
        """Take nodes in (rules 10 to 12). A message that breaks the protocol ends its session with Failed.

        The message has passed `codecs.check_append`: its token ids are in the target's vocabulary.
        """
        self._decision = None
        session = self._live.get(session_id)
        if session is None or message.epoch != session.protocol.epoch:
            return
        try:
            session.append(message, self._clock())
        except ProtocolViolation as error:
            self._fail(session, error)

    def cancel(self, session_id: str, message: Cancel) -> None:
        """Rule 18: the last commit goes out and the slots are free at once."""
        self._decision = None
        session = self._live.get(session_id)
        if session is not None:
            self._publish(session, session.protocol.cancel(message))

    def stop(self, session_id: str, epoch: int | None = None) -> None:
        """The device has gone: free everything. The committed tokens are remembered, in case that it comes back.

        epoch: stop only this one, so that an old stream's end does not stop its successor; None stops any.
        """
        self._decision = None
        session = self._live.get(session_id)
        if session is not None and epoch in (None, session.protocol.epoch):
            self._close(session)
        if session_id not in self._live:
            self._ended.pop(session_id, None)

    def tune(self, session_id: str, directive: Directive | None = None, rtt_ms: float | None = None) -> None:
        """Change how far a session speculates, or how far away its device is; None leaves a value as it is."""
        self._decision = None
        session = self._live.get(session_id)
        if session is None:
            return
        if directive is not None:
            session.steer(directive)
        if rtt_ms is not None:
            session.rtt_ms = rtt_ms

    def drafts_with(self, session_id: str, draft: str) -> None:
        """The session's device drafts with another release from here on."""
        session = self._live.get(session_id)
        if session is not None:
            session.drafts_with(draft)

    def next_deadline(self) -> float | None:
        """When `step` next has something to do, on the engine's clock; the past means now, None not before a call."""
        if self._outbox:
            return float("-inf")
        now = self._clock()
        match self._decide(now):
            case Wait(until):
                return until
            case _:
                return now

    def step(self) -> list[Event]:
        """One forward pass, if one is due, and what came of it and of the calls before."""
        now = self._clock()
        if now >= self._looked + 1.0:
            self._looked = now
            self._leave_standing(self.config.standing_s)
        decision = self._decide(now)
        if isinstance(decision, Plan):
            self._run(decision)
        events, self._outbox = self._outbox, []
        return events

    def produced(self) -> list[Produced]:
        """What the last step produced in recorded sessions, once; computed here, when its events have gone out. Raises
        nothing."""
        return self._recording.take()

    @property
    def unrecorded(self) -> int:
        """Tokens that `produced` should have told of and could not."""
        return self._recording.lost

    @property
    def counters(self) -> EngineCounters:
        """To be read between steps."""
        return self._counters

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ledger, own = self._ledger, self._server_draft
        live = {key: session.telemetry for key, session in self._live.items()}
        states = Counter(session.state for session in self._live.values())
        return EngineStats(
            verifier=VerifierTelemetry(
                live_sessions=len(self._live),
                step_ms=1e3 * ledger.step_s,
                tokens_per_s=self._rate.per_second(self._clock()),
                kv_used=self._pool.used,
                kv_capacity=self._pool.slots,
                min_acceptance=ledger.min_acceptance,
                node_ms=1e3 * ledger.node_s,
                step_cost_ms={rows: 1e3 * seconds for rows, seconds in ledger.cost.table().items()},
                session_cost_ms=1e3 * ledger.cost.share_s,
                timing_ms=ledger.parts_ms,
            ),
            sessions={**self._ended, **live},
            steps=self._steps,
            committed=self._committed,
            evaluated=self._evaluated,
            accepted=self._accepted,
            own_evaluated=own.evaluated if own else 0,
            own_accepted=own.accepted if own else 0,
            prefilled=self._prefilled,
            prefix_hits=self._prefix_hits,
            prefix_tokens=self._prefix_tokens,
            kv_reserved=self._pool.promised,
            kv_cached=self._pool.prefixes.cached,
            dead=self._counters.dead + sum(session.dead for session in live.values()),
            ignored=self._counters.ignored + sum(session.ignored for session in live.values()),
            states={state: states[state] for state in STATES},
        )

    # A step: schedule (-> draft) -> forward -> walk -> commit

    def _decide(self, now: float) -> Plan | Wait:
        """The decision stands until something changes or, where it is to wait, until the time has come."""
        decision = self._decision
        if decision is None or (isinstance(decision, Wait) and decision.until is not None and decision.until <= now):
            candidates = [session.candidate(self._steps) for session in self._live.values()]
            decision = self._decision = schedule(
                candidates, now, self.config.budget, self._policy(), self._ledger.cost, self._ledger.between_s
            )
            if isinstance(decision, Wait):
                self._ledger.rest()
        return decision

    @property
    def _exploring(self) -> bool:
        return self._steps % EXPLORE == EXPLORE - 1

    def _policy(self) -> AllocationPolicy:
        """Return the allocation policy of the next step."""
        return at_half_cost(self.allocation) if self._exploring else self.allocation

    def _run(self, plan: Plan) -> None:
        watch = self._ledger.begin()
        self._decision = None
        self._recording.clear()
        plan = self._draft(plan)
        watch.lap()
        self._favour(plan.behind)
        self._steps += 1
        rows = self._prepare(plan.grants)
        if rows:
            self._advance(rows, watch)
        self._ledger.end()

    def _favour(self, behind: Iterable[str]) -> None:
        for session_id in behind:
            self._live.move_to_end(session_id)

    def _draft(self, plan: Plan) -> Plan:
        """With nodes of our own for those whose devices draft nothing. Should drafting fail, it alone is given up."""
        if self._server_draft is None:
            return plan
        try:
            return self._server_draft.fill(
                plan, self._live, self._steps, self._policy(), self.config.token_budget, self._ledger
            )
        except Exception:
            log.exception("co-located drafting fails; sessions go on without it")
            self._server_draft.give_up()
            return plan

    def _prepare(self, grants: Sequence[RowAllocation]) -> list[_Rows]:
        """Every session's rows; a session that has none to give fails alone."""
        prepared, now = [], self._clock()
        for grant in grants:
            session = self._live[grant.session_id]
            if not session.had_rows:
                self._counters.queue_s.add(now - session.began)
            session.begin(self._steps, now)
            try:
                prepared.append(_Rows(session, *session.segment(grant)))
            except Exception as error:
                with about(session=session.session_id):
                    log.exception("session %s fails before its step", session.session_id)
                self._fail_all([session], f"its rows cannot be prepared: {type(error).__name__}")
        return prepared

    def _advance(self, rows: Sequence[_Rows], watch: StepTimer) -> None:
        """forward -> walk -> commit. Where a forward fails, each session is tried alone: only the culprit's fails.

        A failed forward has changed nothing but the rows' own slots, and the next one writes those anew. Until all were
        tried no slot is taken, so what one gives back or passes to the prefix cache stays as the others have it.
        """
        try:
            work = _Work(tuple(rows), PackedBatch.pack([r.segment for r in rows], self.model.device))
            watch.lap()
            logits = self._forward(work)
        except Unavailable:
            raise  # the target itself has gone, and no session is to blame
        except Exception as error:
            log.exception("a forward pass over %d sessions failed", len(rows))
            if len(rows) == 1:
                self._fail_all([rows[0].session], f"the forward pass failed: {type(error).__name__}")
            else:
                for one in rows:
                    self._advance([one], StepTimer.drafted())
            return
        watch.lap()
        verifications = self._verify(work, logits)
        watch.lap()
        self._commit(work, verifications)
        watch.lap()
        self._ledger.enter(
            watch,
            rows=sum(r.segment.rows for r in rows),
            sessions=len(rows),
            tokens=sum(len(verify.tokens) for verify in verifications if verify is not None),
            prefilled=any(r.segment.chain > 1 for r in rows),
        )

    def _forward(self, work: _Work) -> torch.Tensor:
        """Logits `[R, V]` of the rows that want some."""
        plan = self.model.attention.plan(work.packed.segments, self._pool)
        return self.model.forward(work.packed, plan)

    def _verify(self, work: _Work, logits: torch.Tensor) -> list[Verified | None]:
        """Every session's path; None for one whose prompt goes on, and for one that failed."""
        verifications: list[Verified | None] = []
        for rows, start in zip(work.rows, work.packed.logit_starts, strict=True):
            verified = None
            if rows.batch is not None:
                try:
                    verified = rows.session.verify(rows.batch, logits[start : start + 1 + len(rows.batch.ids)])
                except Exception as error:
                    with about(session=rows.session.session_id):
                        log.warning("session %s fails at its walk: %s", rows.session.session_id, error)
                    self._fail_all([rows.session], str(error))
                else:
                    if rows.session.record:
                        self._recording.note(rows.session, verified, logits, start)
            verifications.append(verified)
        return verifications

    def _commit(self, work: _Work, verifications: Iterable[Verified | None]) -> None:
        now = self._clock()
        for rows, verified in zip(work.rows, verifications, strict=True):
            session, segment, batch = rows.session, rows.segment, rows.batch
            self._prefilled += segment.chain - (batch is not None)
            if batch is None:
                session.keep_chain(segment)
            elif verified is not None:
                self._committed += len(verified.tokens)
                self._rate.add(len(verified.tokens), now)
                self._count(session, len(batch.ids), len(verified.rows))
                self._counters.tokens(
                    len(verified.tokens), now - session.last_commit, first=not session.protocol.position
                )
                commit = session.commit(segment, batch, verified, now)
                if not session.shared:
                    self._share(session)  # a prompt serves the others from now on, not only once this session is over
                self._publish(session, commit)

    def _count(self, session: EngineSession, evaluated: int, accepted: int) -> None:
        if session.thin and self._server_draft is not None:
            self._server_draft.learn(evaluated, accepted)
        else:
            self._evaluated += evaluated
            self._accepted += accepted
            if evaluated:
                self._counters.draft(accepted)

    # How sessions come and go

    def _make_room(self, session: EngineSession, older: EngineSession | None) -> None:
        """Admit it, if need be in place of those that stand still. Raises Overloaded."""
        try:
            self._admission.admit(session, older)
        except Overloaded:
            if not self._leave_standing(STANDING_IN_THE_WAY_S, spared=session.session_id):
                raise
            self._admission.admit(session, older)

    def _leave_standing(self, longest_s: float, spared: str = "") -> bool:
        """End the sessions whose devices have confirmed nothing for so long (rule 16). Whether there were any.

        Nothing is lost: what they had computed is in the prefix cache, what was committed is remembered, and a device
        that wakes up attaches again.
        """
        since = self._clock() - longest_s
        standing = [
            session
            for session in self._live.values()
            if not session.protocol.may_step and session.last_commit <= since and session.session_id != spared
        ]
        for session in standing:
            error = Unavailable(f"the device has confirmed nothing for {longest_s:g} s while tokens wait; attach again")
            self._decision = None
            self._close(session)
            self._outbox.append(Failed(session.session_id, session.protocol.epoch, error))
        return bool(standing)

    def _share(self, session: EngineSession) -> None:
        if self.config.prefix_cache:
            session.share()

    def _publish(self, session: EngineSession, commit: Commit | None) -> None:
        """Send a commit, and let go of a session that it ends."""
        if commit is None:
            return
        self._outbox.append(Committed(session.session_id, commit))
        if commit.finish is not Finish.NONE:
            self._close(session)

    def _fail_all(self, sessions: Iterable[EngineSession], reason: str) -> None:
        for session in sessions:
            self._fail(session, InternalError(f"session {session.session_id} failed: {reason}"))

    def _fail(self, session: EngineSession, error: OutriderError) -> None:
        session.release()  # what it computed is in doubt and not for the prefix cache
        self._close(session)
        self._outbox.append(Failed(session.session_id, session.protocol.epoch, error))

    def _close(self, session: EngineSession) -> None:
        """Free all that the session holds; its committed tokens and its statistics are remembered for a while."""
        self._share(session)
        session.release()
        if self._server_draft is not None:
            self._server_draft.release(session.session_id)
        del self._live[session.session_id]
        self._memory.keep(session.session_id, session.request, session.protocol.committed)
        self._ended[session.session_id] = telemetry = session.telemetry
        self._counters.left(telemetry)
        while len(self._ended) > 2 * self.config.max_sessions:
            self._ended.popitem(last=False)
