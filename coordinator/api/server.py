"""Run a coordinator in this process: store, servicers and gRPC server, with a watch over the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from coordinator.api import ticket_key
from coordinator.api.admin import AdminServicer
from coordinator.api.authentication import Authenticator
from coordinator.api.devices import CoordinatorServicer
from coordinator.api.metrics import CoordinatorCollector, CoordinatorCounters
from coordinator.api.registry import RegistryServicer
from coordinator.api.services import admission
from coordinator.api.tenant_keys import TenantKeys
from coordinator.config import EMBEDDED, CoordinatorConfig
from coordinator.releases.handlers import ReleaseHandlers
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.verifiers import VerifierStore
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import Unavailable
from outrider.telemetry import prometheus
from outrider.wire import channels
from outrider.wire.health import Health
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

log = logging.getLogger("coordinator")

MAX_RPCS = 1_024
"""Calls at once, beside those that check the health; more are refused with RESOURCE_EXHAUSTED."""
WATCH_S = 1.0
"""Seconds between two checks of Redis, for the health service, and of releases."""
STOP_GRACE_S = 3.0
"""Seconds that calls in progress may take to finish after SIGTERM; all calls are short."""


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[str]:
    """Run a coordinator until the body ends; yield its address. Raises BadRequest or Unavailable."""
    authenticator = Authenticator(config)  # raises what is wrong before anything starts
    keys = ticket_key.load(config)
    async with contextlib.AsyncExitStack() as stack:
        embedded = stack.enter_context(EmbeddedServer()) if config.redis == EMBEDDED else None
        store = RedisStore(embedded.url if embedded else config.redis)
        stack.push_async_callback(store.close)
        tenants = TenantKeys(store, authenticator.configured, config)
        authenticator.lookup = tenants.holder
        verifiers, counters = VerifierStore(store), CoordinatorCounters(store)
        releases = await _releases(stack, store, config, authenticator)
        watch = StoreWatch(releases, tenants, embedded)
        server = channels.server(max_rpcs=MAX_RPCS, admit=admission(authenticator, counters))
        for servicer, add in (
            (CoordinatorServicer, stubs.add_CoordinatorServicer_to_server),
            (RegistryServicer, stubs.add_RegistryServicer_to_server),
            (AdminServicer, stubs.add_AdminServicer_to_server),
        ):
            served = servicer(store, verifiers, keys, config, counters, authenticator, tenants, releases)
            add(served, server)  # type: ignore[no-untyped-call]
        watch.health.add_to(server)
        port = channels.bind(server, config.listen, tls=config.tls, insecure=config.insecure)
        await watch.once()
        await store.warn()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await channels.start(server)
        task = asyncio.create_task(watch.forever())
        stack.push_async_callback(_cancelled, task)
        if config.metrics:
            from outrider.telemetry.metrics_server import serving  # needs starlette and uvicorn, as `_releases` does

            collector = CoordinatorCollector(counters, verifiers, releases)
            metrics = serving(config.metrics, prometheus.registry(collector), watch.unhealthy, collector.refresh)
            await stack.enter_async_context(metrics)
        yield f"{config.listen.rpartition(':')[0]}:{port}"


async def _releases(
    stack: contextlib.AsyncExitStack, store: RedisStore, config: CoordinatorConfig, authenticator: Authenticator
) -> ReleaseHandlers:
    """Return the handlers of releases. A server of draft files, if the settings want one, ends with the stack."""
    artifacts, base_url = None, config.artifacts_url
    if config.artifacts is not None:
        from coordinator.api.artifact_http import serving  # needs starlette and uvicorn, which few coordinators need

        artifacts = ArtifactStore(config.artifacts, ".gguf")
        serve = serving(artifacts, config.http, tls=config.tls, insecure=config.insecure, url=config.artifacts_url)
        base_url = await stack.enter_async_context(serve)
        log.info("drafts in %s are served at %s", artifacts.folder, base_url)
    return ReleaseHandlers(store, config, authenticator.admits_anybody, artifacts, base_url)


class StoreWatch:
    """Watches the store: whether it answers, tenants that others have created, and canaries that are due."""

    def __init__(self, releases: ReleaseHandlers, tenants: TenantKeys, embedded: EmbeddedServer | None) -> None:
        self.health = Health()
        """Serving while the store answers."""
        self._releases = releases
        self._tenants = tenants
        self._embedded = embedded
        self._serving = True

    def unhealthy(self) -> str:
        """Return why no device should open a session here; empty if devices may."""
        return "" if self._serving else "the store does not answer"

    async def forever(self) -> None:
        """Call `once` again and again until this is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.once()
            except Exception:
                log.exception("watching the store failed; trying again")

    async def once(self) -> None:
        """Look for new tenants, tend releases, and set the health by whether the store answered."""
        try:
            if self._embedded is not None and await asyncio.to_thread(self._embedded.revive):
                log.error("the embedded Redis server had ended; started an empty one, verifiers will register again")
            await self._tenants.watch()
            try:
                await self._releases.tend()
            except Unavailable:
                raise
            except Exception:  # devices are placed whatever is wrong with a release
                log.exception("tending releases failed; trying again")
        except Unavailable as error:
            self._set(False, str(error))
        else:
            self._set(True, "the store answers again")

    def _set(self, serving: bool, why: str) -> None:
        if serving != self._serving:
            log.warning("%s", why)
        self._serving = self.health.serving = serving


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel until it is done: `asyncio.wait_for` of Python 3.11, which redis uses, can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
