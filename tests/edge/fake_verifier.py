"""Fake a verifier without a model: a real grpc.aio server around the session protocol and a scripted target."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from ports import unused_port
from session_messages import directive
from single_walk import verify

from outrider.core.errors import Fenced, NotFound, OutriderError, Unavailable, VocabularyMismatch
from outrider.core.protocol.messages import (
    Commit,
    Directive,
    Finish,
    Open,
    Opened,
    SessionLimits,
    TokenLogprobs,
    pack_logprobs,
)
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.verification import tree_batch_of
from outrider.core.vocabulary import token_table, vocabulary_hash
from outrider.wire import checks
from outrider.wire.channels import bind, server
from outrider.wire.status import abort
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc

Target = Callable[[Sequence[int]], int]
"""A function: the whole sequence so far, prompt included -> the target's next token."""


@dataclass
class Script:
    """Set how a fake verifier behaves; it may be changed while it runs."""

    target: Target
    step_s: float = 0.002
    limits: SessionLimits = field(default_factory=SessionLimits)
    directive: Directive = field(default_factory=lambda: directive(draft_wait_ms=8, step_ms=2.0))
    eos_token_ids: tuple[int, ...] = ()
    rtt_ms: float = 0.0
    """Round trip in its pings."""
    ping_s: float = 0.1
    engine_quiet_ms: int = 0
    """What its pings tell of the engine."""
    deaf: bool = False
    """Tell that no answer to a ping has come."""
    vocabulary_size: int = 4096
    tokenizer_json: bytes = b""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Artifacts by role, beside the tokenizer."""
    chunk_bytes: int = 1000
    break_after: int = 0
    """End artifact streams after so many chunks, once."""
    freeze_after: int = 0
    """Hang after so many chunks."""
    max_sequence: int = 8192
    refuse: OutriderError | None = None
    """The answer to Open."""


class FakeVerifier:
    """Serve sessions as scripted. Use it as an async context manager; `address` is where it listens."""

    def __init__(self, script: Script, verifier_id: str = "fake") -> None:
        self.script = script
        self.verifier_id = verifier_id
        self.address = ""
        self.live: dict[str, VerifierSession] = {}
        self.opens: list[Open] = []
        self.metadata: list[dict[str, Any]] = []
        """Metadata of each stream's call."""
        self.in_use: list[tuple[str, int, str]] = []
        """(session, tokens committed by then, release) of each DraftInUse"""
        self.said: list[tuple[int, str]] = []
        """(epoch, kind) of every message of devices, in their order"""
        self.fetches: list[tuple[str, int]] = []
        self.frozen = False
        self._kept: dict[str, tuple[int, list[int]]] = {}
        self._streams: set[_Live] = set()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeVerifier:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self, address: str = "") -> None:
        """Listen at a port that stays this verifier's own while it is dead."""
        self._server = server()
        session_pb2_grpc.add_VerifierServicer_to_server(_Servicer(self), self._server)
        self.address = f"127.0.0.1:{bind(self._server, address or f'127.0.0.1:{unused_port()}')}"
        await self._server.start()

    async def kill(self) -> None:
        """Act as after kill -9: every stream breaks, and nothing listens any more."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def drop_streams(self, error: OutriderError | None = None) -> None:
        """Break every stream, but continue to listen."""
        for live in self._streams:
            live.fail(error or Unavailable("the stream was dropped"))

    def freeze(self) -> None:
        """Act as after SIGSTOP: connections stay, and nothing is sent."""
        self.frozen = True

    # --- what the streams share

    def take(self, opening: Open) -> VerifierSession:
        epoch, kept = self._kept.get(opening.session_id, (0, []))
        if opening.attach.epoch <= epoch:
            raise Fenced(f"epoch is {opening.attach.epoch}, must be greater than {epoch}")
        session = VerifierSession(
            opening.attach, self.script.limits, eos_token_ids=self.script.eos_token_ids, kept=kept
        )
        self._kept[opening.session_id] = (opening.attach.epoch, session.committed)
        self.live[opening.session_id] = session
        return session

    def artifact(self, content_hash: str) -> bytes:
        for data in (self.script.tokenizer_json, *self.script.artifacts.values()):
            if data and hash_of(data) == content_hash:
                return data
        raise NotFound(f"no artifact {content_hash}")


class _Live:
    """Run one stream of a session as the script says."""

    def __init__(self, verifier: FakeVerifier, opening: Open, session: VerifierSession) -> None:
        self.verifier = verifier
        self.session = session
        self.opening = opening
        self.out: asyncio.Queue[pb.ServerMessage | OutriderError | None] = asyncio.Queue()
        self.news = asyncio.Event()
        self.last_commit = time.monotonic()
        self.heard = 0

    def fail(self, error: OutriderError) -> None:
        self.out.put_nowait(error)

    async def read(self, requests: AsyncIterator[pb.ClientMessage]) -> None:
        try:
            async for message in requests:
                self.verifier.said.append((self.session.epoch, str(message.WhichOneof("kind"))))
                match message.WhichOneof("kind"):
                    case "append":
                        vocabulary_size = self.verifier.script.vocabulary_size
                        checks.check_append(message.append, vocabulary_size=vocabulary_size)
                        self.session.append(message.append)
                        self.news.set()
                    case "cancel":
                        commit = self.session.cancel(message.cancel)
                        if commit is not None:
                            self.commit(commit)
                    case "pong":
                        self.heard = message.pong.nonce
                    case "draft":
                        said = (self.opening.session_id, len(self.session.committed), message.draft.release)
                        self.verifier.in_use.append(said)
            self.out.put_nowait(None)
        except OutriderError as error:
            self.fail(error)

    async def step(self) -> None:
        if commit := self.session.resend():
            self.commit(commit)
        await self._score()
        while self.session.finish is Finish.NONE:
            await self._until_due()
            script = self.verifier.script
            batch = tree_batch_of(
                self.session.tree, [node.id for node in self.session.tree][: script.directive.nodes_per_step]
            )
            await asyncio.sleep(script.step_s)
            if self.session.finish is not Finish.NONE:
                return
            before = [*self.session.attach.prompt, *self.session.committed]
            paths: dict[int, list[int]] = {0: []}
            for row, (parent, token) in enumerate(zip(batch.parents, batch.tokens, strict=True), start=1):
                paths[row] = [*paths[parent], token]
            verified = verify(batch, lambda row, _: script.target([*before, *paths[row]]), self.session.ends)  # noqa: B023
            self.last_commit = time.monotonic()
            commit = self.session.commit(batch, verified)
            if (top := self.session.logprobs) is not None:
                positions = enumerate(commit.token, start=commit.start)
                pack_logprobs(commit, [logprobs_of(at, token, top) for at, token in positions])
            self.commit(commit)

    async def _score(self) -> None:
        """Score the prompt, a few tokens in each step."""
        attach = self.session.attach
        while self.session.scoring and self.session.finish is Finish.NONE:
            await asyncio.sleep(self.verifier.script.step_s)
            first = self.session.scored + 1
            tokens = enumerate(attach.prompt[first : first + 7], start=first)
            for commit in self.session.score([logprobs_of(at, token, attach.prompt_logprobs) for at, token in tokens]):
                self.commit(commit)

    async def _until_due(self) -> None:
        """Wait for nodes, an idle device, or the end of the draft wait; never return while frozen or too far ahead."""
        while True:
            self.news.clear()
            deadline = self.last_commit + self.verifier.script.directive.draft_wait_ms / 1000
            waits = self.verifier.script.directive.nodes_per_step > 0 and time.monotonic() < deadline
            waiting = waits and not len(self.session.tree) and not self.session.idle
            if self.session.may_step and not waiting and not self.verifier.frozen:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                    await self.news.wait()

    async def ping(self) -> None:
        nonce = 0
        while True:
            await asyncio.sleep(self.verifier.script.ping_s)
            nonce += 1
            script = self.verifier.script
            heard = 0 if script.deaf else self.heard
            told = pb.Ping(nonce=nonce, rtt_ms=script.rtt_ms, heard=heard, engine_quiet_ms=script.engine_quiet_ms)
            self.send(pb.ServerMessage(ping=told))

    def commit(self, commit: Commit) -> None:
        self.send(pb.ServerMessage(commit=commit))
        if commit.finish != Finish.NONE:
            self.out.put_nowait(None)

    def send(self, message: pb.ServerMessage) -> None:
        if not self.verifier.frozen:
            self.out.put_nowait(message)


class _Servicer(session_pb2_grpc.VerifierServicer):
    def __init__(self, verifier: FakeVerifier) -> None:
        self._verifier = verifier

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await self._thaw()
        script = self._verifier.script
        table = token_table(script.tokenizer_json) if script.tokenizer_json else []
        data = {"tokenizer": script.tokenizer_json, **script.artifacts}
        return pb.DescribeResponse(
            verifier_id=self._verifier.verifier_id,
            target=pb.TargetIdentity(
                name="fake", weights_hash="w", tokenizer_hash=f"sha256:{vocabulary_hash(table).hex()}"
            ),
            artifacts=[pb.Artifact(role=r, name=f"{r}.bin", hash=hash_of(d), size=len(d)) for r, d in data.items()],
            vocabulary_size=script.vocabulary_size,
            eos_token_ids=script.eos_token_ids,
            max_sequence=script.max_sequence,
        )

    async def FetchArtifact(self, request: pb.FetchArtifactRequest, context: Any) -> AsyncIterator[pb.ArtifactChunk]:
        script = self._verifier.script
        self._verifier.fetches.append((request.hash, request.offset))
        try:
            data = self._verifier.artifact(request.hash)[request.offset :]
            for sent, at in enumerate(range(0, len(data), script.chunk_bytes), start=1):
                await self._thaw()
                yield pb.ArtifactChunk(data=data[at : at + script.chunk_bytes])
                if sent == script.break_after:
                    script.break_after = 0
                    raise Unavailable("the download broke off")
                if sent == script.freeze_after:
                    self._verifier.freeze()
        except OutriderError as error:
            await abort(context, error)

    async def Session(self, requests: AsyncIterator[pb.ClientMessage], context: Any) -> AsyncIterator[pb.ServerMessage]:
        verifier, script = self._verifier, self._verifier.script
        live: _Live | None = None
        tasks: list[asyncio.Task[None]] = []
        verifier.metadata.append(dict(context.invocation_metadata()))
        try:
            first = await anext(requests)
            opening = first.open
            checks.check_open(opening, vocabulary_size=script.vocabulary_size)
            verifier.opens.append(opening)
            self._admit(opening)
            live = _Live(verifier, opening, verifier.take(opening))
            verifier._streams.add(live)
            tasks = [asyncio.create_task(work) for work in (live.read(requests), live.step(), live.ping())]
            opened = Opened(
                epoch=opening.attach.epoch,
                verifier_id=verifier.verifier_id,
                limits=script.limits.message,
                directive=script.directive,
                vocabulary_size=script.vocabulary_size,
            )
            await self._thaw()
            yield pb.ServerMessage(opened=opened)
            while (message := await live.out.get()) is not None:
                if isinstance(message, OutriderError):
                    raise message
                yield message
        except OutriderError as error:
            await abort(context, error)
        finally:
            for task in tasks:
                task.cancel()
            if live is not None:
                verifier._streams.discard(live)
                if verifier.live.get(live.opening.session_id) is live.session:
                    del verifier.live[live.opening.session_id]

    async def _thaw(self) -> None:
        if self._verifier.frozen:
            await asyncio.sleep(3600)

    def _admit(self, opening: Open) -> None:
        script = self._verifier.script
        if script.refuse is not None:
            raise script.refuse
        if opening.vocabulary_hash and script.tokenizer_json:
            ours = vocabulary_hash(token_table(script.tokenizer_json))
            if opening.vocabulary_hash != ours:
                raise VocabularyMismatch("another token table")


def logprobs_of(position: int, token: int, top: int) -> TokenLogprobs:
    """Return a fake target's log-probabilities of a token: powers of two, which any float keeps."""
    return TokenLogprobs(-(2.0 ** -(position % 8)), tuple((token + i, -(2.0**i)) for i in range(top)))


def hash_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def until_free(verifier: FakeVerifier) -> None:
    """Wait until no session is live; fail if they do not end."""
    await _until(lambda: not verifier.live, "the session was not cancelled")


async def until_live(verifier: FakeVerifier) -> None:
    """Wait until a session is live; fail if none begins."""
    await _until(lambda: bool(verifier.live), "no session was begun")


async def _until(true: Callable[[], bool], otherwise: str) -> None:
    for _ in range(6_000):
        if true():
            return
        await asyncio.sleep(0.01)
    pytest.fail(otherwise)
