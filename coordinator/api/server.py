"""A coordinator in this process: store, handlers and gRPC server put together, and the store looked after."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from coordinator.api.admin_handlers import Operators
from coordinator.api.authentication import Access
from coordinator.api.handlers import Handlers
from coordinator.api.metrics import CoordinatorCollector
from coordinator.api.services import Health, add_services
from coordinator.api.tenant_keys import TenantKeys
from coordinator.config import EMBEDDED, CoordinatorConfig
from coordinator.releases.backup import Backup
from coordinator.releases.handlers import ReleaseHandlers, ReleaseTerms
from coordinator.releases.records import Rule
from coordinator.releases.store import ReleaseStore
from coordinator.store.embedded_redis import EmbeddedServer
from coordinator.store.keyring import Keyring, load_or_create
from coordinator.store.redis_store import Store
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import Unavailable
from outrider.telemetry.prometheus import registry
from outrider.wire import channels
from outrider.wire.publishers import trusted_keys

log = logging.getLogger("coordinator")


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[str]:
    """A coordinator that answers at the address yielded, until the body ends. Raises BadRequest or Unavailable."""
    Access.from_config(config)  # what is wrong with it is told before anything starts
    keyring = Keyring(load_or_create(config.state_dir))
    async with contextlib.AsyncExitStack() as stack:
        embedded = stack.enter_context(EmbeddedServer()) if config.redis == EMBEDDED else None
        store = Store(embedded.url if embedded else config.redis, timeout_s=config.store_timeout_s)
        stack.push_async_callback(store.close)
        tenants = TenantKeys(store)
        access = Access.from_config(config, tenants.holder)
        handlers, operators, vitals = Handlers(store, keyring, config), Operators(store, config), Health()
        releases = await _releases(stack, store, config)
        server = channels.server(max_rpcs=config.max_rpcs)
        add_services(server, handlers, releases, access, operators, tenants, vitals)
        port = channels.bind(server, config.listen, tls=config.tls, insecure=config.insecure)
        watch = Watch(handlers, releases, vitals, embedded)
        await watch.once()
        await server.start()
        stack.push_async_callback(server.stop, config.stop_grace_s)
        stack.push_async_callback(vitals.leave)
        task = asyncio.create_task(watch.forever(config.watch_interval_s))
        stack.push_async_callback(_cancelled, task)
        if config.metrics:
            from outrider.telemetry.metrics_server import serving  # needs starlette and uvicorn, as `_releases` does

            figures = CoordinatorCollector(handlers.counters, store, releases)
            door = serving(config.metrics, registry(figures), watch.ailing, figures.refresh)
            await stack.enter_async_context(door)
        yield f"{config.listen.rpartition(':')[0]}:{port}"


async def _releases(stack: contextlib.AsyncExitStack, store: Store, config: CoordinatorConfig) -> ReleaseHandlers:
    """With the server of draft files, where there is one, which ends with the stack."""
    artifacts, base_url = None, config.artifacts_url
    if config.artifacts is not None:
        from coordinator.api.artifact_http import serving  # needs starlette and uvicorn, which few coordinators do

        artifacts = ArtifactStore(config.artifacts, ".gguf")
        serve = serving(artifacts, config.http, tls=config.tls, insecure=config.insecure, url=config.artifacts_url)
        base_url = await stack.enter_async_context(serve)
        log.info("drafts in %s are served at %s", artifacts.folder, base_url)
    terms = ReleaseTerms(
        Rule(config.canary_share, config.canary_bound, config.canary_alpha, config.canary_window_s),
        config.canary_session_samples,
        trusted_keys(config.release_keys),
        base_url,
    )
    kept = ReleaseStore(store)
    return ReleaseHandlers(kept, store, Backup(config.state_dir, kept), terms, artifacts)


class Watch:
    """Looks after the store: is it there, which public keys do the other coordinators use, what becomes of canaries."""

    def __init__(
        self, handlers: Handlers, releases: ReleaseHandlers, vitals: Health, embedded: EmbeddedServer | None
    ) -> None:
        self._handlers = handlers
        self._releases = releases
        self._vitals = vitals
        self._embedded = embedded
        self._serving = True

    def ailing(self) -> str:
        """Why nobody should ask here for a session; empty where everybody may."""
        return "" if self._serving else "the store does not answer"

    async def forever(self, interval_s: float) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.once()
            except Exception:
                log.exception("looking after the store failed; trying again")

    async def once(self) -> None:
        """Exchange keys, tend releases, and tell the health service whether the store answered."""
        try:
            if self._embedded is not None and await asyncio.to_thread(self._embedded.revive):
                log.error("the embedded Redis server had ended; started an empty one, verifiers will register again")
            await self._handlers.exchange_keys()
            await self._tend()
        except Unavailable as error:
            await self._set(False, str(error))
        else:
            await self._set(True, "the store answers again")

    async def _tend(self) -> None:
        """Devices are placed whatever is wrong with a release."""
        try:
            await self._releases.tend()
        except Unavailable:
            raise
        except Exception:
            log.exception("looking after releases failed; trying again")

    async def _set(self, serving: bool, why: str) -> None:
        if serving != self._serving:
            log.warning("%s", why)
        self._serving = serving
        await self._vitals.say(serving)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel until it is done: `asyncio.wait_for` of Python 3.11, which redis uses, can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
