"""Keep the tokens that `outrider up` makes in a file where the same user's other commands on this machine find them.

The file names the coordinator, so that no other one is shown a token. A second cluster at the same time needs a state
directory of its own.
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
_FILE = "tokens.json"


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def kept(tokens: Mapping[str, str], coordinator: str, state_dir: Path) -> Iterator[Path]:
    """Keep tokens by name for a coordinator's address until the body ends; yield their file.

    Raises BadRequest if it cannot be written.
    """
    path = state_dir.expanduser() / _FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_files.write(path, json.dumps({"coordinator": coordinator, **tokens}).encode(), mode=0o600)
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
    folder = state_dir or Path(os.environ.get("OUTRIDER_COORDINATOR_STATE_DIR") or DEFAULT_STATE_DIR)
    path = folder.expanduser() / _FILE
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read()
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
        tokens = json.loads(text)
        return str(tokens.get(name, "")) if _reaches(coordinator, tokens["coordinator"]) else ""
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"tokens file {path} is damaged; restart `outrider up`, which makes a new one") from error


def _reaches(address: str, listening: str) -> bool:
    """Return whether the coordinator that listens at one address is reached at another one of this machine.

    127.0.0.1 and ::1 are two: programs of two users may listen there, at one port.
    """
    (host, port), (own, own_port) = split_address(address), split_address(listening)
    host = "127.0.0.1" if host.lower() == "localhost" else host
    return port == own_port and own in (host, "localhost", "::" if ":" in host else "0.0.0.0", "::")
