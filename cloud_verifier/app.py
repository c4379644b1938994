"""`outrider-verifier`: one target, served to many devices."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from cloud_verifier.config import INSTALL, VerifierConfig
from cloud_verifier.engine_process.malloc_trim import give_back_what_is_freed
from outrider.console_scripts import EndedByInterrupt
from outrider.core.errors import BadRequest, OutriderError
from outrider.settings.options import parser_of, settle
from outrider.telemetry import traces
from outrider.telemetry.logs import configure

PROGRAM = "outrider-verifier"
EXIT_REFUSED = 2


def parse(arguments: Sequence[str] | None = None) -> VerifierConfig:
    """Flags over environment over file over defaults. Exits with a readable message on a bad value."""
    try:
        return settle(VerifierConfig, parser().parse_args(arguments), PROGRAM)
    except BadRequest as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from error


def parser() -> argparse.ArgumentParser:
    return parser_of(VerifierConfig, PROGRAM, "Serve one target to many devices.")


async def _main(config: VerifierConfig) -> int:
    with EndedByInterrupt():
        from cloud_verifier.verifier import Verifier  # needs the extra; `main` says so where it is missing

    traces.configure("verifier")

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: (at_once if stop.is_set() else stop).set())  # the second is in a hurry
    return await Verifier(config).run(stop, at_once)


def main(arguments: Sequence[str] | None = None) -> None:
    config = parse(arguments)
    give_back_what_is_freed()
    configure(config.log_format, "verifier")
    try:
        raise SystemExit(asyncio.run(_main(config)))
    except OutriderError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from error
    except ImportError as error:
        print(f"{PROGRAM}: {error}; {INSTALL}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from error


if __name__ == "__main__":
    main()
