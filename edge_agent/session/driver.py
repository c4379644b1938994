"""Drives one session: drafts ahead, keeps the tree in step with the verifier's, and resumes where a stream breaks.

The event loop owns the DeviceSession, a worker thread owns the draft. A Commit goes to the client before anything else
happens; what the draft grew comes in by callback and goes out coalesced, unless the verifier is waiting for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import grpc

from edge_agent.drafting.draft_session import Drafting, Lent
from edge_agent.drafting.drafter import DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan, departure
from edge_agent.drafting.handover import Desk
from edge_agent.drafting.worker import DraftFailed, DraftWorker
from edge_agent.session.failover import AttachTarget, Route
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import Received, ReleaseNotice, VerifierStream
from outrider.core.errors import InternalError, OutriderError, ProtocolViolation
from outrider.core.protocol.device import Delivery, DeviceSession, ReattachNeeded
from outrider.core.protocol.messages import MAX_VOCABULARY, Append, Commit, Directive, Finish, SessionLimits
from outrider.telemetry import logs, traces
from outrider.wire.codecs import Open, Opened, Ping

log = logging.getLogger(__name__)

Dial = Callable[[AttachTarget], grpc.aio.Channel]
"""The channel for a hop; channels are shared and closed by whoever owns them."""


@dataclass(frozen=True)
class DriverOptions:
    """What a driver needs to know beside its session."""

    session_id: str
    vocabulary_hash: bytes = b""
    vocabulary_size: int = MAX_VOCABULARY
    """The target's ids are smaller; Opened tells what the verifier at hand says."""
    ends: frozenset[int] = frozenset()
    """Token ids that end the sequence."""
    silence_s: float = 1.5
    """A verifier that says nothing for so long is dead; its heartbeat comes every 0.5 s."""
    siblings: int = 3
    release: str = ""
    """Of the worker's draft."""
    announced: str = ""
    """The release that the session was opened with, as its ticket says."""
    notice: Callable[[int], None] = lambda _: None
    """Hears of a ReleaseNotice."""


