"""The key that signs tickets, and the public keys of all coordinators over this Redis."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from outrider.core.errors import BadRequest
from outrider.wire.ticket import Signer

FILE = "ticket-key.pem"
MAX_KEYS = 64
"""Coordinators whose keys are in use at once, rotated ones included."""


class Keyring:
    """Our own signer beside everybody's public keys. Keeps what it has seen: Redis may forget them."""

    def __init__(self, signer: Signer) -> None:
        self.signer = signer
        self._others: dict[str, bytes] = {}

    @property
    def public_keys(self) -> Mapping[str, bytes]:
        """Key id -> raw key, our own included."""
        return {**self._others, self.signer.key_id: self.signer.public_key}

    def learn(self, keys: Mapping[str, bytes]) -> None:
        """Add the keys of other coordinators; those not heard of for longest make room."""
        for key_id, key in keys.items():
            if key_id != self.signer.key_id:
                self._others.pop(key_id, None)
                self._others[key_id] = key
        while len(self._others) >= MAX_KEYS:
            del self._others[next(iter(self._others))]


def load_or_create(state_dir: Path) -> Signer:
    """The signing key in the state directory, made on first use. Two processes that start together agree on one.

    Raises BadRequest for a file that others may read or that is no Ed25519 key.
    """
    path = state_dir.expanduser() / FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        return _load(path)
    except OSError as error:
        raise BadRequest(f"signing key {path} cannot be used: {error.strerror}; give another --state-dir") from error


def _create(path: Path) -> None:
    """Written whole under another name first, so that nobody reads half a key; the first of two writers wins."""
    draft = path.with_name(f"{FILE}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(Signer.generate().pem())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _load(path: Path) -> Signer:
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadRequest(f"signing key {path} can be used by others; run: chmod 600 {path}", field="key")
    return Signer.from_pem(path.read_bytes())
