"""Record sessions in the front: turn the engine's events into passages, in a thread that nothing waits for."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic.passage import NO_PROMPT, Passage
from cloud_verifier.traffic.passage_builder import PassageBuilder, RecordingCounts, Redact, load_hook
from outrider.core.errors import BadRequest
from outrider.telemetry.logs import RepeatedFailure
from outrider.wire.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter

log = logging.getLogger(__name__)

BACKLOG = 4_096
"""Events that may wait for the thread; further ones are dropped, so that the front never waits."""
UNWRITTEN = 8
"""Multiple of `flush_tokens` that may wait for a store that refuses writes; beyond it tokens are dropped."""
MAX_ENDED = 1_024
"""Ended sessions whose last events may still come: the engine sends what it produced after the commit."""
CLOSE_S = 30.0
"""Seconds that `close` waits for the thread."""
TIDY_EVERY_S = 300.0
"""Seconds between two rounds: an expired row is never read, and is deleted after so long at the latest."""


@dataclass(frozen=True)
class RecordedSession:
    """A session that is recorded, by its ticket."""

    session_id: str
    tenant: str
    traffic_class: str
    weights_hash: str
    """Hash of the target's weights."""
    temperature: float
    keep_s: float
    """Seconds for which its output may be kept."""
    prompt: NDArray[np.int32] = field(default_factory=lambda: NO_PROMPT, compare=False)
    """`[p]`: the end of its prompt, or all of it; empty if the prompt may not be kept."""


