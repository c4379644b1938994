"""Create and load the publisher's key, whose owner can put drafts on every device that trusts it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest
from outrider.wire.ticket import Signer

_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO


def create(path: Path) -> Signer:
    """Create a key in a file that only its owner can read. Raises BadRequest if the file exists."""
    path = path.expanduser()
    if path.exists():
        raise BadRequest(f"{path} exists; a key that devices trust is not overwritten: give another name", field="key")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_files.write(path, Signer.generate().pem(), mode=0o600)
    return load(path)


def load(path: Path) -> Signer:
    """Load a key. Raises BadRequest if the file is missing, accessible to other users, or no Ed25519 key."""
    path = path.expanduser()
    try:
        mode, pem = os.stat(path).st_mode, path.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"publisher key {path} cannot be read: {error.strerror}; make one with `outrider-distill key`", field="key"
        ) from error
    if mode & _OTHER_USERS:
        raise BadRequest(f"publisher key {path} is accessible to other users; run: chmod 600 {path}", field="key")
    return Signer.from_pem(pem)
