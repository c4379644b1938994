"""One stream of a session: what the device says is checked and passed to the engine, and what is due comes back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.host import EngineHost, Inbox
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.rate_limiter import Pace
from cloud_verifier.front.session_grant import Terms
from outrider.core.errors import OutriderError, ProtocolViolation, Unavailable
from outrider.core.protocol.messages import Directive
from outrider.wire import codecs
from outrider.wire.v1 import engine_pb2, session_pb2

Requests = AsyncIterator[session_pb2.ClientMessage]

HELD = 0.5
"""Least worth of a node that is held, over that of one that is evaluated. With the whole price 16 devices of a verifier
on one core got 1.45 tokens a step, with none 1.63 at the same speed, and drafted a third more; this is between."""
CHANGE = 0.25
"""Share by which step time or price must have changed before a device is told again."""
STEERED_S = 10.0
"""How long the coordinator's word holds: it says it again every second as long as it means it."""
FAREWELL_S = 1.0
"""How long a device has to close its side after its last Commit."""
MAX_PINGS = 64
"""Unanswered ones whose times are kept."""
MAX_UNSEEN = 256
"""Appends without a Commit whose times are kept: those of one step."""


class SessionStream:
    """One stream: one epoch of one session."""

    def __init__(
        self,
        host: EngineHost,
        config: VerifierConfig,
        opening: codecs.Open,
        terms: Terms,
        vocabulary_size: int,
        counters: FrontCounters,
    ) -> None:
        self._counters = counters
        self._unseen: deque[tuple[int, float]] = deque(maxlen=MAX_UNSEEN)
        """(last id, when it came) of Appends that no Commit has seen yet."""
        self.tokens = 0
        """That have gone to the device."""
        self.finish = session_pb2.FINISH_NONE
        """Of the last Commit that went to it."""
        self.session_id = opening.session_id
        self.terms = terms
        self.limits = terms.limits
        self._host = host
        self._config = config
        self._opening = opening
        self.epoch = opening.attach.epoch
        self._vocabulary_size = vocabulary_size
        self._inbox: Inbox | None = None
        self._heard = time.monotonic()
        """When the device last gave a sign of life: an Append that was taken, or the answer to a ping."""
        self._lost = False
        """Its session was given up: what the device says from now on does not bring it back."""
        self._pings: dict[int, float] = {}
        """nonce -> when it was sent, of pings without an answer"""
        self._nonce = 0
        self._pinged = 0.0
        self._rtt_ms = 0.0
        self._last_sample_ms = math.inf
        self._base = config.directive
        """What the verifier's own settings or the coordinator say, before the load of the moment."""
        self._told = config.directive
        """What the device plans with."""
        self._steered_at = -math.inf
        """When the coordinator has last said how far to speculate."""
        self._untold = False
        """Whether the device has not been told of the base yet."""
        self.recorded = False
        """Whether the engine tells what is produced."""
        self._releases = self._releases_told = 0
        """Serials of the draft releases that are to be had, and of those that the device was told of."""

    def directive(self) -> Directive:
        """What the device is told from now on."""
        self._told = replace(
            self._base, step_ms=self._host.stats.verifier.step_ms, min_acceptance=self._min_acceptance()
        )
        self._counters.told(self._told)
        return self._told

    def steer(self, directive: Directive) -> None:
        """The coordinator's word, which holds for a while: the engine obeys at once, the device is told next. Never
        above the session's limits."""
        self._steered_at = time.monotonic()
        self._adopt(directive)

    def announce(self, serial: int) -> None:
        """Other draft releases are to be had: the device is told next, once."""
        self._releases = serial
        if self._inbox is not None and serial > self._releases_told:
            self._inbox.put_nowait(engine_pb2.EngineEvent())  # so that somebody looks

    def _adopt(self, directive: Directive) -> None:
        bounded = replace(
            directive,
            window_nodes=min(directive.window_nodes, self.limits.nodes),
            window_depth=min(directive.window_depth, self.limits.depth),
        )
        if self._inbox is None or bounded == self._base:
            return
        threshold_changed = replace(bounded, min_acceptance=self._base.min_acceptance) == self._base
        self._base = bounded
        if threshold_changed:
            return  # told with the load
        self._host.send(self._request(tune=engine_pb2.Tune(directive=codecs.directive_to_proto(bounded))))
        self._untold = True
        self._inbox.put_nowait(engine_pb2.EngineEvent())  # so that somebody looks

    def begin(self, salt: str, record: bool = False) -> None:
        """record: whether what is produced shall be recorded. Raises Fenced or Unavailable."""
        self._inbox = self._host.register(self.session_id, self.epoch)
        self.recorded = record
        start = engine_pb2.Start(
            attach=codecs.attach_to_proto(self._opening.attach),
            limits=codecs.limits_to_proto(self.limits),
            directive=codecs.directive_to_proto(self._config.directive),
            salt=salt,
            draft_release=self.terms.draft_release,
            record=record,
        )
        self._host.send(self._request(start=start))

    def fail(self, error: OutriderError) -> None:
        """End the stream with `error`, after all that is due to the device already."""
        if self._inbox is not None:
            self._inbox.put_nowait(engine_pb2.EngineEvent(failure=ipc.failure_to_event(error)))

    def close(self) -> bool:
        """Give everything back. Whether this stream still owned its session."""
        return self._inbox is not None and self._host.release(self.session_id, self.epoch, self._inbox)

    async def silence(self) -> None:
        """Wait until the device has been silent for too long, and `messages` has told it so if it reads."""
        allowed_s = self._config.silence_timeout_s + 2.0 * self._config.ping_interval_s
        while True:
            left_s = self._heard + allowed_s - time.monotonic()
            if left_s <= 0:
                self._lost = True
                return
            await asyncio.sleep(left_s)

    async def messages(
        self, requests: Requests, on_rtt: Callable[[str, float], None], on_last: Callable[[], None]
    ) -> AsyncGenerator[session_pb2.ServerMessage, None]:
        """Commits, pings, directives and notices until the sequence ends. Raises what ended the session otherwise.

        on_last: called when the last Commit is on its way. The stream ends when the device has closed its side.
        A device that has closed its side can still receive: it gets what comes before its silence ends the session.
        """
        if self._inbox is None:
            return
        inbox = self._inbox
        reading = asyncio.create_task(self._read(requests, on_rtt))
        reading.add_done_callback(lambda _: inbox.put_nowait(engine_pb2.EngineEvent()))  # so that somebody looks
        try:
            while True:
                event = await self._next_event(inbox)
                if reading.done():
                    reading.result()  # what the device did wrong comes before what is due to it
                message = self._message(event) if event is not None else None
                if message is not None:
                    yield message
                    if message.commit.finish != session_pb2.FINISH_NONE:
                        on_last()
                        # A device on grpc.aio that writes just when its stream ends loses what it has not read yet.
                        await asyncio.wait({reading}, timeout=FAREWELL_S)
                        return
                pinged = self._until_ping() <= 0
                if pinged:
                    yield self._ping()
                    if time.monotonic() > self._steered_at + STEERED_S:
                        self._adopt(self._config.directive)
                if self._untold or (pinged and self._load_changed()):
                    self._untold = False
                    yield session_pb2.ServerMessage(directive=codecs.directive_to_proto(self.directive()))
                if self._releases > self._releases_told:
                    self._releases_told = self._releases
                    yield session_pb2.ServerMessage(release=session_pb2.ReleaseNotice(serial=self._releases))
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reading

    async def _next_event(self, inbox: Inbox) -> engine_pb2.EngineEvent | None:
        """None when a ping is due."""
        if not inbox.empty():
            return inbox.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._until_ping()):
                return await inbox.get()
        return None

    async def _read(self, requests: Requests, on_rtt: Callable[[str, float], None]) -> None:
        pace = Pace(self._config.stream_messages_per_s, self._config.stream_burst)
        cancelled = False
        async for message in requests:
            match message.WhichOneof("kind"):
                case "append":
                    self._check_append(message.append)
                    self._heard = time.monotonic()
                    self._note_append(message.append)
                    self._host.send(self._request(append=message.append))
                    await self._host.drain()
                case "cancel":
                    self._check_epoch("cancel.epoch", message.cancel.epoch)
                    if not cancelled:  # once is enough
                        self._host.send(self._request(cancel=message.cancel))
                        cancelled = True
                        await self._host.drain()
                case "pong":
                    self._measure(message.pong.nonce, on_rtt)
                case "draft":
                    codecs.draft_in_use_from_proto(message.draft)
                    self._host.send(self._request(draft=message.draft))
                    await self._host.drain()
                case kind:
                    raise ProtocolViolation(
                        f"a message of kind {kind} came mid-stream, must be append, cancel, pong or draft", field="kind"
                    )
            if delay_s := pace.delay_s(len(message.append.token)):
                await asyncio.sleep(delay_s)  # what is not read stays with the device, by flow control

    def _check_append(self, append: session_pb2.Append) -> None:
        """Check all that one message shows; the engine builds from it unchecked, and its protocol state machine checks
        what needs the session's state. Raises BadRequest."""
        if len(append.token) > self.limits.in_flight:
            bound = f"at most {self.limits.in_flight}, limits.in_flight"
            raise ProtocolViolation.bound("nodes in append.token", len(append.token), bound)
        codecs.check_append(append, vocabulary_size=self._vocabulary_size)

    def _note_append(self, append: session_pb2.Append) -> None:
        self._counters.appends += 1
        if count := len(append.token):
            self._counters.nodes += count
            self._unseen.append((append.first_id + count - 1, self._heard))

    def _note_commit(self, commit: session_pb2.Commit) -> None:
        self.finish = commit.finish
        self.tokens += len(commit.token)
        now = time.monotonic()
        while self._unseen and self._unseen[0][0] <= commit.seen:
            self._counters.append_commit_s.add(now - self._unseen.popleft()[1])

    def _check_epoch(self, field: str, epoch: int) -> None:
        """One stream is one epoch. Raises ProtocolViolation."""
        if epoch != self.epoch:
            raise ProtocolViolation.bound(field, epoch, f"{self.epoch}, the stream's")

    def _message(self, event: engine_pb2.EngineEvent) -> session_pb2.ServerMessage | None:
        match event.WhichOneof("kind"):
            case "commit":
                self._note_commit(event.commit)
                return session_pb2.ServerMessage(commit=event.commit)
            case "failure":
                raise ipc.failure_from_event(event.failure)
            case _:
                return None

    def _until_ping(self) -> float:
        return max(0.0, self._pinged + self._config.ping_interval_s - time.monotonic())

    def _ping(self) -> session_pb2.ServerMessage:
        now = time.monotonic()
        if self._lost or now - self._heard > self._config.silence_timeout_s:
            raise Unavailable(f"the device has been silent for {self._config.silence_timeout_s} s; attach again")
        self._nonce += 1
        self._pinged = self._pings[self._nonce] = now
        while len(self._pings) > MAX_PINGS:
            del self._pings[min(self._pings)]
        return session_pb2.ServerMessage(ping=codecs.ping_to_proto(codecs.Ping(self._nonce, self._rtt_ms)))

    def _load_changed(self) -> bool:
        """Whether the device plans with a step time or a price that is off by more than a quarter."""
        load, told = self._host.stats.verifier, self._told
        threshold_changed = abs(self._min_acceptance() - told.min_acceptance) > CHANGE * told.min_acceptance
        return abs(load.step_ms - told.step_ms) > CHANGE * told.step_ms or threshold_changed

    def _min_acceptance(self) -> float:
        """What a node must be worth to be sent: less than what pays for a row now, for one that is held is worth more
        after a commit that passes through its parent."""
        return max(
            self._config.min_acceptance, HELD * max(self._base.min_acceptance, self._host.stats.verifier.min_acceptance)
        )

    def _measure(self, nonce: int, on_rtt: Callable[[str, float], None]) -> None:
        """The lesser of the last two round trips estimates the path: a queue only adds to one, and a longer path shows
        within two pings."""
        sent = self._pings.pop(nonce, None)
        if sent is None:
            return
        self._heard = time.monotonic()
        sample = 1000.0 * (self._heard - sent)
        self._rtt_ms, self._last_sample_ms = min(sample, self._last_sample_ms), sample
        self._counters.rtt_s.add(sample / 1000)
        on_rtt(self.session_id, self._rtt_ms)
        self._host.send(self._request(tune=engine_pb2.Tune(rtt_ms=self._rtt_ms)))

    def _request(self, **kind: Any) -> engine_pb2.EngineRequest:
        return engine_pb2.EngineRequest(session_id=self.session_id, epoch=self.epoch, **kind)
