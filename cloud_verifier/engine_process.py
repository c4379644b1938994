"""The engine's own process: requests in, one step, events out. Started by engine_host; not a command for people.

    python -m cloud_verifier.engine_process FD CONFIG_JSON

It has its own interpreter so that a forward pass never waits for the front's event loop, nor the loop for it.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

from cloud_verifier.config import INSTALL, VerifierConfig
from cloud_verifier.ipc import EngineEnd, failure_to_event
from outrider.core.errors import ModelRefused, OutriderError
from outrider.wire.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    # The front decides when to end, and drains first; terminals and supervisors signal the whole group.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    config = VerifierConfig.model_validate_json(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            _run(config, EngineEnd(sock))
        except ConnectionError:
            log.info("the front has gone")


def _run(config: VerifierConfig, end: EngineEnd) -> None:
    """Raises ConnectionError where the front goes."""
    try:
        _serve(config, end)
    except OutriderError as error:
        end.send([pb.EngineEvent(failure=failure_to_event(error))])
        raise SystemExit(1) from error


def _serve(config: VerifierConfig, end: EngineEnd) -> None:
    try:
        from cloud_verifier.engine_loop import serve
    except ImportError as error:
        raise ModelRefused(f"the engine cannot start: {error}; {INSTALL}") from error
    serve(config, end)


if __name__ == "__main__":
    main()
