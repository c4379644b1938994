"""Open sessions at verifiers for the requests of one client, each with a lease of its draft."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from edge_agent.config import EdgeSettings
from edge_agent.drafting.pool import DraftPool
from edge_agent.metrics import EdgeMetrics
from edge_agent.releases.follower import Follower
from edge_agent.sdk.request import Request
from edge_agent.session.channels import Channels
from edge_agent.session.coordinator_client import CoordinatorClient, prior_of
from edge_agent.session.driver import SessionDriver
from edge_agent.session.failover import FIRST_CONTACT_S, Route
from edge_agent.session.statistics import Statistics
from edge_agent.target.artifacts import ArtifactClient
from edge_agent.target.bundle import TargetBundle
from outrider.core.backoff import Backoff
from outrider.core.errors import BadRequest, OutriderError, Unavailable
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.telemetry.logs import RepeatedFailure
from outrider.wire.channels import ClientTls
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

OFFLINE_AFTER_S = 5.0
"""Seconds that a request looks for a verifier before the draft begins alone, if that is allowed."""
OFFLINE_IN_ANSWER_S = 20.0
"""The same of an answer that a verifier has begun: a device that wakes up, or changes its network, is back by then,
and what the draft has once gone on with is the draft's to its end."""
OPEN_BUDGET_S = 30.0
"""Seconds that a request looks for room in the cluster, or tries again before its first token; also those that loading
the target, before the first request, waits for a verifier."""
RESUME_BUDGET_S = math.inf
"""Seconds that a session looks for a verifier without progress before it fails: as long as its timeout allows."""
PROBE_S = 2.0
"""Seconds for which a probe looks for a verifier that answers."""
_CLOSE_S = 1.0
"""Seconds that closing waits for sessions to end, and as long again for their release at the coordinator."""
_A = TypeVar("_A")
DeliverySource = AbstractAsyncContextManager[AsyncGenerator[Delivery, None]]
"""Gives the deliveries of one try; leaving it ends the try."""


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except OutriderError as error:
        log.info("a session could not be closed at the coordinator: %s", error)