class SessionDriver:
    """One session from Open to its end. `worker` is lent for as long as the session runs; None drafts nothing."""

    def __init__(
        self,
        session: DeviceSession,
        route: Route,
        dial: Dial,
        worker: DraftWorker | None,
        options: DriverOptions,
        statistics: Statistics,
    ) -> None:
        self._session = session
        self._route = route
        self._dial = dial
        self._options = options
        self._statistics = statistics
        self._vocabulary_size = options.vocabulary_size
        self._release = options.release if worker is not None else options.announced
        self._desk = Desk(
            None if worker is None else Lent(worker, options.release, statistics.draft), session, self._hear
        )
        self._queue: asyncio.Queue[Delivery | OutriderError] = asyncio.Queue()
        self._stream: VerifierStream | None = None
        self._directive = Directive()
        self._attached = False
        """Whether it ever was."""
        self._may_append = False
        self._limited = False
        """Whether the limits are the verifier's own, from a ticket or from Opened."""
        self._fresh = False
        """Whether nodes were added since the last Append."""
        self._base = 0
        """Tokens that the verifier knows us to have received."""
        self._beat = 0.0
        """When the verifier began its step, by the clock of the Commits that come here."""
        self._sent_at = -math.inf
        self._departs = -math.inf
        """When a message may go that nobody waits for."""
        self._timer: asyncio.TimerHandle | None = None
        self._rtt_s = 0.0
        """As the verifier has measured it; 0 where it is not known yet."""
        self._unanswered: float | None = None
        """Since when the verifier has had no node of ours, where it has none."""
        self.winding_down: asyncio.Task[None] | None = None
        """The rest of the session's work after `deliveries` has ended; await or cancel it before the loop ends."""

    async def deliveries(self) -> AsyncGenerator[Delivery, None]:
        """What the verifier commits, in order, until the sequence ends. Closing the iterator cancels the session.

        Raises the error of a session that can be attached nowhere.
        """
        runner = asyncio.create_task(self._run())
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, OutriderError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            self._stop()
            self.winding_down = asyncio.create_task(_wind_down(runner))

    def cancel(self) -> None:
        """End the session from outside: `deliveries` ends with a cancelled one, whatever it waits for."""
        self._stop()
        self._queue.put_nowait(Delivery((), (), (), (), Finish.CANCELLED))

    # --- attaching

    async def _run(self) -> None:
        """Attach until the sequence has ended; what cannot be mended reaches the client."""
        logs.note(session=self._options.session_id)
        try:
            with traces.span("outrider.device.session", session_id=self._options.session_id):
                while not self._session.finished:
                    hop = await self._route.next()
                    with traces.span("outrider.device.attach", epoch=hop.epoch):
                        await self._attach(hop)
        except OutriderError as error:
            self._queue.put_nowait(error)
        except Exception as error:
            log.exception("a session's driver failed")
            self._queue.put_nowait(InternalError(f"the session's driver failed: {type(error).__name__}: {error}"))

    async def _attach(self, hop: AttachTarget) -> None:
        """One stream from Open to its end. Returns where the session is over or another hop may help."""
        before = len(self._session.received)
        self._statistics.attached(hop.address)
        try:
            async with VerifierStream(self._dial(hop), self._options.silence_s, self._statistics) as stream:
                self._open(stream, hop)
                while not self._session.finished:
                    self._take(await stream.receive())
        except OutriderError as error:
            if self._session.finished:
                return
            log.info("attach with epoch %d at %s ended: %s", hop.epoch, hop.address, error)
            self._route.failed(error, progressed=len(self._session.received) > before)
        finally:
            self._detach()

    def _open(self, stream: VerifierStream, hop: AttachTarget) -> None:
        """Open goes out before the draft is prefilled: the verifier prefills meanwhile."""
        attach = self._session.attach(hop.epoch, hop.limits or SessionLimits())
        self._base = len(attach.tokens)
        stream.open(Open(self._options.session_id, attach, hop.ticket, self._options.vocabulary_hash))
        self._stream = stream
        self._may_append = hop.limits is not None
        self._limited = self._limited or self._may_append
        if not self._attached:
            self._attached = True
            self._desk.begin(self._plan(), self._options.ends)
        if self._may_append:
            self._begin_appending(stream)

    def _begin_appending(self, stream: VerifierStream) -> None:
        """What survived goes before the word of another draft: it may be the former one's."""
        self._may_append = True
        self._flush()
        if self._release != self._options.announced:
            stream.draft_in_use(self._release)

    def _detach(self) -> None:
        self._stream = None
        self._rtt_s = 0.0
        self._sent_at = self._departs = -math.inf
        self._fresh = len(self._session.tree) > 0  # what survives is to be sent again
        self._may_append = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- what the verifier says

    def _take(self, message: Received) -> None:
        match message:
            case Commit():
                self._commit(message)
            case Opened():
                self._opened(message)
            case Directive():
                self._replan(message)
            case Ping():
                self._statistics.rtt_ms = message.rtt_ms
                self._rtt_s = message.rtt_ms / 1000
                self._replan(self._directive)
            case ReleaseNotice():
                self._options.notice(message.serial)

    def _opened(self, opened: Opened) -> None:
        if opened.epoch != self._session.epoch:
            raise ProtocolViolation(f"opened.epoch is {opened.epoch}, must be {self._session.epoch}", field="epoch")
        if opened.vocabulary_size:  # 0 by a verifier that does not tell
            self._vocabulary_size = opened.vocabulary_size
        self._route.learned(opened.limits)
        self._adopt(opened.limits)
        self._replan(opened.directive)
        if self._stream is not None and not self._may_append:
            self._begin_appending(self._stream)
        else:
            self._flush()

    def _adopt(self, limits: SessionLimits) -> None:
        """The verifier's limits where they were not known; a tree that they do not fit is sent again, smaller."""
        held = self._session.limits
        smaller = limits.nodes < held.nodes or limits.depth < held.depth or limits.in_flight < held.in_flight
        if smaller and (self._may_append or len(self._session.tree)):
            raise ReattachNeeded(f"the verifier allows {limits}, the device began with {held}")
        self._session.limits = limits
        self._limited = True
        self._take_in()

    def _replan(self, directive: Directive) -> None:
        self._directive = directive
        self._desk.replan(self._plan())

    def _commit(self, commit: Commit) -> None:
        """The client first, then the answer, then the draft: each step is late by the ones before it."""
        most = self._vocabulary_size
        if commit.epoch == self._session.epoch and max(commit.tokens, default=0) >= most:
            raise ProtocolViolation(
                f"a token id in commit.token is {max(commit.tokens)}, must be less than {most}, the vocabulary size"
            )
        delivery = self._session.on_commit(commit)
        if delivery is None:
            return
        self._statistics.evaluated += commit.evaluated
        now, plan = asyncio.get_running_loop().time(), self._plan()
        if delivery.tokens:
            self._statistics.delivered(len(delivery.tokens), sum(delivery.accepted), sum(delivery.drafted))
        if delivery.tokens or delivery.finish:
            self._queue.put_nowait(delivery)
        if self._session.finished:
            return
        self._desk.moved(delivery)
        self._unanswered = None if len(self._session.tree) else now
        self._beat = now
        departs = departure(plan, self._rtt_s, now, max(now, self._sent_at + plan.pause_s))
        # Commits that come faster than the step time told must not put a message off that waits for its time.
        self._departs = min(departs, self._departs) if self._timer is not None else departs
        self._flush()
        self._desk.commit(delivery.tokens)

    # --- what the draft says

    def _hear(self, drafting: Drafting, news: DraftUpdate | DraftFailed) -> None:
        if self._session.finished or not self._desk.has(drafting):
            return
        if isinstance(news, DraftFailed):
            self._failed(drafting, news)
            return
        drafting.hold(news)
        if not self._limited:
            return
        if drafting is self._desk.successor:
            if not self._desk.ready:
                return
            self._swap(drafting)
        if (gap_s := self._desk.gap()) is not None:
            self._statistics.swaps_s.append(gap_s)
        self._take_in()
        self._flush()

    def _failed(self, drafting: Drafting, news: DraftFailed) -> None:
        if drafting is self._desk.successor:
            self._desk.dismiss()
            return
        self._statistics.draft_failure = news.reason
        self._desk.present = None
        self._flush()

    def _take_in(self) -> None:
        if self._desk.present is not None:
            self._fresh = self._desk.present.take_in(self._vocabulary_size) > 0 or self._fresh

    def _resting(self) -> bool:
        """Whether to tell a verifier that may wait for nodes that none will come before its patience ends."""
        plan = self._plan()
        drafting = self._desk.present
        if drafting is None or drafting.heard_at is None or not plan.speculates:
            return True
        if not plan.waits:
            return False
        if drafting.rested_at == len(self._session.received):
            return True
        return not len(self._session.tree) and drafting.lent.worker.decode_s + self._rtt_s > plan.draft_wait_s

    # --- another draft

    def succeed(self, lent: Lent | None, swapped: Callable[[bool], None]) -> None:
        """Draft with another worker once it has read the sequence; the present one goes on until then.

        lent: None ends drafting. swapped: called once; True: the new worker drafts from now on, and the one before is
        free; False: the new one is free, as it failed or the session has ended before.
        """
        if self._session.finished:
            swapped(False)
        elif lent is None or not self._attached:  # nothing has been read yet
            self._desk.replace(lent)
            self._use(lent)
            swapped(True)
        else:
            self._desk.follow(lent, self._plan(), self._options.ends, swapped)

    def stay(self) -> None:
        """With the present worker: whoever reads to follow it is free."""
        self._desk.dismiss()

    def _swap(self, new: Drafting) -> None:
        """Between two growths: the last one of the old draft is in the tree, the first of the new one comes next."""
        if self._stream is not None and self._may_append and self._fresh:
            append = self._session.poll(resting=False)  # what the old one has guessed goes before the word that it left
            if append is not None:
                self._send(self._stream, append)
        self._desk.swap(self._plan(), self._options.ends)
        self._use(new.lent)

    def _use(self, lent: Lent | None) -> None:
        self._release = lent.release if lent is not None else ""
        self._statistics.uses(lent.name if lent is not None else "", self._release)
        if self._stream is not None and self._may_append:  # else `_begin_appending` tells
            self._stream.draft_in_use(self._release)

    # --- what goes out

    def _flush(self) -> None:
        """Send what there is to say: now if the verifier waits for it, else with the next departure."""
        if self._stream is None or not self._may_append or self._session.finished:
            return
        now, plan = asyncio.get_running_loop().time(), self._plan()
        awaited = plan.waits and not self._holds_ours()
        if now < self._departs and not awaited and not self._base_is_stale():
            self._send_at(self._departs)
            return
        # Rule 4: while it has nodes of ours the verifier waits for nothing, and idle alone would be for nobody. What it
        # knows of our base is no staler for that: `poll` heeds rule 5, resting or not.
        resting = self._resting() and (self._fresh or not len(self._session.tree))
        append = self._session.poll(resting=resting)
        if append is None:
            return
        self._send(self._stream, append)
        if awaited:
            self._beat = now + self._rtt_s  # its step begins when this arrives
        self._sent_at = now
        self._departs = departure(plan, self._rtt_s, self._beat, now + plan.pause_s)
        if append.tokens and self._unanswered is not None:
            self._statistics.answers_s.append(now - self._unanswered)
            self._unanswered = None

    def _send(self, stream: VerifierStream, append: Append) -> None:
        self._fresh = False
        stream.append(append)
        self._base = append.base
        self._statistics.appends += 1
        self._statistics.drafted += len(append.tokens)

    def _holds_ours(self) -> bool:
        """Whether the verifier has a live node of ours, or one is on its way: it waits for nothing then."""
        oldest = next(iter(self._session.tree), None)
        return oldest is not None and self._session.was_sent(oldest.id)

    def _base_is_stale(self) -> bool:
        """Rule 5: whether the verifier must hear now how far we are."""
        return len(self._session.received) - self._base >= max(1, self._session.limits.run_ahead // 2)

    def _send_at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _plan(self) -> SpeculationPlan:
        waits = self._rtt_s < self._directive.draft_wait_ms / 1000
        return _plan(self._directive, self._session.limits, self._options.siblings, waits)

    # --- the end

    def _stop(self) -> None:
        """The client wants no more, or has all: cancel what still runs and give the draft back."""
        self._desk.end()
        cancel = self._session.cancel()
        if cancel is not None and self._stream is not None:
            self._stream.cancel(cancel)


@functools.lru_cache(maxsize=64)
def _plan(directive: Directive, limits: SessionLimits, siblings: int, waits: bool) -> SpeculationPlan:
    return SpeculationPlan.of(directive, limits, siblings=siblings, waits=waits)


async def _wind_down(runner: asyncio.Task[None]) -> None:
    """Let the stream end by itself for a moment, then end it."""
    await asyncio.wait({runner}, timeout=0.5)
    runner.cancel()
    await asyncio.wait({runner})
