"""The coordinator's process: `outrider-coordinator --listen HOST:PORT --redis URL|embedded --state-dir DIR`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from coordinator.config import EMBEDDED, CoordinatorConfig
from coordinator.embedded import EmbeddedServer
from coordinator.handlers import Handlers
from coordinator.keyring import Keyring, load_or_create
from coordinator.service import Health, add_services
from coordinator.store import Store
from coordinator.tenants import Access
from outrider.core.errors import OutriderError, Unavailable
from outrider.wire import channels

log = logging.getLogger("coordinator")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 for a configuration that cannot work, 1 for a start that failed."""
    given = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    try:
        config = CoordinatorConfig(**given)
    except ValidationError as error:
        print("outrider-coordinator:", *_complaints(error), sep="\n  ", file=sys.stderr)
        return 2
    except SettingsError as error:  # an environment variable that is no JSON
        print(f"outrider-coordinator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(config))
    except Unavailable as error:
        print(f"outrider-coordinator: {error}", file=sys.stderr)
        return 1
    except (OutriderError, ImportError) as error:
        print(f"outrider-coordinator: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[str]:
    """A coordinator that answers at the address yielded, until the body ends. Raises BadRequest or Unavailable."""
    access = Access.from_config(config)
    keyring = Keyring(load_or_create(config.state_dir))
    async with contextlib.AsyncExitStack() as stack:
        embedded = stack.enter_context(EmbeddedServer()) if config.redis == EMBEDDED else None
        store = Store(embedded.url if embedded else config.redis, timeout_s=config.store_timeout_s)
        stack.push_async_callback(store.close)
        handlers, vitals = Handlers(store, keyring, config), Health()
        server = channels.server(max_rpcs=config.max_rpcs)
        add_services(server, handlers, access, vitals)
        port = channels.bind(server, config.listen, tls=config.tls, insecure=config.insecure)
        watch = Watch(handlers, vitals, embedded)
        await watch.once()
        await server.start()
        stack.push_async_callback(server.stop, config.stop_grace_s)
        stack.push_async_callback(vitals.leave)
        task = asyncio.create_task(watch.forever(config.watch_interval_s))
        stack.push_async_callback(_cancelled, task)
        yield f"{config.listen.rpartition(':')[0]}:{port}"


class Watch:
    """Looks after the store: is it there, and which public keys do the other coordinators use."""

    def __init__(self, handlers: Handlers, vitals: Health, embedded: EmbeddedServer | None) -> None:
        self._handlers = handlers
        self._vitals = vitals
        self._embedded = embedded
        self._serving = True

    async def forever(self, interval_s: float) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.once()
            except Exception:
                log.exception("looking after the store failed; trying again")

    async def once(self) -> None:
        """Exchange keys, and tell the health service whether that worked."""
        if self._embedded and self._embedded.revive():
            log.error("the embedded Redis server had ended; started an empty one, verifiers will register again")
        try:
            await self._handlers.exchange_keys()
        except Unavailable as error:
            await self._set(False, str(error))
        else:
            await self._set(True, "the store answers again")

    async def _set(self, serving: bool, why: str) -> None:
        if serving != self._serving:
            log.warning("%s", why)
        self._serving = serving
        await self._vitals.say(serving)


async def _serve(config: CoordinatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as address:
        print(f"listening on {address}", flush=True)
        await stop.wait()
        log.info("stopping")


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel until it is done: `asyncio.wait_for` of Python 3.11, which redis uses, can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider-coordinator",
        description="Place sessions on verifiers. Every option can also be set as OUTRIDER_COORDINATOR_<NAME>; secrets"
        " (TENANT_KEYS, JOIN_TOKEN, ADMIN_TOKEN) only there.",
    )
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="port 0 takes a free one (127.0.0.1:7700)")
    add("--redis", metavar="URL", help=f"redis://, rediss:// or unix:// URL, or `{EMBEDDED}` (the default)")
    add("--state-dir", type=Path, metavar="DIR", help="where the ticket key is kept (~/.outrider/coordinator)")
    add("--tls-cert", type=Path, metavar="PEM", help="certificate chain; turns TLS on")
    add("--tls-key", type=Path, metavar="PEM", help="its private key")
    add("--tenants", dest="tenants_file", type=Path, metavar="TOML", help='API keys: [tenants] name = "key"')
    add("--insecure", action="store_true", default=None, help="accept plain text and strangers beyond loopback")
    add("--lease-ms", type=int, metavar="MS", help="a verifier silent for so long gets no more sessions (5000)")
    add("--report-interval-ms", type=int, metavar="MS", help="how often verifiers report (1000)")
    add("--ticket-ttl-s", type=float, metavar="S", help="how long a ticket lets a device attach (3600)")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser


def _complaints(error: ValidationError) -> list[str]:
    """One line for each field, without the values: they may be secrets."""
    return [f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors(include_input=False)]


if __name__ == "__main__":
    raise SystemExit(main())
