"""Keep the tokens that `outrider up` makes where the same user's other commands on this machine find them.

There is a file for each address, so that a token reaches no other coordinator, and each start makes new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.artifacts import atomic_files
from outrider.core.addresses import DEFAULT_STATE_DIR, split_address
from outrider.core.errors import BadRequest
from outrider.wire.channels import is_loopback

ADMIN, JOIN = "admin", "join"
"""Names of the tokens: of operators, and of verifiers."""
_MAX_BYTES = 4_096


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def kept(tokens: Mapping[str, str], coordinator: str, state_dir: Path) -> Iterator[Path]:
    """Keep tokens by name for a coordinator's address until the body ends; yield their file.

    Raises BadRequest if it cannot be written.
    """
    path = _path(coordinator, state_dir)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps(dict(tokens)).encode(), mode=0o600)
    except OSError as error:
        raise BadRequest(f"tokens cannot be kept in {path}: {error.strerror}; give another --state-dir") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def find(name: str, coordinator: str, state_dir: Path | None = None) -> str:
    """Return a token of a coordinator on this machine, by its name; "" where none is kept.

    state_dir: the coordinator's; None is that of OUTRIDER_COORDINATOR_STATE_DIR, or the default. Raises BadRequest for
    a file that other users may read.
    """
    if not is_loopback(coordinator):
        return ""
    given = os.environ.get("OUTRIDER_COORDINATOR_STATE_DIR") or DEFAULT_STATE_DIR
    folder = state_dir or Path(given)
    paths = [_path(address, folder) for address in _listening(coordinator)]
    path = next((path for path in paths if path.exists()), paths[0])
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(_MAX_BYTES)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BadRequest(f"tokens file {path} cannot be read: {error.strerror}; run as the user of `up`") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadRequest(
            f"tokens file {path} has mode {stat.S_IMODE(mode):04o}, which lets other users read it, must be 0600;"
            " restart `outrider up`, which makes new tokens"
        )
    try:
        return str(json.loads(data).get(name, ""))
    except (ValueError, AttributeError) as error:
        raise BadRequest(f"tokens file {path} is damaged; restart `outrider up`, which makes a new one") from error


def _path(coordinator: str, state_dir: Path) -> Path:
    """Return the file of the coordinator that listens at this address of this machine."""
    host, port = split_address(coordinator)
    return state_dir.expanduser() / f"tokens-{host.lower()}-{port}"


def _listening(coordinator: str) -> list[str]:
    """Return the addresses of which one is a coordinator's that can be reached at this one.

    127.0.0.1 and ::1 are two: programs of two users may listen there, at one port.
    """
    host, port = split_address(coordinator)
    hosts = (
        [host, "127.0.0.1", "0.0.0.0"] if host.lower() == "localhost" else [host, "::" if ":" in host else "0.0.0.0"]
    )
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in dict.fromkeys([*hosts, "::"])]
