"""Record sessions in the front: turn the engine's events into passages, in a thread that nothing waits for."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic.passage import NO_PROMPT, Passage
from cloud_verifier.traffic.passage_builder import (
    REDACTION_CONTEXT,
    PassageBuilder,
    RecordingCounts,
    Redact,
    load_hook,
)
from outrider.core.errors import BadRequest
from outrider.telemetry.logs import RepeatedFailure
from outrider.wire.ticket import Claims
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2

if TYPE_CHECKING:
    from cloud_verifier.traffic.log import TrafficLog

log = logging.getLogger(__name__)

BACKLOG = 4_096
"""Events that may wait for the thread; further ones are dropped, so that the front never waits."""
FLUSH_S = 5.0
"""Seconds within which recorded tokens are written: a killed verifier loses that much, and each write makes the newest
file afresh."""
FLUSH_TOKENS = 16_384
"""Tokens that are written at once, however early."""
UNWRITTEN_TOKENS = 8 * FLUSH_TOKENS
"""Tokens that may wait for a store that refuses writes; beyond it they are dropped."""
WAITING_TOKENS = 16 * FLUSH_TOKENS
"""Tokens that may wait for a redaction hook, which sees whole texts: about 350 MB. Beyond it no further session is
recorded; those that are go on, since the hook must see them whole."""
SESSIONS = 2_048
"""Sessions that are known, the latest: the engine's last events of one come after its stream has ended."""
CLOSE_S = 30.0
"""Seconds that `close` waits for the thread."""
PROMPT_TOKENS = 2_048
"""The last ids of a prompt that are recorded with the output's beginning, if the tenant allows prompts."""
MAX_BYTES = 8 << 30
"""Bytes of the log above which its oldest files are deleted."""
TIDY_EVERY_S = 300.0
"""Seconds between two deletions of days that are over."""


class _Session(NamedTuple):
    """A session that is recorded."""

    claims: Claims
    temperature: float
    prompt: NDArray[np.int32]
    """`[p]`: the end of its prompt, or all of it; empty if the prompt may not be kept."""


