"""Run the coordinator's process: `outrider-coordinator --listen HOST:PORT --redis URL|embedded --state-dir DIR`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from coordinator.api.authentication import Authenticator
from coordinator.config import CoordinatorConfig
from outrider.console_scripts import EndedByInterrupt
from outrider.core.errors import OutriderError, Unavailable
from outrider.processes import leave_after
from outrider.settings import parser_of, settle
from outrider.telemetry import traces
from outrider.telemetry.logs import configure

log = logging.getLogger("coordinator")

PROGRAM = "outrider-coordinator"
INSTALL = "the coordinator needs: pip install 'outrider[coordinator]'"
SWITCH_S = 5e-4
"""Seconds until one thread of Python lets another go on. With Python's own 5 ms, each call waits for the thread that
decides, several times."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Return 0 after a clean stop, 2 for a wrong configuration, 1 for a failed start."""
    try:
        config = settle(CoordinatorConfig, parser().parse_args(argv), PROGRAM, Authenticator)
        sys.setswitchinterval(SWITCH_S)
        configure("coordinator")
        asyncio.run(_serve(config))
    except (OutriderError, ImportError) as error:
        mend = f"; {INSTALL}" if isinstance(error, ImportError) and "pip install" not in str(error) else ""
        print(f"{PROGRAM}: {error}{mend}", file=sys.stderr)
        return 1 if isinstance(error, Unavailable) else 2
    return 0


async def _serve(config: CoordinatorConfig) -> None:
    with EndedByInterrupt():
        from coordinator.api.server import running  # needs the extra; `main` says so where it is missing

    traces.configure("coordinator")

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as address:
        print(f"listening on {address}", flush=True)
        await stop.wait()
        log.info("stopping")


def parser() -> argparse.ArgumentParser:
    return parser_of(CoordinatorConfig, PROGRAM, "Place sessions on verifiers.")


if __name__ == "__main__":
    leave_after(main)