async def _let_end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Let tasks end by themselves for a while, then cancel them."""
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in pending:
            task.cancel()


class Sessions:
    """Places sessions at a cluster, or attaches them to its one verifier, and drives them.

    settings: have the address of either. reroute: a verifier's address -> the one to dial instead.
    Raises core errors, and BadRequest once it is closed.
    """

    def __init__(
        self, settings: EdgeSettings, drafts: DraftPool, tls: ClientTls | None, reroute: Mapping[str, str] | None
    ) -> None:
        self.settings = settings
        self.metrics = EdgeMetrics()
        self.drafts = drafts
        self.updates: Follower | None = None
        """Is told of the serial number of the cluster's draft releases whenever it is mentioned."""
        self._closed = False
        self._waiting: set[asyncio.Task[Any]] = set()
        """Work that closing cancels: placing sessions, and fetching and loading the target's artifacts."""
        self._background: set[asyncio.Future[Any]] = set()
        """Ends of sessions, which outlive their requests; closing waits for them for a while."""
        self._channels = Channels(tls, insecure=settings.insecure, reroute=reroute)
        self._tls = tls is not None
        self.coordinator = CoordinatorClient(
            self._channels, settings.coordinator, self._in_background, tls=self._tls, api_key=settings.api_key
        )
        self._absence = RepeatedFailure(log, "the cluster has a verifier again")
        self._slots = asyncio.Semaphore(settings.max_sessions)
        self.open_budget_s, self.resume_budget_s = OPEN_BUDGET_S, RESUME_BUDGET_S
        self._drivers: set[SessionDriver] = set()

    def check_open(self) -> None:
        if self._closed:
            raise BadRequest("the client is closed; make another one")

    def begin(self, work: Coroutine[Any, Any, _A]) -> asyncio.Task[_A]:
        """Start work that goes on until it ends or this is closed."""
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._begun_is_done)
        return task

    def _begun_is_done(self, task: asyncio.Task[Any]) -> None:
        self._waiting.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log a failure for which no caller waits any more

    async def result_of(self, task: asyncio.Task[_A]) -> _A:
        """Wait for what `begin` returned, which goes on if the caller is cancelled.

        Raises BadRequest if closing has ended it.
        """
        await asyncio.wait([task])
        if task.cancelled():
            self.check_open()
        return task.result()

    @contextlib.asynccontextmanager
    async def slot(self, statistics: Statistics, finish: Callable[[], str]) -> AsyncIterator[None]:
        """Wait until one more request may run, and count it in the metrics. finish: tells how it has ended."""
        with self.metrics.following(statistics, finish):
            async with self._slots:
                yield

    @contextlib.asynccontextmanager
    async def open(
        self, session: DeviceSession, bundle: TargetBundle, request: Request, statistics: Statistics
    ) -> AsyncIterator[AsyncGenerator[Delivery, None]]:
        """Place the session, lease a draft and drive it while the body runs; yields what verifiers commit."""
        async with contextlib.AsyncExitStack() as stack:
            self.check_open()
            announced = self.drafts.draft if request.speculation else None
            release = announced.release if announced is not None else ""
            budget_s = later_s = self.resume_budget_s
            if request.offline == "draft_only":
                later_s = min(later_s, OFFLINE_IN_ANSWER_S)
                budget_s = later_s if session.received else min(budget_s, OFFLINE_AFTER_S)
            asked = pb.OpenSessionRequest(
                prompt_tokens=len(session.prompt), draft_release=release, traffic_class=request.traffic_class
            )
            placement = await self._placed(asked, budget_s, statistics)
            if placement is not None:
                stack.callback(self.close_session, placement)
                prior = prior_of(placement)
                if announced is not None and announced is self.drafts.draft and prior is not None:
                    announced.apply_prior(prior)
            statistics.session_id = placement.session_id if placement else secrets.token_hex(16)
            draft = await stack.enter_async_context(self.drafts.session(session))
            draft.grammar = bundle.grammar(request.grammar)
            draft.vocabulary_size = bundle.description.vocabulary_size
            self.check_open()
            driver = SessionDriver(
                session,
                draft,
                self.route(placement, budget_s, later_s),
                self._channels,
                statistics,
                vocabulary_hash=bundle.tokenizer.vocabulary_hash,
                announced=release,
                on_release_notice=self._notice,
            )
            self._drivers.add(driver)
            stack.callback(self._ended, driver)
            yield await stack.enter_async_context(contextlib.aclosing(driver.deliveries()))

    @contextlib.asynccontextmanager
    async def artifacts(self, *, patient: bool = True) -> AsyncIterator[ArtifactClient]:
        """Reach the artifacts of the target's verifiers, through a session that is placed for the body alone.

        patient: wait for a cluster without room or verifiers; otherwise what does not answer raises within seconds.
        """
        placement = await self._place(pb.OpenSessionRequest(), patient=patient)
        budget_s = min(self.open_budget_s, FIRST_CONTACT_S if placement is None else math.inf) if patient else PROBE_S
        try:
            yield ArtifactClient(self.route(placement, budget_s), self._channels)
        finally:
            if placement is not None:
                self.close_session(placement)

    async def close(self, streams: Iterable[Awaitable[None]]) -> None:
        """End all sessions, as cancelled; then free the draft and close the channels. streams: their ends."""
        self._closed = True
        for driver in self._drivers:
            driver.cancel()
        if self.updates is not None:
            await self.updates.close()
        for waiting in self._waiting:
            waiting.cancel()
        await _let_end([*(asyncio.ensure_future(stream) for stream in streams), *self._waiting])
        await _let_end(self._background)
        await self.drafts.close()
        await self._channels.close()

    def _in_background(self, work: Awaitable[None]) -> None:
        """Start work whose result is not awaited; its core errors are logged."""
        self._keep(asyncio.ensure_future(_quietly(work)))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _ended(self, driver: SessionDriver) -> None:
        self._drivers.discard(driver)
        if driver.winding_down is not None:
            self._keep(driver.winding_down)

    # --- placement

    async def _place(
        self,
        request: pb.OpenSessionRequest,
        look_s: float | None = None,
        statistics: Statistics | None = None,
        *,
        patient: bool = True,
    ) -> pb.OpenSessionResponse | None:
        """Open a session at the coordinator; None without one.

        request: target and device are filled in. look_s: how long to wait while no verifier lives; None: as long as for
        room. statistics: tell why it waits.
        """
        if not self.settings.coordinator:
            return None

        def waits(error: OutriderError) -> None:
            if statistics is not None:
                statistics.attach_failure = str(error)
            if isinstance(error, Unavailable):
                self._absence.failed("%s; requests wait for one", error)

        request.target = self.settings.target
        request.device_id = self.updates.device_id if self.updates is not None else ""
        wait_s = self.open_budget_s if patient else 0.0
        placement = await self.coordinator.open(
            request, wait_s=wait_s, look_s=wait_s if look_s is None else look_s, on_wait=waits, patient=patient
        )
        self._absence.worked()
        self._notice(placement.release_serial)
        return placement

    def _notice(self, serial: int) -> None:
        if self.updates is not None:
            self.updates.notice(serial)

    async def _placed(self, *arguments: Any) -> pb.OpenSessionResponse | None:
        """Place as `_place` does, but leave no session behind if the caller is cancelled meanwhile."""
        placing = self.begin(self._place(*arguments))
        try:
            return await self.result_of(placing)
        except asyncio.CancelledError:
            placing.cancel()
            placing.add_done_callback(self._close_unused)
            raise

    def _close_unused(self, placing: asyncio.Task[pb.OpenSessionResponse | None]) -> None:
        if not placing.cancelled() and placing.exception() is None and (placement := placing.result()) is not None:
            self.close_session(placement)

    def close_session(self, placement: pb.OpenSessionResponse) -> None:
        self._in_background(self.coordinator.close(placement.session_id, placement.primary.ticket))

    def route(self, placement: pb.OpenSessionResponse | None, budget_s: float, later_s: float | None = None) -> Route:
        """Return the route of a session. budget_s, later_s: how long it looks for a verifier before and after the first
        progress; the same if `later_s` is None.
        """
        backoff = Backoff(budget_s, later_s=later_s)
        if placement is None:
            return Route.direct(self.settings.verifier, backoff, tls=self._tls)
        return Route(placement, self.coordinator.resume, backoff)
