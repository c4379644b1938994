"""Serve a verifier's gRPC methods: admit streams, and pass their messages between device and engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cloud_verifier.config import LIMITS, VerifierConfig
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.counters import DISCONNECTED, FINISHES, FrontCounters, kind_of
from cloud_verifier.front.live_sessions import LiveSessions
from cloud_verifier.front.session_stream import Requests, SessionStream
from outrider.core.errors import (
    BadRequest,
    OutriderError,
    PermissionDenied,
    ProtocolViolation,
    Unavailable,
    VocabularyMismatch,
)
from outrider.core.text import short_id
from outrider.telemetry import logs, traces
from outrider.wire.admission import Metadata, Shares
from outrider.wire.checks import check_open
from outrider.wire.status import abort, aborting
from outrider.wire.ticket import Claims, Target, ticket_of
from outrider.wire.v1 import engine_pb2, session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Authorise = Callable[[bytes], Awaitable[Claims | None]]
"""Ticket -> what it allows; None if this verifier serves without tickets. Raises Unauthenticated."""

OPEN_TIMEOUT_S = 10.0
"""Seconds after which a stream without a first message is ended."""
MAX_DOWNLOADS = 64
"""The most downloads at once."""
CHUNK_TIMEOUT_S = 10.0
"""Seconds in which a device must take a chunk of a download; one that does not read holds no download."""
RETRY_LOADING_S = 2.0
"""Seconds after which a device may ask again that was refused because the target is not loaded."""
PROGRESS_EVERY_S = 1.0
"""The least time between two log lines about the same phase of loading."""
REFUSAL_S = 0.1
"""Seconds before a stream without a valid ticket is ended: time for its client to have written its Open."""
ANONYMOUS_TENANT = "default"
"""The tenant of sessions without a ticket."""
MIN_OPENING = 256
"""Streams whose Open is awaited at once, at least; otherwise four times as many as there are places."""


class VerifierService(session_pb2_grpc.VerifierServicer):
    """Connects gRPC with the engine, which decides about tokens; `authorise` decides about sessions.

    Until the target is loaded it refuses calls with how far loading is.
    """

    def __init__(
        self,
        config: VerifierConfig,
        host: EngineHost,
        verifier_id: str,
        on_first_rtt: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `on_first_rtt` when the round trip to a new session's device is known."""
        self.counters = FrontCounters()
        self.live = LiveSessions(config)
        self.serving = False
        """Whether the target is loaded."""
        self._config = config
        self._on_first_rtt = on_first_rtt
        self._host = host
        host.on_progress = self.progress
        self._ready = engine_pb2.EngineReady()
        self._authorise: Authorise = self._refuse_loading
        self._phase, self._logged_at = "starting the engine", -math.inf
        self._verifier_id = verifier_id
        self._downloads = Shares(MAX_DOWNLOADS, "downloads at once")
        self._opening = Shares(max(MIN_OPENING, 4 * config.max_sessions), "streams that have sent no Open yet")
        """Each may hold a whole message."""

    def serve(
        self, ready: engine_pb2.EngineReady, catalogue: Catalogue, *, vocabulary_hash: bytes, authorise: Authorise
    ) -> None:
        """Take calls from now on, since the target is loaded."""
        self._ready, self._catalogue, self.serving = ready, catalogue, True
        self._target = Target(ready.target.name, ready.target.weights_hash, ready.target.tokenizer_hash)
        self._vocabulary_hash = vocabulary_hash
        self._authorise = authorise

    def progress(self, text: str) -> None:
        """Log a phase of loading at once, and its share, which follows a colon, now and then."""
        new = text.partition(":")[0] != self._phase.partition(":")[0]
        self._phase = text
        if new or time.monotonic() - self._logged_at >= PROGRESS_EVERY_S:
            self._logged_at = time.monotonic()
            log.info("%s", text)

    async def _refuse_loading(self, ticket: bytes) -> None:
        """Authorise nothing while the target loads. Raises Unavailable."""
        message = f"this verifier is still loading: {self._phase}; try again"
        raise Unavailable(message, retry_after_s=RETRY_LOADING_S)

    async def admit(self, method: str, metadata: Metadata) -> str | None:
        """Return the tenant of a call with one request, which may describe the target and fetch files; None without
        tickets. Raises Unavailable while the target loads, and what refuses the ticket."""
        claims = await self._authorise(ticket_of(metadata))
        return claims.tenant if claims and claims.api_key_id else None

    async def Describe(self, request: session_pb2.DescribeRequest, context: Context) -> session_pb2.DescribeResponse:
        return session_pb2.DescribeResponse(
            verifier_id=self._verifier_id,
            target=self._ready.target,
            artifacts=self._catalogue,
            vocabulary_size=self._ready.vocabulary_size,
            eos_token_ids=self._ready.eos_token_ids,
            max_sequence=self._ready.max_sequence,
        )

    async def FetchArtifact(self, request: session_pb2.FetchArtifactRequest, context: Context) -> None:
        """Write the artifact's chunks itself: a generator would learn of a cancelled call only when it is collected."""
        async with aborting(context):
            claims = await self._authorise(ticket_of(context.invocation_metadata() or ()))
            with contextlib.ExitStack() as held:
                held.enter_context(self._downloads.one(claims.tenant if claims else ANONYMOUS_TENANT))
                for data in self._catalogue.read(request.hash, request.offset):
                    await self._write(context, session_pb2.ArtifactChunk(data=data), on_late=held.close)

    async def _write(self, context: Context, chunk: session_pb2.ArtifactChunk, on_late: Callable[[], None]) -> None:
        """Write a chunk. Raises Unavailable if the device does not take it in time, CancelledError if it has gone.

        gRPC ends no call while a write is under way, so `on_late` frees what the call holds when the time is over.
        """
        writing = asyncio.ensure_future(context.write(chunk))
        try:
            in_time, _ = await asyncio.wait({writing}, timeout=CHUNK_TIMEOUT_S)
            if not in_time:
                on_late()
            await writing
        except grpc.aio.InternalError as error:  # "execute_batch" fails for a call that has ended, and for no other
            raise asyncio.CancelledError("the call has ended") from error
        finally:
            writing.cancel()
        if not in_time:
            raise Unavailable(f"no chunk was read for {CHUNK_TIMEOUT_S} s; fetch the rest from its offset")

    async def Session(self, requests: Requests, context: Context) -> None:
        """Admit a stream, and write what goes to the device until the session ends."""
        stream: SessionStream | None = None
        failure: Exception | None = None
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(request=logs.request_id_from(metadata))
        span = traces.begin("outrider.verifier.session", metadata)
        try:
            stream = self._begin(*await self._admit(requests, ticket_of(metadata)))
            await self._run(stream, requests, context)
        except grpc.aio.InternalError as error:  # as in `_write`
            raise asyncio.CancelledError("the call has ended") from error
        except Exception as error:
            failure = error
            await abort(context, error)
        finally:
            self._count_end(stream, failure)
            if stream is not None:
                span.note(session_id=short_id(stream.session_id), epoch=stream.epoch, tokens=stream.counters.tokens)
            span.end(kind_of(failure) if failure is not None else "")

    async def _run(self, stream: SessionStream, requests: Requests, context: Context) -> None:
        """Serve an admitted stream, and free its place in the end."""
        silence_watch = asyncio.create_task(self._release_when_silent(stream))
        try:
            await context.write(stream.opened(self._verifier_id))
            release = functools.partial(self.live.release, stream)
            await stream.run(requests, context.write, self._on_first_rtt, release)
        finally:
            silence_watch.cancel()
            self.live.release(stream)

    async def _release_when_silent(self, stream: SessionStream) -> None:
        """Free the place of a silent device, even if it reads nothing and so holds up its stream."""
        await stream.heartbeat.silence()
        self.live.release(stream)

    def _count_end(self, stream: SessionStream | None, failure: Exception | None) -> None:
        """Count how a stream ended: with its sequence, with an error, or because its device has gone."""
        how = kind_of(failure) if failure is not None else DISCONNECTED
        if stream is not None and stream.counters.finish != session_pb2.FINISH_NONE:
            how = FINISHES[stream.counters.finish]
        elif failure is not None and not (stream and stream.counters.tokens):
            self.counters.refused[how] += 1
            log.debug("stream refused: %s", how)
            return
        if stream is not None:
            self.counters.ended[how] += 1
            log.info("stream of epoch %d ended: %s%s", stream.epoch, how, " (lossy)" if stream.lossy else "")

    def _begin(self, attach: session_pb2.Attach, claims: Claims, record: bool) -> SessionStream:
        """Start an admitted session in the engine, and return its stream. Raises Fenced or Unavailable."""
        logs.note(session=claims.session_id)
        size, salt = self._ready.vocabulary_size, self._salt(claims)
        if self._ready.chains_only:
            claims = replace(claims, limits=replace(claims.limits, children=1))
        stream = SessionStream(self._host, self._config, attach, claims, size, self.counters, salt=salt, record=record)
        self.counters.opened += 1
        self.counters.resumed += bool(attach.tokens)
        if stream.lossy:
            log.info("stream of epoch %d is lossy: its acceptance rule is typical", stream.epoch)
        self.live.begun(stream)
        return stream

    async def _first(self, requests: Requests, ticket: bytes) -> tuple[session_pb2.ClientMessage, Claims | None]:
        """Return a stream's first message, and what the ticket allows; None if this verifier takes none. Raises
        OutriderError.

        Nothing is read before the ticket is checked, so that strangers fill no more than the stream's look-ahead.
        """
        with contextlib.ExitStack() as waiting:
            try:
                claims = await self._authorise(ticket)
                waiting.enter_context(self._opening.one(claims.tenant if claims else ANONYMOUS_TENANT))
            except OutriderError:
                # Of a stream that ends while its client writes, gRPC often loses the status (grpc/grpc#36066).
                await asyncio.sleep(REFUSAL_S)
                raise
            try:
                return await asyncio.wait_for(anext(requests), OPEN_TIMEOUT_S), claims
            except TimeoutError:
                # The device may have sent it, over a slow line or a broken one: it may try again.
                raise Unavailable(f"no Open came within {OPEN_TIMEOUT_S} s of the stream's begin") from None
            except StopAsyncIteration:
                raise BadRequest("the stream ended before its Open") from None
            except DecodeError:
                raise BadRequest("the first message cannot be parsed, must be a ClientMessage") from None

    async def _admit(self, requests: Requests, ticket: bytes) -> tuple[session_pb2.Attach, Claims, bool]:
        """Return the Attach, checked, what the ticket allows, and whether the session is recorded. Raises OutriderError
        to refuse the stream."""
        first, claims = await self._first(requests, ticket)
        if first.WhichOneof("kind") != "open":
            raise ProtocolViolation(f"the first message is {first.WhichOneof('kind')}, must be open", field="kind")
        # Not before Open, whose write would lose the status, as in `_first`.
        self.live.refuse_early(first.open.session_id)
        opening: session_pb2.Open = first.open
        check_open(opening, vocabulary_size=self._ready.vocabulary_size)
        if opening.vocabulary_hash and opening.vocabulary_hash != self._vocabulary_hash:
            raise VocabularyMismatch(
                f"open.vocabulary_hash is {opening.vocabulary_hash.hex()[:16]}, must be"
                f" {self._vocabulary_hash.hex()[:16]}, the target's; fetch its tokenizer again"
            )
        claims = claims or self._claims_without_ticket(opening)
        if claims.session_id != opening.session_id:
            raise PermissionDenied(f"the ticket is for another session than {short_id(opening.session_id)!r}")
        served = self._target.weights
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
        attach = opening.attach
        # Of a lossy session not all tokens are the target's own: no draft learns of them.
        record = self.live.recorder is not None and claims.keep_s > 0.0 and not attach.sampling.HasField("typical")
        self.live.admit(attach, claims, record=record)
        return attach, claims, record

    def _claims_without_ticket(self, opening: session_pb2.Open) -> Claims:
        """Return what a session may do on a verifier that takes no tickets: nothing of it may be recorded."""
        return Claims(
            session_id=opening.session_id,
            tenant=ANONYMOUS_TENANT,
            audience=self._verifier_id,
            epoch_first=opening.attach.epoch,
            epoch_last=opening.attach.epoch,
            expires_unix=math.inf,
            limits=LIMITS,
            target=self._target,
        )

    def _salt(self, claims: Claims) -> str:
        """Return what sessions must have in common to share cached prefixes: their tenant, by their tickets. Sessions
        without a ticket share with no other if strangers are served."""
        return claims.session_id if self._config.open_to_all and not self._config.coordinator else claims.tenant
