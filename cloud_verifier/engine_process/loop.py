"""Serve the front with an engine: requests in, one step, events out."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cloud_verifier.config import LIMITS, VerifierConfig
from cloud_verifier.engine.admission import longest_session
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Event, Failed, TargetExecutor
from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.step_profiler import describe
from cloud_verifier.engine_process.ipc import EngineEnd, failure_event
from outrider.core.constraint import grammars_of
from outrider.core.errors import InternalError, ModelRefused, OutriderError, Unavailable
from outrider.core.text import short_id
from outrider.telemetry.logs import about
from outrider.wire.checks import limits_of
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
ALIVE_INTERVAL_S = 0.25
COMPILING_POLL_S = 2e-3
"""How often an idle engine looks whether a grammar is compiled, in seconds."""


class EngineLoop:
    """Drives an engine by the front's requests, and sends back its events.

    The front has checked the requests: their messages are used as they are.
    """

    def __init__(self, engine: Engine, end: EngineEnd) -> None:
        self._engine = engine
        self._end = end
        self._epochs: dict[str, int] = {}
        """session id -> the epoch in which the engine has the session"""
        self._stats_due = 0.0
        self._unrecorded = 0
        """Tokens of recorded sessions that were not sent, since the front did not keep up or they fit no event."""
        self._quit = False
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiling: dict[str, tuple[Future[None], list[pb.EngineRequest]]] = {}
        """session id -> the compilation that its start waits for, and its requests from that on, in order"""

    def run(self) -> None:
        while not (self._quit or self._end.closed):
            events = [event for request in self._end.receive(self._poll_timeout_s) for event in self._take(request)]
            events += self._take_compiled()
            events += map(_event, self._engine.step())
            self._end.send(events)
            if time.monotonic() >= self._stats_due:
                self._end.send([self._stats()])
            self._record(self._engine.take_recorded())

    def _record(self, recorded: list[pb.EngineEvent]) -> None:
        """Send recorded tokens behind the commits, without waiting: what the front does not keep up with is lost."""
        self._unrecorded += sum(len(event.recorded.token) for event in recorded if not self._end.offer(event))

    def _poll_timeout_s(self) -> float:
        """Return the seconds to wait for requests, 0 while a step is due."""
        deadline = self._engine.next_deadline()
        wait = self._stats_due - time.monotonic()
        if self._compiling:
            wait = min(wait, COMPILING_POLL_S)
        return max(0.0, wait if deadline is None else min(wait, deadline - time.monotonic()))

    def _take_compiled(self) -> list[pb.EngineEvent]:
        """Take the requests that have waited for grammars which are compiled now, or cannot be compiled: then the first
        of them, the start, fails."""
        events: list[pb.EngineEvent] = []
        for session_id, (compiled, (start, *others)) in list(self._compiling.items()):
            if not compiled.done():
                continue
            failure = compiled.exception()
            if failure is not None or self._engine.ready_for(_grammar_of(start)):
                del self._compiling[session_id]
                events += self._take(start) if failure is None else [_failed(start, failure)]
                events += [event for request in others for event in self._take(request)]
        return events

    def _take(self, request: pb.EngineRequest) -> list[pb.EngineEvent]:
        """Apply one request; return the failure that ends its session if it fails."""
        try:
            self._apply(request)
        except Unavailable:
            raise  # the target has gone, which no request is to blame for
        except Exception as error:
            return [_failed(request, error)]
        return []

    def _apply(self, request: pb.EngineRequest) -> None:
        session_id, kind = request.session_id, request.WhichOneof("kind")
        if session_id in self._compiling:
            self._compiling[session_id][1].append(request)
            return
        match kind:
            case "quit":
                self._quit = True
            case "start":
                self._start(request)
            case _ if self._epochs.get(session_id) != request.epoch:
                pass  # a later epoch has replaced the stream, which must not change or stop it
            case "append":
                self._engine.append(session_id, request.append)
            case "cancel":
                self._engine.cancel(session_id, request.cancel)
            case "update":
                self._engine.update(session_id, request.update)
            case "draft":
                self._engine.set_draft_release(session_id, request.draft.release)
            case "stop":
                del self._epochs[session_id]
                self._engine.stop(session_id)

    def _start(self, request: pb.EngineRequest) -> None:
        start, grammars = request.start, self._engine.grammars
        grammar = _grammar_of(request)
        if grammar and grammars is not None and not (grammars.knows(grammar) and self._engine.ready_for(grammar)):
            # Steps go on meanwhile, and the session's further requests wait behind this one.
            compiled = self._compiler.submit(grammars.compile, grammar)
            self._compiling[request.session_id] = (compiled, [request])
            return
        self._engine.start(
            request.session_id,
            start.attach,
            limits_of(start.limits),
            start.directive,
            start.salt,
            start.draft_release,
            start.record,
        )
        self._epochs[request.session_id] = request.epoch

    def _stats(self) -> pb.EngineEvent:
        self._stats_due = time.monotonic() + STATS_INTERVAL_S
        stats = self._engine.stats()
        stats.unrecorded += self._unrecorded
        return pb.EngineEvent(stats=stats)


def _failed(request: pb.EngineRequest, error: BaseException) -> pb.EngineEvent:
    """Return the event of an error that a request has met; one that is not ours is logged."""
    if not isinstance(error, OutriderError):
        with about(session=request.session_id):
            log.error("a request of session %s failed", short_id(request.session_id), exc_info=error)
        error = InternalError(f"the engine failed on a request: {type(error).__name__}")
    return failure_event(error, request.session_id, request.epoch)


def _event(event: Event) -> pb.EngineEvent:
    match event:
        case Committed(session_id, commit):
            return pb.EngineEvent(session_id=session_id, epoch=commit.epoch, commit=commit)
        case Failed(session_id, epoch, error):
            return failure_event(error, session_id, epoch)


def _grammar_of(request: pb.EngineRequest) -> str:
    """Return the grammar of a start; "" if it has none."""
    return request.start.attach.sampling.grammar


def send_progress(end: EngineEnd, text: str) -> None:
    """Tell the front how far the target's loading has come."""
    end.send([pb.EngineEvent(progress=pb.EngineProgress(text=text))])


