"""Is a process here ready for work? `python -m outrider.telemetry.healthcheck PORT [PATH]`, a container's health check.

It asks the page on which a process says so: /healthz at the door of `--metrics`, or /health of `outrider-edge serve`.
Both are plain HTTP on loopback, whether devices are served with TLS or not, and no proxy of the environment is asked.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
MOST_BYTES = 200
"""Of what it says, to be shown by whoever runs the container."""
USAGE = "usage: python -m outrider.telemetry.healthcheck PORT [PATH]"


def ailing(port: int, path: str = "/healthz") -> str:
    """Why no work should be sent there; empty where it should."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        said = answer.read(MOST_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer at {HOST}:{port}: {error}"
    finally:
        connection.close()
    return "" if answer.status == http.HTTPStatus.OK else f"{answer.status}: {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 where it is ready, 1 where it is not, 2 for a wrong command line."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) not in (1, 2) or not given[0].isdecimal():
        print(USAGE, file=sys.stderr)
        return 2
    why = ailing(int(given[0]), *given[1:])
    print(why or "ok")
    return 1 if why else 0


if __name__ == "__main__":
    raise SystemExit(main())
