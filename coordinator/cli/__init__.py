"""Run the operator's command, `outrider`, and end with the exit code of its failure.

There is a module for each group of commands, which is imported only then; `arguments` describes them all, and `output`
prints what a command has found.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from coordinator.cli.arguments import parse
from outrider.console_scripts import EndedByInterrupt
from outrider.core import errors
from outrider.core.errors import OutriderError
from outrider.core.text import clean

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNAVAILABLE = 4
EXIT_REFUSED = 5


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        raise SystemExit(action_of(options)(options))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (ImportError, OutriderError) as error:
        print(f"outrider: {clean(str(error))}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from error


def action_of(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """Return what carries a command out: it takes the options, returns the exit code and raises core errors."""
    module, _, name = options.action.partition(".")
    with EndedByInterrupt():
        action: Callable[..., Any] = getattr(import_module(f"coordinator.cli.{module}"), name)
        if "timeout_s" in options:
            return partial(import_module("coordinator.cli.output").show, action)
    return action


def exit_code(error: Exception) -> int:
    """Return the exit code of a kind of error, which is the same for every command."""
    match error:
        case ImportError() | errors.BadRequest() | errors.ModelRefused():
            return EXIT_USAGE
        case errors.NotFound():
            return EXIT_NOT_FOUND
        case errors.Unavailable() | errors.Overloaded():
            return EXIT_UNAVAILABLE
        case errors.Unauthenticated() | errors.PermissionDenied():
            return EXIT_REFUSED
    return EXIT_FAILED
