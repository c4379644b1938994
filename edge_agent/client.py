"""The SDK: `AsyncClient` turns a prompt into the target's text, drafting on this device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import weakref
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from pydantic import ValidationError

from edge_agent.artifacts import ArtifactCache
from edge_agent.channels import Channels
from edge_agent.checks import label, refuse, text
from edge_agent.completion import (
    Chunk,
    Completion,
    FinishReason,
    Options,
    Request,
    check_ids,
    check_prompt,
    prompt_of,
)
from edge_agent.completion_stream import Chunks, CompletionStream
from edge_agent.config import EdgeSettings
from edge_agent.describe import Library
from edge_agent.drafts import DraftOptions
from edge_agent.driver import DriverOptions, SessionDriver
from edge_agent.failover import Backoff, DirectRoute, GrantRoute, Hop, Route
from edge_agent.kit import TargetKit, assemble
from edge_agent.placement import UNLIKE, Coordinator, Likeness, Placement
from edge_agent.statistics import Statistics
from edge_agent.template import Message, check_messages
from edge_agent.text import TextAssembler
from edge_agent.worker import DraftWorker
from outrider.core.errors import BadRequest, ModelRefused, OutriderError
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Finish
from outrider.wire.channels import ClientTls

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
_A = TypeVar("_A")

_CLOSE_S = 2.0
"""How long `close` waits for sessions to end."""
_FIRST_CONTACT_S = 3.5
"""How long a verifier that stands alone is looked for: its address is rather wrong than it just restarts."""

_REASONS: dict[Finish, FinishReason] = {
    Finish.EOS: "eos",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}


class AsyncClient:
    """A client of one cluster (`coordinator`) or of one verifier (`verifier`); both are "host:port".

    async with AsyncClient(verifier="127.0.0.1:7000") as client:
        completion = await client.generate("def add(a, b):", max_tokens=64)

    draft: "auto" fetches the one that the target offers, None is plain cloud streaming, "lookup" guesses from the text
    alone, else the path of a GGUF file. The model is loaded once and shared by the client's sessions. `reroute` maps a
    verifier's address to the one to dial instead, for tunnels and proxies. `traffic_class` names what is asked for,
    such as "code", where a request does not: a new session starts from what verifiers measured of those of the same
    draft and class. `settings` holds what has no argument. Every error is one of outrider.core.errors.
    """

    def __init__(
        self,
        *,
        coordinator: str | None = None,
        verifier: str | None = None,
        target: str | None = None,
        draft: str | Path | None = "auto",
        api_key: str | None = None,
        tls: ClientTls | None = None,
        insecure: bool | None = None,
        cache_dir: str | Path | None = None,
        reroute: Mapping[str, str] | None = None,
        traffic_class: str = "",
        settings: EdgeSettings | None = None,
    ) -> None:
        _check_arguments(coordinator, verifier, target, draft, cache_dir)
        self._settings = settings = settings or _from_environment()
        # An address given here stands for itself: the environment's other one would contradict it.
        given = coordinator is not None or verifier is not None
        self._coordinator_address = (coordinator or "") if given else settings.coordinator
        self._verifier_address = (verifier or "") if given else settings.verifier
        if bool(self._coordinator_address) == bool(self._verifier_address):
            raise BadRequest("give either coordinator or verifier, as HOST:PORT")
        self._target = settings.target if target is None else target
        self._draft = draft
        self._reroute = dict(reroute or {})
        self._traffic_class = label("traffic_class", traffic_class)
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self._api_key = _checked_key(key if api_key is None else api_key)
        if tls is None and (settings.tls or settings.tls_ca):
            tls = ClientTls(settings.tls_ca)
        self._tls = tls is not None
        self._channels = Channels(tls, insecure=settings.insecure if insecure is None else insecure)
        self._cache = ArtifactCache(Path(cache_dir or settings.cache_dir) / "artifacts")
        self._slots = asyncio.Semaphore(settings.max_sessions)
        self._preparing = asyncio.Lock()
        self._kit: TargetKit | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        """What `close` cancels: placing sessions, fetching and loading what the target needs."""
        self._closed = False
        self._streams: weakref.WeakSet[CompletionStream] = weakref.WeakSet()
        self._drivers: set[SessionDriver] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what still runs, free the draft, close the connections.

        Requests that have a place end as cancelled; those that wait for one, and later ones, raise BadRequest.
        """
        self._closed = True
        for driver in self._drivers:
            driver.cancel()
        for waiting in self._waiting:
            waiting.cancel()
        closing = [asyncio.ensure_future(stream.aclose()) for stream in self._streams]
        await _ended([*closing, *self._waiting])
        await _ended(self._background)
        if self._kit is not None:
            await self._kit.close()
            self._kit = None
        await self._channels.close()

    # --- what it is for

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole completion of a text or of token ids."""
        return await (await self.stream(prompt, **options)).drain()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> CompletionStream:
        """The completion in chunks, as the verifier commits them."""
        request, given = Request.of(**options), prompt_of(prompt)
        statistics = Statistics()
        kit = await self.prepare()
        ids = kit.tokenizer.encode_prompt(given) if isinstance(given, str) else given
        return self._start(kit, ids, request, statistics)

    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The assistant's answer to messages with `role` and `content`, in the target's own template."""
        return await (await self.stream_chat(messages, **options)).drain()

    async def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> CompletionStream:
        """The assistant's answer in chunks. Raises ModelRefused for a target without a chat template."""
        request, messages = Request.of(**options), check_messages(messages)
        statistics = Statistics()
        kit = await self.prepare()
        if kit.template is None:
            raise ModelRefused(f"the target {kit.description.target.name} has no chat template; use generate")
        tokenizer = kit.tokenizer
        # Off the event loop: a template is somebody else's program.
        ids = await asyncio.to_thread(
            kit.template.tokenise, messages, tokenizer.encode, tokenizer.encode_plain, tokenizer.controls
        )
        return self._start(kit, ids, request, statistics)

    async def prepare(self) -> TargetKit:
        """Fetch and load what the target needs, once; the first request does it otherwise."""
        async with self._preparing:
            self._check_open()
            if self._kit is None:
                return await self._unless_closed(self._assemble())
            return self._kit

    def _check_open(self) -> None:
        if self._closed:
            raise BadRequest("the client is closed; make another one")

    async def _unless_closed(self, work: Coroutine[Any, Any, _A]) -> _A:
        """What `work` returns. `close` cancels it; then BadRequest is raised."""
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():
                self._check_open()
            raise

    # --- one request

    def _start(self, kit: TargetKit, ids: Sequence[int], request: Request, statistics: Statistics) -> CompletionStream:
        """Nothing is asked of anybody before the first chunk is."""
        description = kit.description
        prompt = check_prompt(ids, request.max_tokens, description.vocabulary_size, description.max_sequence)
        check_ids("stop_token_ids", request.stop_token_ids, description.vocabulary_size)
        session = DeviceSession(
            prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            eos_token_ids=description.eos_token_ids,
            ignore_eos=request.ignore_eos,
        )
        stream = CompletionStream(
            self._run(kit, session, request, statistics),
            prompt_tokens=len(prompt),
            seed=request.sampling.seed,
            statistics=statistics,
        )
        self._streams.add(stream)
        return stream

    async def _run(
        self,
        kit: TargetKit,
        session: DeviceSession,
        request: Request,
        statistics: Statistics,
    ) -> Chunks:
        assembler = TextAssembler(kit.tokenizer.table, kit.tokenizer.special, request.stop)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._slots)
            self._check_open()
            placement = await self._unless_closed(self._place(len(session.prompt), self._like(kit, request)))
            if placement is not None:
                stack.callback(self._close_session, placement)
                if kit.drafts and placement.measured:
                    kit.drafts.expect(placement.measured)
            statistics.session_id = placement.grants.session_id if placement else secrets.token_hex(8)
            worker = await stack.enter_async_context(kit.drafts.borrow()) if kit.drafts else None
            self._check_open()
            statistics.draft = kit.drafts.name if kit.drafts and worker else ""
            driver = self._driver(kit, session, placement, worker, request, statistics)
            self._drivers.add(driver)
            stack.callback(self._drivers.discard, driver)
            stack.callback(self._keep_until_done, driver)
            deliveries = await stack.enter_async_context(contextlib.aclosing(driver.deliveries()))
            async for delivery in deliveries:
                piece = assembler.feed(delivery.tokens, last=bool(delivery.finish))
                chunk = Chunk(piece.text, delivery.tokens[: piece.tokens], delivery.drafted[: piece.tokens])
                reason: FinishReason | None = "stop" if piece.stopped else _REASONS.get(delivery.finish)
                yield chunk, reason
                if piece.stopped:
                    return

    def _driver(
        self,
        kit: TargetKit,
        session: DeviceSession,
        placement: Placement | None,
        worker: DraftWorker | None,
        request: Request,
        statistics: Statistics,
    ) -> SessionDriver:
        ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= frozenset(kit.description.eos_token_ids)
        options = DriverOptions(
            session_id=statistics.session_id,
            vocabulary_hash=kit.tokenizer.vocabulary_hash,
            vocabulary_size=kit.description.vocabulary_size,
            ends=ends,
            silence_s=self._settings.silence_s,
            siblings=self._settings.siblings,
        )
        route = self._route(placement, self._settings.resume_budget_s)
        return SessionDriver(session, route, self._dial, worker, options, statistics)

    # --- where to

    def _route(self, placement: Placement | None, budget_s: float) -> Route:
        backoff = Backoff(budget_s)
        if placement is None:
            return DirectRoute(self._verifier_address, backoff, tls=self._tls)
        session_id = placement.grants.session_id

        async def resume(ticket: bytes, failed: Sequence[str], last_epoch: int) -> Any:
            return await self._coordinator().resume(session_id, ticket, failed, last_epoch)

        return GrantRoute(placement.grants, resume, backoff)

    def _dial(self, hop: Hop) -> grpc.aio.Channel:
        return self._channels.get(self._reroute.get(hop.address, hop.address), tls=hop.tls)

    def _dial_bulk(self, hop: Hop) -> grpc.aio.Channel:
        """A connection of its own, for downloads."""
        return self._channels.get(self._reroute.get(hop.address, hop.address), tls=hop.tls, bulk=True)

    def _coordinator(self) -> Coordinator:
        return Coordinator(self._channels.get(self._coordinator_address, tls=self._tls), self._api_key)

    def _like(self, kit: TargetKit, request: Request) -> Likeness:
        return Likeness(kit.drafts.release if kit.drafts else "", request.traffic_class or self._traffic_class)

    async def _place(self, prompt_tokens: int = 0, like: Likeness = UNLIKE) -> Placement | None:
        """A session at the coordinator; None without one."""
        if not self._coordinator_address:
            return None
        patience_s = self._settings.resume_budget_s
        return await self._coordinator().open(self._target, prompt_tokens, patience_s=patience_s, like=like)

    def _close_session(self, placement: Placement) -> None:
        ticket = placement.grants.grants[0].ticket if placement.grants.grants else b""
        self._in_background(self._coordinator().close(placement.grants.session_id, ticket))

    # --- the target's kit

    async def _assemble(self) -> TargetKit:
        """Everything for the target, from the verifiers that a session would attach to."""
        budget_s = self._settings.resume_budget_s
        placement = await self._place()
        if placement is None:
            budget_s = min(budget_s, _FIRST_CONTACT_S)
        try:
            library = Library(self._route(placement, budget_s), self._dial_bulk)
            self._kit = kit = await assemble(library, self._cache, self._draft, self._draft_options())
        finally:
            if placement is not None:
                self._close_session(placement)
        return kit

    def _draft_options(self) -> DraftOptions:
        settings = self._settings
        return DraftOptions(
            workers=settings.draft_workers,
            threads=settings.draft_threads,
            cpu_share=settings.cpu_share,
            context=settings.draft_context,
            prompt_lookup=settings.prompt_lookup,
        )

    # --- what outlives a request

    def _keep_until_done(self, driver: SessionDriver) -> None:
        if driver.winding_down is not None:
            self._keep(driver.winding_down)

    def _in_background(self, work: Awaitable[None]) -> None:
        async def quietly() -> None:
            try:
                await work
            except OutriderError as error:
                log.info("closing a session: %s", error)

        self._keep(asyncio.ensure_future(quietly()))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _check_arguments(coordinator: object, verifier: object, target: object, draft: object, cache_dir: object) -> None:
    """Raises BadRequest for one of a wrong type."""
    for field, value in {"coordinator": coordinator, "verifier": verifier, "target": target}.items():
        if value is not None:
            text(field, value)
    for field, value in {"draft": draft, "cache_dir": cache_dir}.items():
        if not isinstance(value, str | os.PathLike | None):
            refuse(field, value, "a text or a path")


def _checked_key(key: object) -> str | None:
    """Raises BadRequest, without the key, for one that no header can carry."""
    if key is None or (isinstance(key, str) and key.isascii() and key.isprintable()):
        return key
    raise BadRequest("api_key must be a text of printable ASCII characters alone", field="api_key")


def _from_environment() -> EdgeSettings:
    """Raises BadRequest for a variable with a wrong value."""
    try:
        return EdgeSettings()
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        variable = f"{EdgeSettings.model_config['env_prefix']}{field}".upper()
        raise BadRequest(f"{variable} is {first['input']!r}: {first['msg']}", field=field) from error


async def _ended(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Let them end by themselves for a while, then cancel them."""
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in pending:
            task.cancel()
