"""The SDK: `AsyncClient` turns a prompt into the target's text, drafting on this device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from edge_agent.config import EdgeSettings
from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.offline_generation import Deliveries
from edge_agent.drafting.pool import DraftPool
from edge_agent.metrics import EdgeMetrics
from edge_agent.releases.updater import ReleaseUpdater
from edge_agent.sdk.background_tasks import Tasks
from edge_agent.sdk.client_options import (
    addresses,
    check_arguments,
    checked_key,
    defaults,
    draft_options,
    update_plan,
)
from edge_agent.sdk.completion_stream import Chunks, CompletionStream
from edge_agent.sdk.generation import (
    chunks_of,
    driver_options,
    ids_of_chat,
    ids_of_text,
    search_budget_s,
    session_of,
    written_alone,
)
from edge_agent.sdk.loading import Preparation
from edge_agent.sdk.retry import AT_VERIFIERS, persistent, unless_unreachable
from edge_agent.sdk.timeout import DEFAULT_TIMEOUT, Deadline, Timeout
from edge_agent.sdk.types import DEFAULT_RETRIES, Completion, Offline, Options, Request, prompt_of
from edge_agent.session.channels import Channels
from edge_agent.session.coordinator_client import ANY_WORKLOAD, CoordinatorClient, Placement, Workload
from edge_agent.session.driver import SessionDriver
from edge_agent.session.failover import FIRST_CONTACT_S, AttachTarget, DirectRoute, GrantRoute, Route
from edge_agent.session.statistics import Statistics
from edge_agent.target.artifact_cache import ArtifactCache
from edge_agent.target.artifact_client import Library
from edge_agent.target.bundle import Books, TargetKit, assemble, own_draft
from edge_agent.target.chat_template import Message, check_messages
from edge_agent.target.description_cache import Memory, NoVerifier
from outrider.core.backoff import Backoff
from outrider.core.errors import Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.settings.layers import from_environment
from outrider.wire.channels import ClientTls

Prompt = str | Sequence[int]


class AsyncClient:
    """A client of one cluster or of one verifier, for code that awaits. An async context manager.

        import asyncio

        from edge_agent import AsyncClient


        async def main() -> None:
            async with AsyncClient(coordinator="127.0.0.1:7700") as client:
                completion = await client.generate("def add(a, b):", max_tokens=64)
                print(completion.text)
                async with await client.stream("def add(a, b):", max_tokens=64) as stream:
                    async for chunk in stream:
                        print(chunk.text, end="", flush=True)


        asyncio.run(main())

    Every error is an OutriderError. The draft is loaded once and shared by the client's sessions.

    coordinator, verifier: "host:port" of a cluster, or of one verifier instead.
    target: its name, where the cluster serves several.
    draft: "auto" fetches the one that the target offers, and keeps it up to date where `settings` name publishers to
    trust; None is plain cloud streaming, "lookup" guesses from the text alone, else the path of a GGUF file.
    api_key: the tenant's, for a coordinator that asks for one.
    tls: speak TLS, with whom to trust; None is plain text.
    insecure: allow plain text beyond loopback.
    cache_dir: where tokenizers and drafts are kept.
    reroute: a verifier's address -> the one to dial instead, for tunnels and proxies.
    settings: what has no argument; those of the environment where None.

    Each request may say otherwise of these:

    traffic_class: what is asked for, such as "code": a new session starts from what verifiers measured of those of the
    same draft and class.
    timeout: seconds in all, or a Timeout, with one until the first token; then TimedOut is raised. None: no end.
    retries: how often a request may begin again that failed before its first token; a later failure loses nothing, the
    session goes on elsewhere.
    offline: "draft_only" lets the draft model write alone where no verifier can be reached; each chunk and the
    completion then say `verified=False`. "raise" raises Unavailable.
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
        timeout: Timeout | float | None = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        offline: Offline = "raise",
        settings: EdgeSettings | None = None,
    ) -> None:
        check_arguments(coordinator, verifier, target, draft, cache_dir)
        self._settings = settings = settings or from_environment(EdgeSettings)
        self._coordinator_address, self._verifier_address = addresses(settings, coordinator, verifier)
        self._target = settings.target if target is None else target
        self._draft = draft
        self._reroute = dict(reroute or {})
        self._defaults = defaults(traffic_class, timeout, retries, offline)
        self._api_key = checked_key(settings, api_key)
        if tls is None and (settings.tls or settings.tls_ca):
            tls = ClientTls(settings.tls_ca)
        self._tls = tls is not None
        self._channels = Channels(tls, insecure=settings.insecure if insecure is None else insecure)
        cache = Path(cache_dir or settings.cache_dir)
        self._cache = ArtifactCache(cache / "artifacts")
        self._memory = Memory(cache / "targets", self._coordinator_address or self._verifier_address, self._target)
        self._options = draft_options(settings)
        plan = update_plan(settings, self._coordinator_address, draft, cache, tls)
        self.updates = (
            ReleaseUpdater(plan, lambda *asked: self._coordinator().offer_release(*asked)) if plan is not None else None
        )
        """What keeps the draft up to date; None where nothing does."""
        self.metrics = EdgeMetrics()
        self._slots = asyncio.Semaphore(settings.max_sessions)
        self._tasks = Tasks()
        self._preparation = Preparation(self._tasks)
        self._room: DraftManager | None = None
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
        self._tasks.closed = True
        for driver in self._drivers:
            driver.cancel()
        if self.updates is not None:
            await self.updates.close()
        await self._tasks.end([stream.aclose() for stream in self._streams])
        if self._room is not None:
            await self._room.close()
        elif self._preparation.kit is not None:
            await self._preparation.kit.close()
        self._preparation.kit = self._room = None
        await self._channels.close()

    # --- what it is for

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole completion of a text or of token ids. `options` are those of Options."""
        return await (await self.stream(prompt, **options)).drain()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> CompletionStream:
        """The completion in chunks, as the verifier commits them."""
        request, given = self._request(options), prompt_of(prompt)
        statistics, deadline = Statistics(), Deadline(request.timeout)
        kit = await self._kit_for(request, deadline)
        ids = await asyncio.to_thread(ids_of_text, kit, given) if isinstance(given, str) else given
        return self._start(kit, ids, request, statistics, deadline)

    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The assistant's answer to messages with `role` and `content`, in the target's own template."""
        return await (await self.stream_chat(messages, **options)).drain()

    async def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> CompletionStream:
        """The assistant's answer in chunks. Raises ModelRefused for a target without a chat template."""
        request, messages = self._request(options), check_messages(messages)
        statistics, deadline = Statistics(), Deadline(request.timeout)
        kit = await self._kit_for(request, deadline)
        ids = await asyncio.to_thread(ids_of_chat, kit, messages)
        return self._start(kit, ids, request, statistics, deadline)

    async def prepare(self) -> TargetKit:
        """Fetch and load what the target needs, once; the first request does it otherwise.

        Its `drafts` are those in use now. Whoever leaves before it is done does not stop it: the next one finds it.
        """
        kit = await self._preparation.of(self._assemble)
        if self._room is None:
            self._room = DraftManager(kit.drafts)
            if self.updates is not None:
                self.updates.run(self._room, self._own_draft)
        return dataclasses.replace(kit, drafts=self._room.pool)

    @property
    def ready(self) -> bool:
        """Whether what the target needs is loaded."""
        return self._room is not None

    # --- one request

    def _request(self, options: Options) -> Request:
        merged: Options = {**self._defaults, **options}
        return Request.of(**merged)

    async def _kit_for(self, request: Request, deadline: Deadline) -> TargetKit:
        async with deadline.holds(first_token=True):
            try:
                return await self.prepare()
            except Unavailable as error:
                remembered = self._memory.recall() if request.offline == "draft_only" else None
                if remembered is None:
                    raise
                cause = error
            await self._preparation.of(lambda: self._assembled(NoVerifier(remembered, cause)))
            return await self.prepare()

    def _start(
        self, kit: TargetKit, ids: Sequence[int], request: Request, statistics: Statistics, deadline: Deadline
    ) -> CompletionStream:
        """Nothing is asked of anybody before the first chunk is."""
        request = request.after(len(ids), kit.description.max_sequence)
        session_of(kit, ids, request)  # what the target cannot take is refused now

        def attempt() -> Deliveries:
            return self._attempt(kit, session_of(kit, ids, request), request, statistics)

        def alone(received: Sequence[int], cause: Unavailable) -> Deliveries:
            pool = self._room.pool if self._room is not None else None
            return written_alone(kit, ids, request, statistics, pool, received, cause)

        within_s = self._settings.resume_budget_s
        if request.offline == "draft_only":
            deliveries = unless_unreachable(persistent(attempt, request.retries, within_s, AT_VERIFIERS), alone)
        else:
            deliveries = persistent(attempt, request.retries, within_s)
        stream = CompletionStream(
            self._run(chunks_of(deliveries, kit, request), statistics),
            prompt_token_ids=tuple(ids),
            seed=request.sampling.seed,
            statistics=statistics,
            deadline=deadline,
        )
        self._streams.add(stream)
        return stream

    async def _run(self, chunks: Chunks, statistics: Statistics) -> Chunks:
        """The chunks, when there is a slot for the request."""
        with self.metrics.following(statistics) as following:
            async with self._slots, contextlib.aclosing(chunks):
                async for chunk in chunks:
                    following.finish = chunk[1] or following.finish
                    yield chunk

    async def _attempt(
        self, kit: TargetKit, session: DeviceSession, request: Request, statistics: Statistics
    ) -> Deliveries:
        """One try at verifiers."""
        async with contextlib.AsyncExitStack() as stack:
            self._tasks.check_open()
            room = self._room or DraftManager(None)
            like = Workload(room.pool.release if room.pool else "", request.traffic_class)
            placement = await self._placed(len(session.prompt), like)
            if placement is not None:
                stack.callback(self._close_session, placement)
                if room.pool is not None and room.pool.release == like.draft and placement.measured:
                    room.pool.expect(placement.measured)
            statistics.session_id = placement.grants.session_id if placement else secrets.token_hex(8)
            seat = await stack.enter_async_context(room.session())
            self._tasks.check_open()
            lent = seat.lent
            statistics.uses(lent.name if lent else "", lent.release if lent else "")
            options = driver_options(
                kit,
                request,
                self._settings,
                statistics.session_id,
                announced=like.draft,
                release=lent.release if lent else "",
                notice=self.updates.notice if self.updates is not None else None,
            )
            route = self._route(placement, search_budget_s(self._settings, request))
            driver = SessionDriver(session, route, self._dial, seat.worker, options, statistics)
            room.begin(seat, driver)
            self._drivers.add(driver)
            stack.callback(self._drivers.discard, driver)
            stack.callback(self._tasks.keep_rest_of, driver)
            deliveries = await stack.enter_async_context(contextlib.aclosing(driver.deliveries()))
            async for delivery in deliveries:
                yield delivery

    # --- where to

    def _route(self, placement: Placement | None, budget_s: float) -> Route:
        backoff = Backoff(budget_s)
        if placement is None:
            return DirectRoute(self._verifier_address, backoff, tls=self._tls)
        session_id = placement.grants.session_id

        async def resume(ticket: bytes, failed: Sequence[str], last_epoch: int) -> Any:
            return await self._coordinator().resume(session_id, ticket, failed, last_epoch)

        return GrantRoute(placement.grants, resume, backoff)

    def _dial(self, hop: AttachTarget) -> grpc.aio.Channel:
        return self._channels.get(self._reroute.get(hop.address, hop.address), tls=hop.tls)

    def _dial_bulk(self, hop: AttachTarget) -> grpc.aio.Channel:
        """A connection of its own, for downloads."""
        return self._channels.get(self._reroute.get(hop.address, hop.address), tls=hop.tls, bulk=True)

    def _coordinator(self) -> CoordinatorClient:
        channel = self._channels.get(self._coordinator_address, tls=self._tls)
        return CoordinatorClient(channel, self._api_key, self._tasks.in_background)

    async def _place(self, prompt_tokens: int = 0, like: Workload = ANY_WORKLOAD) -> Placement | None:
        """A session at the coordinator; None without one."""
        if not self._coordinator_address:
            return None
        wait_s = self._settings.resume_budget_s
        placement = await self._coordinator().open(self._target, prompt_tokens, wait_s=wait_s, like=like)
        if self.updates is not None:
            self.updates.notice(placement.release_serial)
        return placement

    async def _placed(self, prompt_tokens: int, like: Workload) -> Placement | None:
        """As `_place`, unless the client is closed. Whoever is cancelled meanwhile leaves no session behind."""
        placing = self._tasks.begin(self._place(prompt_tokens, like))
        try:
            return await self._tasks.result_of(placing)
        except asyncio.CancelledError:
            placing.cancel()
            placing.add_done_callback(self._close_unused)
            raise

    def _close_unused(self, placing: asyncio.Task[Placement | None]) -> None:
        if not placing.cancelled() and placing.exception() is None and (placement := placing.result()) is not None:
            self._close_session(placement)

    def _close_session(self, placement: Placement) -> None:
        self._tasks.in_background(self._coordinator().close(placement.grants.session_id, placement.grants.ticket))

    # --- the target's kit

    async def _assemble(self) -> TargetKit:
        """Everything for the target, from the verifiers that a session would attach to."""
        async with self._library() as library:
            kit = await self._assembled(library)
        self._memory.keep(kit.description)
        return kit

    async def _assembled(self, books: Books) -> TargetKit:
        begin = self.updates.begin if self.updates is not None else None
        return await assemble(books, self._cache, self._draft, self._options, begin)

    async def _own_draft(self) -> DraftPool | None:
        """The draft that the target's verifiers offer. Raises core errors where it cannot be had at the moment."""
        kit = await self.prepare()
        async with self._library() as library:
            return await own_draft(await library.describe(), library, self._cache, kit.tokenizer, self._options)

    @contextlib.asynccontextmanager
    async def _library(self) -> AsyncIterator[Library]:
        budget_s = self._settings.resume_budget_s
        placement = await self._place()
        if placement is None:
            budget_s = min(budget_s, FIRST_CONTACT_S)
        try:
            yield Library(self._route(placement, budget_s), self._dial_bulk)
        finally:
            if placement is not None:
                self._close_session(placement)