def engine_config(config: VerifierConfig) -> EngineConfig:
    """Return the part of a verifier's settings that is the engine's."""
    return EngineConfig(
        kv_slots=config.kv_slots,
        max_sessions=config.max_sessions,
        token_budget=config.engine_args.token_budget,
        prefix_cache=config.engine_args.prefix_cache,
        allow_lossy_rules=config.engine_args.allow_lossy_rules,
    )


def serve_target(
    config: VerifierConfig,
    end: EngineEnd,
    executor: TargetExecutor,
    sources: Sequence[ServerSource],
    target: session_pb2.TargetIdentity,
) -> None:
    """Tell the front that a target is ready, and serve it until the front closes its end or sends Quit.

    target: the front adds the tokenizer's hash.
    """
    capabilities, ends = executor.capabilities, executor.eos_token_ids
    send_progress(end, describe(executor.cost))
    send_progress(end, str(capabilities))
    grammars = None
    try:
        grammars = grammars_of(config.model / "tokenizer.json", capabilities.vocabulary, ends)
    except ModelRefused as error:
        log.warning("requests with a grammar, as for JSON or tools, are refused: %s", error)
    engine = Engine(executor, engine_config(config), overlay=Overlay(sources), grammars=grammars)
    ready = pb.EngineReady(
        target=target,
        vocabulary_size=capabilities.vocabulary,
        eos_token_ids=ends,
        max_sequence=longest_session(LIMITS, executor),
        chains_only=not capabilities.trees,
    )
    gc.collect()
    gc.freeze()  # looking through what was loaded would delay steps
    end.send([pb.EngineEvent(ready=ready)])
    threading.Thread(target=tell_alive, args=(end, engine), name="alive", daemon=True).start()
    EngineLoop(engine, end).run()


def tell_alive(end: EngineEnd, engine: Engine) -> None:
    """Tell the front, until it has gone, that this process runs, and how long a step may keep the loop from speaking:
    a long step is no reason to leave the verifier, one that hangs is."""
    with contextlib.suppress(OSError):  # also of a socket that this process has closed, as it ends
        while not end.closed:
            end.send([pb.EngineEvent(alive=pb.Alive(expected_s=engine.expected_s))])
            time.sleep(ALIVE_INTERVAL_S)
