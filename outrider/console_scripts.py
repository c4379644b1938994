"""Start each of the five programs so that Ctrl-C ends it quietly, even while it is still importing its modules.

An application takes up to seconds to import, and has no handler of its own until then. So this module imports nothing
that takes time, and names the applications instead of importing them.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended."""


def run(module: str) -> None:
    """Import a module and exit with what its `main` returns, or with 130 and no traceback if Ctrl-C comes first."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "ERROR"
    )  # read as gRPC is imported; else it tells of every broken connection
    try:
        with EndedByInterrupt():
            # `outrider chat` holds SIGINT back while it replaces itself by this program, which inherits the mask.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            from importlib import import_module

            main = import_module(module).main
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        _on_interrupt(_end)  # the interpreter's own end takes a moment, too
    raise SystemExit(code)


class EndedByInterrupt:
    """A context in which Ctrl-C ends the process at once, with exit code 130. For imports that take long.

    A KeyboardInterrupt does not serve: modules that are half imported turn it into errors of their own, or swallow it.
    A process that ignores Ctrl-C, as jobs in a shell's background do, goes on ignoring it.
    """

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        _on_interrupt(_end)

    def __exit__(self, *_: object) -> None:
        _on_interrupt(self._before)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


def _on_interrupt(handler: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    try:  # noqa: SIM105  # importing contextlib takes longer than all else here
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    except ValueError:
        pass  # Python interrupts its main thread alone


def _program(module: str) -> Callable[[], None]:
    return lambda: run(module)


operator = _program("coordinator.cli")
coordinator = _program("coordinator.app")
verifier = _program("cloud_verifier.app")
edge = _program("edge_agent.cli")
distill = _program("cloud_verifier.distill.cli")
