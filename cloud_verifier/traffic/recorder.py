"""Records in the front: the engine's events in, passages to a writer, from a thread that nothing waits for."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import Protocol

from cloud_verifier.traffic.codec import Source, passage_from_proto
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.passage_builder import Counts, Runs
from cloud_verifier.traffic.redaction import Redact
from outrider.wire.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

BACKLOG = 4_096
"""Events that may wait for the thread; what comes beyond is dropped, so that the front never waits."""
UNWRITTEN = 8
"""Times `flush_tokens` that may wait for a store that refuses; then they are dropped."""
LAST_WORDS = 1_024
"""Sessions that have ended of which something may still come: the engine tells of a commit behind it."""
CLOSE_S = 30.0
_Job = tuple[Source, pb.Produced]


class Writer(Protocol):
    """What the recorder needs of a SegmentWriter."""

    pending: int

    def add(self, passage: Passage) -> None: ...

    def flush(self) -> None: ...

    def drop(self) -> int: ...


class Recorder:
    """All methods but `close` are for the event loop, and return at once."""

    def __init__(
        self,
        writer: Writer,
        *,
        redact: Redact | None = None,
        flush_s: float = 10.0,
        flush_tokens: int = 16_384,
        prompt_tokens: int = 2_048,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """writer: takes passages and writes when told to, from one thread. flush_s: what is recorded is written within
        so many seconds. prompt_tokens: of a prompt that may be kept, the last so many are. clock: seconds since 1970.
        """
        self.counts = Counts()
        self._writer = writer
        self._flush_s = flush_s
        self._flush_tokens = flush_tokens
        self._clock = clock
        self._sources: dict[tuple[str, int], Source] = {}
        """By session id and epoch."""
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._runs = Runs(redact, self.counts, prompt_tokens)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(BACKLOG)
        self._thread = Thread(target=self._work, name="traffic", daemon=True)
        self._thread.start()

    def begin(self, source: Source, epoch: int) -> None:
        """This epoch of a session is recorded."""
        key = source.session_id, epoch
        self._ended.pop(key, None)
        self._sources[key] = source

    def end(self, session_id: str, epoch: int) -> None:
        """Its stream has ended; the engine's last words on it may be under way."""
        key = session_id, epoch
        if key in self._sources:
            self._ended[key] = None
        while len(self._ended) > LAST_WORDS:
            del self._sources[self._ended.popitem(last=False)[0]]

    def take(self, event: pb.EngineEvent) -> None:
        """What the engine tells of a session; nothing is recorded of one that did not begin here."""
        source = self._sources.get((event.session_id, event.epoch))
        if source is None:
            return
        try:
            self._jobs.put_nowait((source, event.produced))
        except queue.Full:
            self.counts.dropped += len(event.produced.token)

    def close(self) -> None:
        """Write all that has come. Waits for it, but not for ever."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self.counts != Counts():
            log.info("traffic log: %s", self.counts)

    def _work(self) -> None:
        due = time.monotonic() + self._flush_s
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
                if job is None:
                    break
                self._runs.add(passage_from_proto(job[1], job[0], self._clock()))
            except queue.Empty:
                pass
            except Exception as error:
                log.warning("what the engine told of a session cannot be recorded: %r", error)
            if time.monotonic() >= due or self._runs.tokens >= self._flush_tokens:
                self._write()
                due = time.monotonic() + self._flush_s
        self._write(final=True)

    def _write(self, final: bool = False) -> None:
        """Should the store refuse, what there is waits for the next time, as long as it is not too much."""
        try:
            for passage in self._runs.cut(self._clock(), final):
                self.counts.recorded += len(passage)
                self._writer.add(passage)
            self._writer.flush()
        except Exception as error:
            log.warning("%d tokens are not yet in the traffic log: %r", self._writer.pending, error)
            if final or self._writer.pending > UNWRITTEN * self._flush_tokens:
                lost = self._writer.drop()
                self.counts.recorded -= lost
                self.counts.dropped += lost