class TrafficRecorder:
    """A recorder of sessions, whose methods but `close` are for the event loop, and return at once."""

    def __init__(
        self,
        place: TrafficLog,
        *,
        redact: Redact | None = None,
        flush_s: float = FLUSH_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin the thread, which also tidies the log. flush_s: seconds within which what is recorded is written.
        clock: seconds since 1970."""
        self.counts = RecordingCounts()
        self._log = place
        self._flush_s = flush_s
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, int], _Session] = OrderedDict()
        """(session id, epoch) -> a session that is recorded, the one that produced last at the end"""
        self._passages = PassageBuilder(redact, self.counts, PROMPT_TOKENS)
        self._unwritten: list[Passage] = []
        self._failure = RepeatedFailure(log, "the traffic log is written again")
        self._crowd = RepeatedFailure(log, "further sessions are recorded again")
        self._jobs: queue.Queue[tuple[_Session, pb.RecordedTokens] | None] = queue.Queue(BACKLOG)
        self._thread = Thread(target=self._work, name="traffic", daemon=True)
        self._thread.start()

    def begin(self, attach: session_pb2.Attach, claims: Claims) -> None:
        """Record this epoch of a session, as its ticket allows. Its events may come until `SESSIONS` others have begun
        since its last."""
        waiting = self._passages.waiting
        if waiting > WAITING_TOKENS and all(name != claims.session_id for name, _ in self._sessions):
            self._crowd.failed("further sessions are not recorded: %d tokens wait until their texts are whole", waiting)
            return
        self._crowd.worked()
        # Before the end that is kept, as many ids as a redaction hook must see beside the cut.
        kept = PROMPT_TOKENS + REDACTION_CONTEXT if claims.keep_prompts else 0
        prompt = np.array(attach.prompt[max(0, len(attach.prompt) - kept) :], np.int32)
        self._sessions[claims.session_id, attach.epoch] = _Session(claims, attach.sampling.temperature, prompt)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def take(self, event: pb.EngineEvent) -> None:
        """Record what a session produced, if it was begun here."""
        key = event.session_id, event.epoch
        if key not in self._sessions:
            return
        self._sessions.move_to_end(key)
        try:
            self._jobs.put_nowait((self._sessions[key], event.recorded))
        except queue.Full:
            self.counts.dropped += len(event.recorded.token)

    def close(self) -> None:
        """Write all that has come, waiting at most `CLOSE_S` for it."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self.counts != RecordingCounts():
            log.info("traffic log: %s", self.counts)

    def _work(self) -> None:
        flush_due, tidy_due = time.monotonic() + self._flush_s, 0.0
        while True:
            if time.monotonic() >= tidy_due:
                self._tidy()
                tidy_due = time.monotonic() + TIDY_EVERY_S
            try:
                job = self._jobs.get(timeout=max(0.0, flush_due - time.monotonic()))
                if job is None:
                    break
                session, produced = job
                self._passages.add(_passage_from_proto(produced, session, self._clock()))
            except queue.Empty:
                pass
            except Exception as error:
                log.warning("an event of the engine cannot be recorded: %r", error)
            if time.monotonic() >= flush_due or self._passages.tokens >= FLUSH_TOKENS:
                self._write()
                flush_due = time.monotonic() + self._flush_s
        self._write(final=True)

    def _write(self, final: bool = False) -> None:
        """Write what has been recorded. If the store refuses, it waits for the next time, up to a bound."""
        try:
            for passage in self._passages.take(self._clock(), final):
                self.counts.recorded += len(passage)
                self._unwritten.append(passage)
            self._log.write(self._unwritten)
            self._unwritten.clear()
            self._failure.worked()
        except Exception as error:
            waiting = sum(map(len, self._unwritten))
            self._failure.failed("%d tokens are not yet in the traffic log: %r", waiting, error)
            if final or waiting > UNWRITTEN_TOKENS:
                self._unwritten.clear()
                self.counts.recorded -= waiting
                self.counts.dropped += waiting

    def _tidy(self) -> None:
        try:
            if deleted := self._log.tidy(MAX_BYTES):
                log.warning("%d of the oldest files were deleted: the log had over %d bytes", deleted, MAX_BYTES)
        except Exception as error:
            log.warning("the traffic log could not be tidied: %r", error)


def _passage_from_proto(message: pb.RecordedTokens, session: _Session, now: float) -> Passage:
    """Convert an event of the engine to a passage. now: seconds since 1970. Raises ValueError if the message's arrays
    do not fit together."""
    shape, claims = (len(message.token), message.top), session.claims
    return Passage(
        session_id=claims.session_id,
        tenant=claims.tenant,
        traffic_class=claims.traffic_class,
        draft_release=message.draft_release,
        weights_hash=claims.target.weights_hash,
        start=message.start,
        tokens=np.asarray(message.token, dtype=np.int32),
        top_ids=np.frombuffer(message.top_ids, dtype="<u4").astype(np.int32).reshape(shape),
        top_log_probs=np.frombuffer(message.top_log_probs, dtype="<f2").astype(np.float32).reshape(shape),
        tail=np.frombuffer(message.tail, dtype="<f2").astype(np.float32),
        proposed_depths=np.frombuffer(message.proposed_depths, dtype=np.uint8),
        temperature=session.temperature,
        time_unix=now,
        expires_unix=now + claims.keep_s,
        prompt=NO_PROMPT if message.start else session.prompt,
    )


def recorder_of(config: VerifierConfig, verifier_id: str) -> TrafficRecorder:
    """Return a recorder that writes to `config.traffic`, and tidies the log there until it is closed.

    Raises BadRequest if there can be no log or no redaction hook, and ImportError if fsspec lacks a package.
    """
    from cloud_verifier.traffic.log import TrafficLog  # needs pyarrow

    redact = load_hook(config.traffic_redact) if config.traffic_redact else None
    try:
        place = TrafficLog(config.traffic, verifier_id)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"traffic is {config.traffic!r}, where nothing can be written: {error}", field="traffic"
        ) from error
    if not config.coordinator:
        log.warning("nothing will be recorded: only tickets of a coordinator permit it")
    return TrafficRecorder(place, redact=redact)
