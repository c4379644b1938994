"""Check a container's health: `python -m outrider.telemetry.healthcheck PORT [PATH]` asks whether a process is ready.

It requests /healthz of the metrics server, or another path such as /ready of `outrider-edge serve`. Both are plain
HTTP on loopback even if devices are served with TLS, and proxies that the environment names are not used.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
MAX_BYTES = 200
"""Bytes of the answer that are shown."""
USAGE = "usage: python -m outrider.telemetry.healthcheck PORT [PATH]"


def unhealthy(port: int, path: str = "/healthz") -> str:
    """Return why no work should be sent to a port of this machine; "" if it is healthy."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        said = answer.read(MAX_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer at {HOST}:{port}: {error}"
    finally:
        connection.close()
    return "" if answer.status == http.HTTPStatus.OK else f"{answer.status}: {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if the process is ready, 1 if it is not, 2 for a wrong command line."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) not in (1, 2) or not given[0].isdecimal():
        print(USAGE, file=sys.stderr)
        return 2
    why = unhealthy(int(given[0]), *given[1:])
    print(why or "ok")
    return 1 if why else 0


if __name__ == "__main__":
    raise SystemExit(main())
