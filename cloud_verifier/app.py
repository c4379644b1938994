"""Run `outrider-verifier`, which serves one target to many devices. Its help needs neither gRPC nor torch."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence

from cloud_verifier.config import INSTALL, VerifierConfig
from outrider.artifacts.hub import fetch_draft, fetch_target, hub_id
from outrider.console_scripts import EndedByInterrupt
from outrider.core.errors import BadRequest, OutriderError
from outrider.processes import leave_after
from outrider.settings import flag_of, parser_of, settle
from outrider.telemetry import traces
from outrider.telemetry.logs import configure

PROGRAM = "outrider-verifier"
EXIT_REFUSED = 2
ONE_POLLER = "-event_engine_listener"
"""The experiment of gRPC that has the thread which takes its events read and write connections, too. By default other
threads do and hand each message over, at a seventh of the front's CPU time (grpcio 1.85)."""
COLLECT_AFTER = 2_000, 4
"""New objects that have the garbage collector look through them, and how often it does so before it looks through those
that stayed, too. Of floods of calls, which leave some 100 objects in cycles each, it so has little at a time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal or an operator ends the process. Exits with 2 if the settings or the model are refused."""
    config = parse(arguments)
    configure("verifier")
    try:
        raise SystemExit(_run(config))
    except OutriderError as error:
        raise _refused(error) from error
    except ImportError as error:
        raise _refused(f"{error}; {INSTALL}") from error


def parse(arguments: Sequence[str] | None = None) -> VerifierConfig:
    """Return the settings: flags over environment over file over defaults. Exits with a message on a bad value."""
    try:
        return settle(VerifierConfig, parser().parse_args(arguments), PROGRAM)
    except BadRequest as error:
        raise _refused(error) from error


def parser() -> argparse.ArgumentParser:
    return parser_of(VerifierConfig, PROGRAM, "Serve one target to many devices.")


def _run(config: VerifierConfig) -> int:
    """Serve in an event loop of this process; return the exit code."""
    os.environ.setdefault("GRPC_EXPERIMENTS", ONE_POLLER)  # read as gRPC is imported
    return asyncio.run(_serve(config))


async def _serve(config: VerifierConfig) -> int:
    """Serve until the first SIGTERM or SIGINT, which drains, or a second one, which hurries; return the exit code."""
    with EndedByInterrupt():
        from cloud_verifier.verifier import VerifierProcess, check_settings  # needs the extra; `main` says so

    check_settings(config)
    config = _fetched(config)
    gc.collect()
    gc.freeze()  # what was imported, whose collection would delay commits
    gc.set_threshold(*COLLECT_AFTER)
    traces.configure("verifier")
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: (at_once if stop.is_set() else stop).set())
    return await VerifierProcess(config).run(stop, at_once)


def _fetched(config: VerifierConfig) -> VerifierConfig:
    """Return the settings with paths for ids of the hub. Raises ModelRefused, Unavailable, or ImportError."""
    paths: dict[str, object] = {}
    for name in ("draft", "server_draft"):  # before the target, which is larger
        if (draft := getattr(config, name)) is not None:
            paths[name] = fetch_draft(draft, flag_of(VerifierConfig, name))
    if on_hub := hub_id(config.model):
        paths |= {"model": fetch_target(config.model), "name": config.name or on_hub[0]}
    return config.model_copy(update=paths)


def _refused(reason: object) -> SystemExit:
    print(f"{PROGRAM}: {reason}", file=sys.stderr)
    return SystemExit(EXIT_REFUSED)


if __name__ == "__main__":
    leave_after(main)
