"""`outrider`: the operator's command. It asks the coordinator, and starts the other programs as processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from coordinator.cli import config, local, releases, sessions, status, tenants, top, verifiers, window
from outrider import __version__
from outrider.core import errors
from outrider.core.errors import OutriderError
from outrider.core.text import clean

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNAVAILABLE = 4
EXIT_REFUSED = 5
_EPILOG = """\
exit codes:
  0  done
  1  failed for another reason than those below
  2  a wrong command line, or a request that cannot be granted as it is
  3  no such verifier, session, tenant or release
  4  the coordinator or its store cannot be reached, or has no room: try again
  5  the admin token is missing or wrong ($OUTRIDER_ADMIN_TOKEN)
  130, 143  ended by Ctrl-C, by SIGTERM"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        raise SystemExit(options.run(options))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (ImportError, OutriderError) as error:
        print(f"outrider: {clean(str(error))}", file=sys.stderr)
        raise SystemExit(exit_code(error)) from error


def exit_code(error: Exception) -> int:
    """The same for the same kind of error, whatever the command."""
    match error:
        case ImportError() | errors.BadRequest():
            return EXIT_USAGE
        case errors.NotFound():
            return EXIT_NOT_FOUND
        case errors.Unavailable() | errors.Overloaded():
            return EXIT_UNAVAILABLE
        case errors.Unauthenticated() | errors.PermissionDenied():
            return EXIT_REFUSED
    return EXIT_FAILED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """`passed_on` is for another program: all that `chat` does not know, and what follows `--` of `up`."""
    made = parser()
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = made.parse_known_args(arguments[:cut])
    if options.command == "chat":
        options.passed_on = [*unknown, *arguments[cut:]]
    elif unknown or (options.command != "up" and cut < len(arguments)):
        made.error(f"unrecognized arguments: {' '.join([*unknown, *arguments[cut:]])}")
    else:
        options.passed_on = list(arguments[cut + 1 :])
    return options


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="outrider", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--version", action="version", version=f"outrider {__version__}", help="print it and leave")
    commands = made.add_subparsers(required=True, metavar="COMMAND", dest="command")
    local.add_parsers(commands)
    for noun in (status, top, verifiers, sessions, window, releases, tenants, config):
        noun.add_parser(commands)
    return made
