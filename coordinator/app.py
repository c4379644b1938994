"""The coordinator's process: `outrider-coordinator --listen HOST:PORT --redis URL|embedded --state-dir DIR`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from coordinator.config import EMBEDDED, CoordinatorConfig
from outrider.core.errors import OutriderError, Unavailable
from outrider.telemetry import traces
from outrider.telemetry.logs import FORMATS, configure

log = logging.getLogger("coordinator")

INSTALL = "the coordinator needs: pip install 'outrider[coordinator]'"


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
    configure(config.log_format, "coordinator", config.log_level)
    try:
        asyncio.run(_serve(config))
    except Unavailable as error:
        print(f"outrider-coordinator: {error}", file=sys.stderr)
        return 1
    except OutriderError as error:
        print(f"outrider-coordinator: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        mend = "" if "pip install" in str(error) else f"; {INSTALL}"
        print(f"outrider-coordinator: {error}{mend}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: CoordinatorConfig) -> None:
    from coordinator.server import running  # needs the extra; `main` says so where it is missing

    traces.configure("coordinator")

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as address:
        print(f"listening on {address}", flush=True)
        await stop.wait()
        log.info("stopping")


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
    add("--artifacts", type=Path, metavar="DIR", help="folder of draft files to serve to devices, with --http")
    add("--http", metavar="HOST:PORT", help="where they are served; port 0 takes a free one (not served)")
    add("--artifacts-url", metavar="URL", help="how devices reach that, where it is another address")
    add("--release-keys", metavar="KEYS", help="publishers whose drafts are taken: hex or files, with commas between")
    add("--canary-share", type=float, metavar="SHARE", help="of the devices, that try a new draft (0.25)")
    add("--canary-window-s", type=float, metavar="S", help="a trial undecided by then is rolled back (3600)")
    add("--report-interval-ms", type=int, metavar="MS", help="how often verifiers report (1000)")
    add("--ticket-ttl-s", type=float, metavar="S", help="how long a ticket lets a device attach (3600)")
    add("--metrics", metavar="HOST:PORT", help="serve /metrics and /healthz there (nowhere)")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    add("--log-format", choices=FORMATS, help="json: an object a line (text)")
    return parser


def _complaints(error: ValidationError) -> list[str]:
    """One line for each field, without the values: they may be secrets."""
    return [f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors(include_input=False)]


if __name__ == "__main__":
    raise SystemExit(main())
