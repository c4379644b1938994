"""The gRPC front: admits streams, validates what they say, and passes it between device and engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.counters import GONE, FrontCounters, kind_of
from cloud_verifier.front.session_grant import Terms
from cloud_verifier.front.session_stream import Requests, SessionStream
from cloud_verifier.traffic.codec import Source
from cloud_verifier.traffic.passage import NO_PROMPT
from cloud_verifier.traffic.passage_builder import HELD
from cloud_verifier.traffic.recorder import Recorder
from outrider.core.errors import (
    BadRequest,
    Draining,
    Killed,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    Unavailable,
    VocabularyMismatch,
)
from outrider.core.protocol.messages import Directive
from outrider.telemetry import logs, traces
from outrider.wire import codecs
from outrider.wire.status import abort, aborting
from outrider.wire.ticket import Claims
from outrider.wire.v1 import engine_pb2, session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Authorise = Callable[[bytes], Awaitable[Claims | None]]
"""Ticket -> what it allows; None where this verifier serves without tickets. Raises Unauthenticated."""

FINISHES = {
    session_pb2.FINISH_EOS: "eos",
    session_pb2.FINISH_LENGTH: "length",
    session_pb2.FINISH_CANCELLED: "cancelled",
}
RETRY_FULL_S = 1.0
"""When a device may ask again that was refused because every place is taken."""


class VerifierService(session_pb2_grpc.VerifierServicer):
    """Translates; the engine decides about tokens, `authorise` about who may come in."""

    def __init__(
        self,
        config: VerifierConfig,
        host: EngineHost,
        ready: engine_pb2.EngineReady,
        catalogue: Catalogue,
        *,
        verifier_id: str,
        vocabulary_hash: bytes,
        authorise: Authorise,
        newcomer: Callable[[], None] = lambda: None,
        recorder: Recorder | None = None,
        counters: FrontCounters | None = None,
    ) -> None:
        """newcomer: called when it shows how far away a new session's device is.

        recorder: told of the sessions that may be recorded; without one nothing is.
        """
        self._config = config
        self.counters = counters or FrontCounters()
        self._recorder = recorder
        self._newcomer = newcomer
        self._host = host
        self._ready = ready
        self._catalogue = catalogue
        self._verifier_id = verifier_id
        self._vocabulary_hash = vocabulary_hash
        self._authorise = authorise
        self._downloads = 0
        self._left = asyncio.Event()
        """Set when a session leaves."""
        self.draining = False
        self._streams: dict[str, SessionStream] = {}
        """By session id: live ones."""
        self.tenants: dict[str, str] = {}
        """session id -> tenant, of live streams"""
        self.rtt_ms: dict[str, float] = {}
        """session id -> round trip measured by ping, of live streams"""
        self._releases = 0
        """Serial of the draft releases that are to be had, as the coordinator last told it; 0 where there are none."""

    async def Describe(self, request: session_pb2.DescribeRequest, context: Context) -> session_pb2.DescribeResponse:
        return session_pb2.DescribeResponse(
            verifier_id=self._verifier_id,
            target=self._ready.target,
            artifacts=[artifact.to_proto() for artifact in self._catalogue],
            vocabulary_size=self._ready.vocabulary_size,
            eos_token_ids=self._ready.eos_token_ids,
            max_sequence=self._ready.max_sequence,
        )

    async def FetchArtifact(self, request: session_pb2.FetchArtifactRequest, context: Context) -> None:
        """Writes its answer itself: a generator would learn of a cancelled call only when it is collected."""
        limit_s = self._config.fetch_timeout_s
        end = time.monotonic() + limit_s
        async with aborting(context):
            if self._downloads >= self._config.max_downloads:
                raise Overloaded(f"all {self._config.max_downloads} downloads are taken", retry_after_s=1.0)
            self._downloads += 1
            try:
                for data in self._catalogue.read(request.hash, request.offset):
                    if time.monotonic() > end:
                        raise Unavailable(f"the download has taken {limit_s} s; fetch the rest from its offset")
                    await context.write(session_pb2.ArtifactChunk(data=data))
            finally:
                self._downloads -= 1

    async def Session(self, requests: Requests, context: Context) -> AsyncGenerator[session_pb2.ServerMessage, None]:
        stream: SessionStream | None = None
        watching: asyncio.Task[None] | None = None
        failure: Exception | None = None
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(request=logs.given_request(metadata))
        span = traces.begin("outrider.verifier.session", metadata)
        try:
            opening, terms = await self._admit(requests)
            logs.note(session=opening.session_id)
            stream = SessionStream(self._host, self._config, opening, terms, self._ready.vocabulary_size, self.counters)
            stream.begin(self._salt(terms.tenant, opening.session_id), record=self._may_record(terms))
            self._count_in(opening)
            self._record(stream, opening)
            self.tenants[opening.session_id] = terms.tenant
            self._streams[opening.session_id] = stream
            stream.announce(self._releases)  # how old what its device knows is, nobody can tell
            watching = asyncio.create_task(self._leave_when_silent(stream))
            yield self._opened(stream)
            leave = functools.partial(self._leave, stream)
            async with contextlib.aclosing(stream.messages(requests, self._note_rtt, leave)) as messages:
                async for message in messages:
                    yield message
        except DecodeError:
            failure = BadRequest("a message on the stream cannot be parsed, must be a ClientMessage")
            await abort(context, failure)
        except Exception as error:
            failure = error
            await abort(context, error)
        finally:
            self._count_out(stream, failure)
            _close(span, stream, failure)
            if watching is not None:
                watching.cancel()
            if stream is not None:
                self._leave(stream)

    def steer(self, session_id: str, epoch: int, directive: Directive) -> None:
        """The session shall speculate so far, if it is still here in this epoch."""
        stream = self._streams.get(session_id)
        if stream is not None and stream.epoch == epoch:
            stream.steer(directive)

    def kill(self, session_id: str) -> bool:
        """An operator has ended the session: what is due to it goes first, its place is free at once. Whether it was
        here."""
        stream = self._streams.get(session_id)
        if stream is None:
            return False
        log.info("session %s is ended by an operator", session_id)
        stream.fail(Killed("an operator has ended the session; it is not to be resumed"))
        self._leave(stream)
        return True

    def announce(self, serial: int) -> None:
        """Draft releases are to be had up to this serial: devices that have not heard of it are told once."""
        if serial != self._releases:
            self._releases = serial
            for stream in self._streams.values():
                stream.announce(serial)

    def traffic_class(self, session_id: str) -> str:
        """By its ticket; empty for one that is not here."""
        stream = self._streams.get(session_id)
        return stream.terms.traffic_class if stream else ""

    async def finished(self) -> None:
        """Wait until no session is live."""
        while self.tenants:
            self._left.clear()
            await self._left.wait()

    def hand_over(self) -> None:
        """End every live stream with what sends its device to its standby at once; what was committed goes first."""
        if self.tenants:
            log.info("handing %d live sessions over to other verifiers", len(self.tenants))
        self._host.give_up(Draining("this verifier is draining; resume on another verifier"))

    async def _leave_when_silent(self, stream: SessionStream) -> None:
        """A device that reads nothing holds up its stream, check for silence and all; its place is given back still."""
        await stream.silence()
        self._leave(stream)

    def _count_in(self, opening: codecs.Open) -> None:
        self.counters.opened += 1
        self.counters.resumed += bool(opening.attach.tokens)

    def _count_out(self, stream: SessionStream | None, failure: Exception | None) -> None:
        """How a stream ended: with its sequence, with an error, or since its device has gone."""
        how = kind_of(failure) if failure is not None else GONE
        if stream is not None and stream.finish != session_pb2.FINISH_NONE:
            how = FINISHES[stream.finish]
        elif failure is not None and not (stream and stream.tokens):
            self.counters.refused[how] += 1
            log.debug("stream refused: %s", how)
            return
        if stream is not None:
            self.counters.ended[how] += 1
            log.info("stream of epoch %d ended: %s", stream.epoch, how)

    def _may_record(self, terms: Terms) -> bool:
        """Both its tenant and whoever runs this verifier must want it."""
        return self._recorder is not None and terms.keep_s > 0.0

    def _record(self, stream: SessionStream, opening: codecs.Open) -> None:
        if self._recorder is None or not stream.recorded:
            return
        terms = stream.terms
        source = Source(
            session_id=stream.session_id,
            tenant=terms.tenant,
            traffic_class=terms.traffic_class,
            weights_hash=self._ready.target.weights_hash,
            temperature=opening.attach.sampling.temperature,
            keep_s=terms.keep_s,
            prompt=self._kept_prompt(opening) if terms.keep_prompts else NO_PROMPT,
        )
        self._recorder.begin(source, stream.epoch)

    def _kept_prompt(self, opening: codecs.Open) -> NDArray[np.int32]:
        """Its end, and before that what a redaction hook is to see; else it would see what spans the cut by half."""
        prompt = opening.attach.prompt
        return np.array(prompt[max(0, len(prompt) - self._config.traffic_prompt_tokens - HELD) :], np.int32)

    def _leave(self, stream: SessionStream) -> None:
        if self._recorder is not None and stream.recorded:
            self._recorder.end(stream.session_id, stream.epoch)
        if stream.close():
            self.tenants.pop(stream.session_id, None)
            self._streams.pop(stream.session_id, None)
            self._left.set()
            self.rtt_ms.pop(stream.session_id, None)

    async def _admit(self, requests: Requests) -> tuple[codecs.Open, Terms]:
        """The first message, allowed by its ticket."""
        self._refuse_while_draining()
        try:
            first = await asyncio.wait_for(anext(requests), self._config.open_timeout_s)
        except TimeoutError:
            raise BadRequest(f"no Open came within {self._config.open_timeout_s} s of the stream's begin") from None
        except StopAsyncIteration:
            raise BadRequest("the stream ended before its Open") from None
        if first.WhichOneof("kind") != "open":
            raise ProtocolViolation(f"the first message is {first.WhichOneof('kind')}, must be open", field="kind")
        # A stranger is turned away before a long prompt is gone through.
        claims = await self._authorise(first.open.ticket)
        self._refuse_while_draining()  # the drain may have begun since
        self._refuse_when_full(first.open.session_id)
        opening = codecs.open_from_proto(first.open, vocabulary_size=self._ready.vocabulary_size)
        if opening.vocabulary_hash and opening.vocabulary_hash != self._vocabulary_hash:
            raise VocabularyMismatch(
                f"open.vocabulary_hash is {opening.vocabulary_hash.hex()[:16]}, must be"
                f" {self._vocabulary_hash.hex()[:16]}, the target's; fetch its tokenizer again"
            )
        if claims is None:
            return opening, Terms(self._config.limits)
        if claims.session_id != opening.session_id:
            raise PermissionDenied(f"the ticket is for another session than {opening.session_id!r}")
        served = self._ready.target.weights_hash, self._ready.target.tokenizer_hash
        if claims.target.weights != served:
            raise PermissionDenied(
                f"the ticket's target has weights and tokenizer {' and '.join(claims.target.weights)}, this verifier"
                f" serves {' and '.join(served)}; ask the coordinator for another"
            )
        if not claims.owns(opening.attach.epoch):
            raise PermissionDenied(
                f"attach.epoch is {opening.attach.epoch}, must be between {claims.epoch_first} and"
                f" {claims.epoch_last}, the ticket's; resume at the coordinator for more"
            )
        return opening, Terms.of(claims)

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise Draining("this verifier is draining and takes no new sessions; ask the coordinator for another")

    def _refuse_when_full(self, session_id: str) -> None:
        """A later epoch of a live session takes its own place over. Raises Overloaded."""
        bound = self._config.max_sessions
        if session_id not in self.tenants and len(self.tenants) >= bound:
            raise Overloaded(
                f"all {bound} sessions of this verifier are taken; try again, or ask the coordinator for another",
                retry_after_s=RETRY_FULL_S,
            )

    def _opened(self, stream: SessionStream) -> session_pb2.ServerMessage:
        return session_pb2.ServerMessage(
            opened=codecs.opened_to_proto(
                codecs.Opened(
                    epoch=stream.epoch,
                    verifier_id=self._verifier_id,
                    limits=stream.limits,
                    directive=stream.directive(),
                    vocabulary_size=self._ready.vocabulary_size,
                )
            )
        )

    def _salt(self, tenant: str, session_id: str) -> str:
        """Who shares a prefix cache: a tenant's sessions, as their tickets say. A stranger shares with nobody."""
        return session_id if self._config.open_to_all and not self._config.coordinator else tenant

    def _note_rtt(self, session_id: str, rtt_ms: float) -> None:
        if session_id not in self.tenants:
            return  # a late answer of a stream that was left stays without a trace
        if session_id not in self.rtt_ms:
            self._newcomer()
        self.rtt_ms[session_id] = rtt_ms


def _close(span: traces.Span, stream: SessionStream | None, failure: Exception | None) -> None:
    if stream is not None:
        span.note(session_id=stream.session_id, epoch=stream.epoch, tokens=stream.tokens)
    span.end(kind_of(failure) if failure is not None else "")
