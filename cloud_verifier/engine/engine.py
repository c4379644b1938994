"""Verify many sessions' trees by one target: sessions in, commits out; one thread, no I/O.

The caller feeds the engine between steps:

    while serving:
        wait until engine.next_deadline() or until something arrives
        engine.start / append / cancel / update / stop ...
        for event in engine.step(): ...

Where the target computes on a device of its own, sessions step in two cohorts if that is faster: one is computed while
the other one is verified, committed and scheduled (`StepProfiler.cohorts_pay`).

Rule numbers are those of docs/protocol.md.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cloud_verifier.engine.admission import Admission, check_attach
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Committed, Completion, Event, Failed, SessionRows, TargetExecutor
from cloud_verifier.engine.nodes import tenant_acceptance
from cloud_verifier.engine.row_allocation import AllocationPolicy, RowAllocation, by_acceptance
from cloud_verifier.engine.scheduler import StepCandidate, StepPlan, Wait, schedule
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.session_history import SessionHistory, fingerprint
from cloud_verifier.engine.stats import (
    STATES,
    MovingAverage,
    Rate,
    count_commit,
    count_speculation,
    count_value,
    new_counters,
)
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.constraint import Grammars, GrammarState
from outrider.core.errors import (
    BadRequest,
    Fenced,
    InternalError,
    OutriderError,
    Overloaded,
    ProtocolViolation,
    Unavailable,
)
from outrider.core.protocol.messages import (
    Append,
    Attach,
    Cancel,
    Commit,
    Directive,
    Finish,
    SessionLimits,
    sampling_of,
)
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.sampling import RULES
from outrider.core.text import short_id
from outrider.core.verification import TreeBatch, Verified
from outrider.telemetry.logs import about
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

log = logging.getLogger(__name__)

_T = TypeVar("_T")

STALLED_S, STALLED_WHEN_FULL_S = 60.0, 5.0
"""Seconds after which a session ends that is stalled because its device confirms nothing (rule 16): by itself, and if
another one, new or dropped by the target, finds no room."""
SCORED_BYTES = 256 << 20
"""Most memory of one step's logits, in float32, of rows that score prompts."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the target may still be computing. ids: of its sessions. complete: as `TargetExecutor.launch` returns
    it."""

    rows: Sequence[SessionRows]
    ids: frozenset[str]
    complete: Completion
    expected_s: float


class Engine:
    """Verifies continuously; the trees of many sessions share forward passes. Not thread-safe.

    Every method returns without waiting for I/O. allocation: how the rows for nodes are allocated to sessions; a
    benchmark may set another policy between steps. grammars: those of the target's tokenizer, None if it serves none;
    the caller should compile a session's grammar, on another thread, and wait for `ready_for` before it calls `start`,
    which else compiles it. counters: may be read between steps. expected_s: seconds that the step that runs, or else
    the last one, should take; any thread may read it at any time.
    """

    def __init__(
        self,
        executor: TargetExecutor,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        overlay: Overlay | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Drive `executor`. overlay: the verifier's own sources of nodes. grammars: of the target's tokenizer; without
        them, requests with a grammar are refused."""
        self.grammars = grammars
        self.config = config or EngineConfig()
        self.counters = new_counters()
        self.expected_s = 0.0
        self.allocation: AllocationPolicy = by_acceptance
        self._clock = clock
        self._rate = Rate(clock())
        """Committed tokens per second."""
        self._executor = executor
        scored_rows = max(1, SCORED_BYTES // (4 * executor.capabilities.vocabulary))
        self._budget = replace(self.config.budget, scored_rows=scored_rows)
        self._profiler = StepProfiler(executor.cost, self.counters, overlaps=executor.overlaps)
        self._overlay = overlay or Overlay(())
        self._acceptance_of = {rule: tenant_acceptance() for rule in RULES}
        """Acceptance rule -> tenant -> acceptance, since other rules accept more."""
        self._server_gain = MovingAverage()
        """Of sessions that have ended, where the next ones begin."""
        self._decision: StepPlan | Wait | None = None
        """The result of `_decide`; None after a change."""
        self._live: OrderedDict[str, EngineSession] = OrderedDict()
        """In the order in which the scheduler serves them."""
        self._ended: OrderedDict[str, SessionTelemetry] = OrderedDict()
        self._admission = Admission(self.config, executor, self._profiler, self._live)
        self._history = SessionHistory()
        self._launched: LaunchedStep | None = None
        """The step whose forward pass may be under way; its sessions take part in no other one."""
        self._held: list[tuple[str, Callable[[], None]]] = []
        """Session ids and calls for sessions of the launched step, for after their commit, in order."""
        self._outbox: list[Event] = []
        self._checked_stalled = clock()
        """When stalled sessions were last looked for."""

    # What the caller may do between steps

    def ready_for(self, grammar: str) -> bool:
        """Return whether steps need not wait for a grammar that `grammars` know; else it is being compiled elsewhere,
        and the caller may ask again."""
        return self._executor.ready_for(grammar)

    def start(
        self,
        session_id: str,
        attach: Attach,
        limits: SessionLimits,
        directive: Directive,
        salt: str = "",
        draft_release: str = "",
        record: bool = False,
    ) -> None:
        """Begin a session (rule 9). Raises BadRequest, Fenced or Overloaded, and then nothing has changed.

        A live session of the same id in an older epoch is replaced. salt: only sessions with the same one, those of one
        tenant, share prefixes. draft_release: that the device drafts with at first. record: whether the session's
        tokens are recorded.
        """
        if self._launched is not None and session_id in self._launched.ids:
            self._complete_alone()
        sampling = sampling_of(attach.sampling)
        check_attach(attach, limits, self._executor, allow_lossy_rules=self.config.allow_lossy_rules)
        newest = self._history.epoch(session_id)
        if attach.epoch <= newest:
            raise Fenced(f"epoch of session {short_id(session_id)} is {attach.epoch}, must be greater than {newest}")
        older = self._live.get(session_id)
        request = fingerprint(attach, salt)
        same = older is not None and older.request == request
        kept = older.protocol.committed if older and same else self._history.kept(session_id, request)
        protocol = VerifierSession(attach, limits, eos_token_ids=self._executor.eos_token_ids, kept=kept)
        session = EngineSession(
            session_id,
            protocol,
            sampling,
            directive,
            request=request,
            salt=salt,
            acceptance=self._acceptance_of[sampling.rule](salt),
            now=self._clock(),
            step=self.counters.steps,
            draft_release=draft_release,
            record=record,
            capabilities=self._executor.capabilities,
            grammar=self._grammar(sampling.grammar),
            server_gain=0.0 if sampling.lossy else self._server_gain.value,  # the sources serve no lossy rule
        )
        self._make_room(session)

        self._decision = None
        self._history.see(session_id, attach.epoch)
        if older is not None:
            self._close(older)
        self._ended.pop(session_id, None)
        if protocol.finish is Finish.NONE:
            try:
                self._executor.begin(session)
            except Exception:
                self._executor.end(session, cache=False)
                raise
        self.counters.prefix_hits += session.computed > 0
        self.counters.prefix_tokens += session.computed
        self._live[session_id] = session
        self._publish(session, protocol.resend())

    def append(self, session_id: str, message: Append) -> None:
        """Take nodes in (rules 10 to 12). A message that breaks the protocol ends its session with Failed.

        The message has passed `check_append`: its token ids are in the target's vocabulary.
        """
        self._decision = None
        if (session := self._live.get(session_id)) is None or self._hold(session_id, self.append, message):
            return
        try:
            session.append(message, self._clock())
        except ProtocolViolation as error:
            self._fail(session, error)

    def cancel(self, session_id: str, message: Cancel) -> None:
        """End a session by its device's wish (rule 18): the last commit goes out, and the slots are free at once."""
        self._decision = None
        if (session := self._live.get(session_id)) is not None and not self._hold(session_id, self.cancel, message):
            self._publish(session, session.protocol.cancel(message))

    def stop(self, session_id: str) -> None:
        """End a session whose device has gone; its committed tokens are remembered for its next attach."""
        self._decision = None
        if self._hold(session_id, self.stop):
            return
        if (session := self._live.get(session_id)) is not None:
            self._close(session)
        self._ended.pop(session_id, None)

    def update(self, session_id: str, update: pb.SessionUpdate) -> None:
        """Set a session's directive, or the round trip to its device; what is not given stays."""
        self._decision = None
        if (session := self._live.get(session_id)) is None or self._hold(session_id, self.update, update):
            return
        if update.HasField("directive"):
            session.set_directive(update.directive)
        if update.rtt_ms:
            session.timing.rtt_s = 1e-3 * update.rtt_ms

    def set_draft_release(self, session_id: str, draft_release: str) -> None:
        """Note that the session's device drafts with another release from now on."""
        if (session := self._live.get(session_id)) is None:
            return
        if not self._hold(session_id, self.set_draft_release, draft_release):
            session.draft_release = draft_release
            session.protocol.change_draft()

    def next_deadline(self) -> float | None:
        """Return when `step` is next due on the engine's clock: the past means now, None not before another call."""
        if self._outbox or self._launched is not None:
            return float("-inf")
        now = self._clock()
        decision = self._decide(now)
        return decision.until if isinstance(decision, Wait) else now

    def step(self) -> list[Event]:
        """Run one forward pass, if one is due, and return its events and those of the calls before.

        With two cohorts it begins one forward pass and ends the one before. A call may only draft for the next pass:
        then `next_deadline` says how soon it goes on, and what has come meanwhile can be taken in before.
        """
        now = self._clock()
        if now >= self._checked_stalled + 1.0:
            self._checked_stalled = now
            blocked = any(session.blocked and session.protocol.may_step for session in self._live.values())
            self._end_stalled(STALLED_WHEN_FULL_S if blocked else STALLED_S)
        decision = self._decide(now)
        plan = decision if isinstance(decision, StepPlan) else decision.plan
        if plan is not None:
            rows = [allocation.chain + allocation.nodes for allocation in plan.allocations]
            self.expected_s = self._profiler.expected_s(sum(rows), len(rows))
            if self._launched is not None:
                self.expected_s += self._launched.expected_s
        # After a draft the caller comes back with the nodes that have arrived meanwhile.
        if not (plan is not None and self._draft(plan)):
            if isinstance(decision, StepPlan):
                self._run(decision)
            elif self._launched is not None:
                self._complete_alone()
        events, self._outbox = self._outbox, []
        return events

    def take_recorded(self) -> list[pb.EngineEvent]:
        """Return, once, events of the last steps' tokens in recorded sessions. The caller should send the steps' events
        before, since the target's distributions are computed now."""
        return self._executor.take_recorded()

    @property
    def telemetry(self) -> dict[str, SessionTelemetry]:
        """Return the measurements of live sessions by id, and of ended ones that were not stopped yet."""
        return {**self._ended, **{key: session.telemetry for key, session in self._live.items()}}

    def stats(self) -> pb.EngineStats:
        profiler, usage = self._profiler, self._executor.usage
        counters = pb.EngineCounters()
        counters.CopyFrom(self.counters)
        for session in self._live.values():
            counters.dead += session.protocol.dead
            counters.ignored += session.nodes.ignored
            counters.sessions[session.state] += 1
        for state in STATES:
            counters.sessions[state] += 0
        return pb.EngineStats(
            verifier=VerifierTelemetry(
                live_sessions=len(self._live),
                step_ms=1e3 * profiler.step_s,
                tokens_per_s=self._rate.per_second(self._clock()),
                kv_used=usage.used,
                kv_capacity=usage.capacity,
                min_acceptance=profiler.min_acceptance,
                node_ms=1e3 * profiler.node_s,
                step_cost_ms={rows: 1e3 * seconds for rows, seconds in profiler.cost.table().items()},
                session_cost_ms=1e3 * profiler.cost.share_s,
                timing_ms=profiler.parts_ms,
            ),
            sessions=self.telemetry.values(),
            kv_reserved=usage.reserved,
            kv_cached=usage.cached,
            unrecorded=self._executor.unrecorded,
            counters=counters,
        )

    # A step: schedule -> draft -> forward -> verify -> commit

    def _decide(self, now: float) -> StepPlan | Wait:
        """Return the decision, which stands until something changes or, if it is to wait, until the time has come."""
        decision = self._decision
        if decision is None or (isinstance(decision, Wait) and decision.until is not None and decision.until <= now):
            step = self.counters.steps
            under_way = self._launched.ids if self._launched is not None else frozenset[str]()
            candidates = [session.candidate(step) for key, session in self._live.items() if key not in under_way]
            cohort = self._cohort(candidates, len(under_way))
            decision = self._schedule(cohort, now)
            if isinstance(decision, Wait) and not under_way:
                if len(cohort) < len(candidates):  # while these wait for their devices, others may have nodes
                    decision = self._schedule(candidates, now)
                if isinstance(decision, Wait):
                    self._profiler.idle()
            self._decision = decision
        return decision

    def _schedule(self, candidates: list[StepCandidate], now: float) -> StepPlan | Wait:
        cost, between_s = self._profiler.cost, self._profiler.between_s
        return schedule(candidates, now, self._budget, self.allocation, cost, between_s)

    def _cohort(self, candidates: list[StepCandidate], under_way: int) -> list[StepCandidate]:
        """Return the candidates that the next step may serve while so many sessions are under way.

        With two cohorts that is half of all that generate, those that have waited longest, and every prompt; but no
        prompt alone, which would take all of the target's time from those under way. With one it is all of them, as
        soon as none is under way. The verifier's heads read what the last step computed, so with them there is one.
        """
        self._profiler.cohorts, together = 1, [] if under_way else candidates
        if not self._executor.overlaps or self._overlay.wants_hidden:
            return together
        generating = [candidate for candidate in candidates if candidate.may_step and candidate.pending == 1]
        if not self._profiler.cohorts_pay(len(generating) + under_way):
            return together
        self._profiler.cohorts = 2
        half = sorted(generating, key=lambda one: -one.skipped)[: -(-(len(generating) + under_way) // 2)]
        return [*half, *(candidate for candidate in candidates if candidate.pending > 1)] if half else []

    def _run(self, plan: StepPlan) -> None:
        """Begin a step: add the nodes drafted for it, prepare its rows, and have the target compute them. Then complete
        the step before; and this one too, if there is only one cohort."""
        self._begin_laps()
        self._decision = None
        self._observe()
        plan = self._ask_sources(lambda: self._overlay.extend(plan, self._live, self.allocation, self._profiler), plan)
        self._profiler.lap("draft")
        self._budget = replace(self._budget, prompt_s=plan.prompt_s)
        for session_id in plan.favoured:
            self._live.move_to_end(session_id)
        self.counters.steps += 1
        rows = self._prepare(plan.allocations)
        launched = self._launch(rows) if rows else None
        self._complete()
        self._launched = launched
        if self._profiler.cohorts == 1:
            self._complete()
        self._profiler.end()

    def _draft(self, plan: StepPlan) -> bool:
        """Have the verifier's own sources propose nodes for a planned step; return whether that has taken time."""
        if not self._overlay.has_sources:
            return False
        begun = time.perf_counter()
        self._observe()
        drafted = self._ask_sources(
            lambda: self._overlay.draft(plan, self._live, self.counters.steps, self._profiler), True
        )
        if drafted:
            self._decision = None
            self._profiler.drafted(time.perf_counter() - begun)
        return drafted

    def _observe(self) -> None:
        """Let the verifier's sources see the last completed step, before the next one is completed."""
        self._ask_sources(lambda: self._overlay.observe(self._executor), None)

    def _ask_sources(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """Return what the verifier's own sources answer; after an error that is none of theirs, go on without them."""
        try:
            return ask()
        except Exception:
            log.exception("the verifier's own draft tokens cannot be added; sessions go on without them")
            self._overlay = Overlay(())
            return otherwise

    def _prepare(self, allocations: Sequence[RowAllocation]) -> list[SessionRows]:
        """Return every session's rows; a session whose rows cannot be prepared fails alone."""
        prepared: list[SessionRows] = []
        now = self._clock()
        for allocation in allocations:
            session = self._live[allocation.session_id]
            if not session.had_rows:
                count_value(self.counters, "queue_s", now - session.began)
            session.begin(self.counters.steps, now)
            try:
                last = allocation.chain == session.pending and session.left
                batch = session.batch(allocation.nodes) if last else None
                rows = SessionRows(session, allocation.chain, batch)
                self._executor.prepare(rows)
                prepared.append(rows)
            except Exception as error:
                with about(session=session.session_id):
                    log.exception("session %s fails before its step", short_id(session.session_id))
                self._fail_internally(session, f"its rows cannot be prepared: {type(error).__name__}")
        return prepared

    def _launch(self, rows: Sequence[SessionRows]) -> LaunchedStep | None:
        """Have the target begin a step over prepared rows; None if it failed, and every session was tried alone."""
        try:
            complete = self._executor.launch(rows, self._profiler.lap)
        except Unavailable:
            raise  # the target itself has gone, and no session is to blame
        except Exception as error:
            self._complete()
            self._try_alone(rows, error)
            return None
        return LaunchedStep(rows, frozenset(one.session.session_id for one in rows), complete, self.expected_s)

    def _complete(self) -> None:
        """Verify and commit the launched step, if there is one, and make the calls that were held for its sessions."""
        if (launched := self._launched) is None:
            return
        self._launched = self._decision = None
        try:
            results = launched.complete(self._profiler.lap)
        except Unavailable:
            raise
        except Exception as error:
            self._try_alone(launched.rows, error)
        else:
            self._settle(launched.rows, results)
        held, self._held = self._held, []
        for session_id, call in held:
            try:
                call()
            except Exception as error:
                with about(session=session_id):
                    log.exception("a message for session %s cannot be taken", short_id(session_id))
                if (session := self._live.get(session_id)) is not None:
                    self._fail_internally(session, f"a message cannot be taken: {type(error).__name__}")

    def _complete_alone(self) -> None:
        """Complete the launched step without having launched another one."""
        self._begin_laps()
        self._observe()
        self._complete()
        self._profiler.end()

    def _begin_laps(self) -> None:
        """Begin to time a step; what a launched one has taken so far is counted with it."""
        self._profiler.begin(goes_on=self._launched is not None)

    def _hold(self, session_id: str, call: Callable[..., None], *arguments: object) -> bool:
        """Keep a call until the session's commit if its step is launched; return whether it is kept."""
        if self._launched is None or session_id not in self._launched.ids:
            return False
        self._held.append((session_id, lambda: call(session_id, *arguments)))
        return True

    def _try_alone(self, rows: Sequence[SessionRows], error: Exception) -> None:
        """Run a step that has failed once more, each session alone, so that only one fails.

        A failed step has changed nothing that another one needs. Until all sessions were tried nothing new is prepared,
        so what one session releases or passes to the prefix cache keeps its content.
        """
        log.error("a forward pass over %d sessions failed", len(rows), exc_info=error)
        if len(rows) == 1:
            self._fail_internally(rows[0].session, f"the forward pass failed: {type(error).__name__}")
            return
        self.expected_s *= 1 + len(rows)
        for one in rows:
            self._profiler.restart()
            try:
                results = self._executor.launch([one], self._profiler.lap)(self._profiler.lap)
            except Unavailable:
                raise
            except Exception as again:
                self._try_alone([one], again)
            else:
                self._settle([one], results)

    def _settle(self, rows: Sequence[SessionRows], results: Sequence[Verified | OutriderError | None]) -> None:
        """Commit what a step has found, or fail the sessions in which it failed."""
        ran, now, price = self._executor.rows_run(rows), self._clock(), self._profiler.min_acceptance
        committed: list[tuple[EngineSession, Verified]] = []
        for one, count, result in zip(rows, ran, results, strict=True):
            if isinstance(result, OutriderError):
                with about(session=one.session.session_id):
                    log.warning("verification fails in session %s: %s", short_id(one.session.session_id), result)
                if isinstance(result, BadRequest):
                    self._fail(one.session, result)
                else:
                    self._fail_internally(one.session, str(result))
            else:
                self._commit(one, count, result, now, price)
                if result is not None:
                    committed.append((one.session, result))
        tokens = self._count_committed(committed)
        self._rate.add(tokens, now)
        self._profiler.lap("commit")
        if any(ran):
            self._profiler.record_step(
                rows=sum(ran),
                sessions=sum(map(bool, ran)),
                tokens=tokens,
                prefilled=any(min(one.chain, count) > 1 for one, count in zip(rows, ran, strict=True)),
                forward_s=self._executor.forward_s,
            )

    def _commit(self, rows: SessionRows, ran: int, verified: Verified | None, now: float, price: float) -> None:
        """Commit a session's path, count it, and keep the slots of what was computed on it.

        ran: how many rows the session had, which may be fewer than it was to have. price: see Overlay.committed.
        """
        session, batch, counters = rows.session, rows.batch, self.counters
        computed = min(rows.chain, ran)
        if verified is not None and (batch is None or len(batch.ids) > ran - computed):
            # The target left nodes out, or had more of the prompt in its cache than was known.
            batch = session.batch(ran - computed)
        counters.prefilled += computed - (verified is not None)
        commits = session.commit_scores() if session.scores else []
        if batch is None:
            self._executor.keep(rows, ())
        elif verified is not None:
            gap_s, first = now - session.timing.last_commit, not session.protocol.position
            count_commit(counters, len(verified.tokens), gap_s=gap_s, first=first)
            commits.append(session.commit(batch, verified, now))
            if session.nodes.own:
                self._count_sources(session, batch, verified)
            self._executor.keep(rows, verified.rows)
        self._overlay.committed(session, verified, price)
        for commit in commits:
            self._publish(session, commit)

    def _count_committed(self, committed: Sequence[tuple[EngineSession, Verified]]) -> int:
        """Count the tokens and device's nodes of a step, after its commits; return how many tokens there are."""
        counts = [
            (len(verified.tokens), one.nodes.device.evaluated, one.nodes.device.accepted) for one, verified in committed
        ]
        count_speculation(self.counters, counts)
        if lossy := [count for (session, _), count in zip(committed, counts, strict=True) if session.lossy]:
            count_speculation(self.counters.lossy, lossy)
        return sum([tokens for tokens, _, _ in counts])

    def _count_sources(self, session: EngineSession, batch: TreeBatch, verified: Verified) -> None:
        """Count the nodes of the verifier's own sources in a session's step, after its commit."""
        counters, nodes = self.counters, session.nodes
        for name, outcome in nodes.own.items():
            counters.sources[name].evaluated += outcome.evaluated
            counters.sources[name].accepted += outcome.accepted
        counters.server_evaluated += len(batch.ids) - nodes.device.evaluated
        counters.server_accepted += len(verified.rows) - nodes.device.accepted

    # How sessions begin and end

    def _grammar(self, grammar: str) -> GrammarState | None:
        """Return a grammar's state before the first token, None for no grammar. Raises BadRequest for one that cannot
        be used."""
        if not grammar:
            return None
        if self.grammars is None:
            raise BadRequest(
                "this verifier serves no grammars: its target's tokenizer cannot be used with them, see its log"
            )
        return self.grammars.begin(grammar)

    def _make_room(self, session: EngineSession) -> None:
        """Admit a session, if need be after ending stalled ones. Raises Overloaded."""
        replaced = self._live.get(session.session_id)
        try:
            self._admission.admit(session, replaced)
        except Overloaded:
            if not self._end_stalled(STALLED_WHEN_FULL_S, spared=session.session_id):
                raise
            self._admission.admit(session, replaced)

    def _end_stalled(self, longest_s: float, spared: str = "") -> bool:
        """End the sessions whose devices have confirmed nothing for so long (rule 16); returns whether there were any.

        Nothing is lost: their prefixes are in the prefix cache, their committed tokens are remembered, and a device
        that comes back attaches again.
        """
        since = self._clock() - longest_s
        stalled = [
            session
            for session in self._live.values()
            if not session.protocol.may_step and session.timing.last_commit <= since and session.session_id != spared
        ]
        for session in stalled:
            error = Unavailable(f"the device has confirmed nothing for {longest_s:g} s while tokens wait; attach again")
            self._decision = None
            self._close(session)
            self._outbox.append(Failed(session.session_id, session.protocol.epoch, error))
        return bool(stalled)

    def _publish(self, session: EngineSession, commit: Commit | None) -> None:
        """Send a commit, and close a session that it ends."""
        if commit is None:
            return
        self._outbox.append(Committed(session.session_id, commit))
        if commit.finish:
            self._close(session)

    def _fail_internally(self, session: EngineSession, reason: str) -> None:
        self._fail(session, InternalError(f"session {short_id(session.session_id)} failed: {reason}"))

    def _fail(self, session: EngineSession, error: OutriderError) -> None:
        self._executor.end(session, cache=False)  # its keys and values are in doubt
        self._close(session)
        self._outbox.append(Failed(session.session_id, session.protocol.epoch, error))

    def _close(self, session: EngineSession) -> None:
        """Free all slots of a session; its committed tokens and its statistics are remembered for a while."""
        self._executor.end(session, cache=True)
        self._overlay.release(session.session_id)
        if self._overlay.has_sources and session.protocol.position:
            self._server_gain.add(session.nodes.server_gain.value)
        del self._live[session.session_id]
        self._history.keep(session.session_id, session.request, session.protocol.committed)
        self._ended[session.session_id] = telemetry = session.telemetry
        self.counters.dead += telemetry.dead
        self.counters.ignored += telemetry.ignored
        while len(self._ended) > 2 * self.config.max_sessions:
            self._ended.popitem(last=False)
