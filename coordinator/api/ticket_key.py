"""Read the key that signs tickets, which all coordinators over one Redis share.

The file holds one Ed25519 key as PEM, or two while one replaces the other: the first signs, and tickets of both are
taken. So to replace it, give all coordinators the file with the new key behind the old one, then with the two
exchanged, and leave the old one out once its tickets have expired.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest
from outrider.wire.ticket import Signer

FILE = "ticket-key.pem"
MOST = 2
"""Keys in a file."""
_END = "-----END PRIVATE KEY-----"


class TicketKeys(NamedTuple):
    """The key that signs, and the keys whose tickets are taken."""

    signer: Signer
    public_keys: Mapping[str, bytes]
    """Raw public keys by key id."""


def load(config: CoordinatorConfig) -> TicketKeys:
    """Return the keys of `ticket_key`, or of the file in the state directory, which is made at first use.

    Raises BadRequest for a file that other users may read, or that does not hold one or two Ed25519 keys.
    """
    path = (config.ticket_key or config.state_dir / FILE).expanduser()
    if config.ticket_key is None:
        _make(path)
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"ticket key {path} cannot be read: {error}; make one with `openssl genpkey -algorithm ed25519`",
            field="ticket_key",
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IRWXO):  # a Kubernetes Secret may be read by its pod's group
        raise BadRequest(f"ticket key {path} is accessible to other users; run: chmod 600 {path}", field="ticket_key")
    signers = [Signer.from_pem((pem + _END).encode()) for pem in text.split(_END)[:-1]]
    if not 1 <= len(signers) <= MOST:
        raise BadRequest.bound("ticket_key", f"{len(signers)} keys in {path}", f"1 to {MOST}")
    return TicketKeys(signers[0], {one.key_id: one.public_key for one in signers})


def _make(path: Path) -> None:
    """Make a key unless there is one. It is written whole under another name first; the first writer wins."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:
            file.write(Signer.generate().pem())
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    except OSError as error:
        raise BadRequest(
            f"ticket key {path} cannot be made: {error.strerror}; give another --state-dir", field="state_dir"
        ) from error