class TrafficRecorder:
    """A recorder of sessions, whose methods but `close` are for the event loop, and return at once."""

    def __init__(
        self,
        writer: SegmentWriter,
        *,
        redact: Redact | None = None,
        flush_s: float = 10.0,
        flush_tokens: int = 16_384,
        prompt_tokens: int = 2_048,
        clock: Callable[[], float] = time.time,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the thread. writer: takes passages, and writes on `flush`. flush_s: seconds within which what is
        recorded is written. prompt_tokens: of a prompt that may be kept, the last so many ids are. clock: seconds
        since 1970. on_close: called when the recorder has closed.
        """
        self.counts = RecordingCounts()
        self._writer = writer
        self._flush_s = flush_s
        self._flush_tokens = flush_tokens
        self._clock = clock
        self._on_close = on_close
        self._sessions: dict[tuple[str, int], RecordedSession] = {}
        """(session id, epoch) -> a session that is recorded, or has ended a moment ago"""
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._passages = PassageBuilder(redact, self.counts, prompt_tokens)
        self._failure = RepeatedFailure(log, "the traffic log is written again")
        self._jobs: queue.Queue[tuple[RecordedSession, pb.RecordedTokens] | None] = queue.Queue(BACKLOG)
        self._thread = Thread(target=self._work, name="traffic", daemon=True)
        self._thread.start()

    def begin(self, session: RecordedSession, epoch: int) -> None:
        """Record this epoch of a session."""
        key = session.session_id, epoch
        self._ended.pop(key, None)
        self._sessions[key] = session

    def end(self, session_id: str, epoch: int) -> None:
        """Note that an epoch's stream has ended; the engine's last events of it may still be under way."""
        key = session_id, epoch
        if key in self._sessions:
            self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            del self._sessions[self._ended.popitem(last=False)[0]]

    def take(self, event: pb.EngineEvent) -> None:
        """Record what a session produced, if it was begun here."""
        session = self._sessions.get((event.session_id, event.epoch))
        if session is None:
            return
        try:
            self._jobs.put_nowait((session, event.recorded))
        except queue.Full:
            self.counts.dropped += len(event.recorded.token)

    def close(self) -> None:
        """Write all that has come, waiting at most `CLOSE_S` for it."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self.counts != RecordingCounts():
            log.info("traffic log: %s", self.counts)
        self._on_close()

    def _work(self) -> None:
        due = time.monotonic() + self._flush_s
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
                if job is None:
                    break
                session, produced = job
                self._passages.add(_passage_from_proto(produced, session, self._clock()))
            except queue.Empty:
                pass
            except Exception as error:
                log.warning("an event of the engine cannot be recorded: %r", error)
            if time.monotonic() >= due or self._passages.tokens >= self._flush_tokens:
                self._write()
                due = time.monotonic() + self._flush_s
        self._write(final=True)

    def _write(self, final: bool = False) -> None:
        """Write what has been recorded. If the store refuses, it waits for the next time, up to a bound."""
        try:
            for passage in self._passages.take(self._clock(), final):
                self.counts.recorded += len(passage)
                self._writer.add(passage)
            self._writer.flush()
            self._failure.worked()
        except Exception as error:
            self._failure.failed("%d tokens are not yet in the traffic log: %r", self._writer.pending, error)
            if final or self._writer.pending > UNWRITTEN * self._flush_tokens:
                lost = self._writer.drop()
                self.counts.recorded -= lost
                self.counts.dropped += lost


def _passage_from_proto(message: pb.RecordedTokens, session: RecordedSession, now: float) -> Passage:
    """Convert an event of the engine to a passage. now: seconds since 1970. Raises ValueError if the message's arrays
    do not fit together."""
    shape = len(message.token), message.top
    return Passage(
        session_id=session.session_id,
        tenant=session.tenant,
        traffic_class=session.traffic_class,
        draft_release=message.draft_release,
        weights_hash=session.weights_hash,
        start=message.start,
        tokens=np.asarray(message.token, dtype=np.int32),
        top_ids=np.frombuffer(message.top_ids, dtype="<u4").astype(np.int32).reshape(shape),
        top_log_probs=np.frombuffer(message.top_log_probs, dtype="<f2").astype(np.float32).reshape(shape),
        tail=np.frombuffer(message.tail, dtype="<f2").astype(np.float32),
        proposed_depths=np.frombuffer(message.proposed_depths, dtype=np.uint8),
        temperature=session.temperature,
        time_unix=now,
        expires_unix=now + session.keep_s,
        prompt=NO_PROMPT if message.start else session.prompt,
    )


def recorder_of(config: VerifierConfig, verifier_id: str) -> TrafficRecorder:
    """Return a recorder that writes to `config.traffic`, and tidies the log there until it is closed.

    Raises BadRequest if there can be no log or no redaction hook, and ImportError if fsspec lacks a package.
    """
    from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter  # needs pyarrow

    redact = load_hook(config.traffic_redact) if config.traffic_redact else None
    try:
        segments = SegmentLog(config.traffic)
        writer = SegmentWriter(config.traffic, verifier_id=verifier_id)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"traffic is {config.traffic!r}, where nothing can be written: {error}", field="traffic"
        ) from error
    return TrafficRecorder(
        writer,
        redact=redact,
        flush_s=config.traffic_flush_s,
        prompt_tokens=config.traffic_prompt_tokens,
        on_close=keep_tidy(segments, config.traffic_max_bytes),
    )


def keep_tidy(segments: SegmentLog, max_bytes: int, interval_s: float = TIDY_EVERY_S) -> Callable[[], None]:
    """Delete a log's expired rows, and keep it below `max_bytes`; return what stops that.

    A thread does so now and every `interval_s` seconds, so that no writing waits. A round under way is left to itself:
    it can end at any moment without harm.
    """
    stop = Event()

    def work() -> None:
        while True:
            try:
                segments.expire()
                if deleted := segments.shrink(max_bytes):
                    log.warning("%d of the oldest segments were deleted: the log had over %d bytes", deleted, max_bytes)
            except Exception as error:
                log.warning("the traffic log could not be tidied: %r", error)
            if stop.wait(interval_s):
                return

    Thread(target=work, name="traffic-tidy", daemon=True).start()
    return stop.set
