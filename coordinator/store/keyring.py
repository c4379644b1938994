"""Keep the key that signs tickets, and the public keys of all coordinators over one Redis."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import BadRequest
from outrider.wire.ticket import Signer

FILE = "ticket-key.pem"
_REMEDY = "give another --state-dir"
MAX_KEYS = 64
"""Coordinators whose keys are in use at once, including rotated keys."""


class Keyring:
    """The signer of this coordinator and the public keys of all, which are kept here since Redis may forget them."""

    def __init__(self, signer: Signer) -> None:
        self.signer = signer
        self._others: dict[str, bytes] = {}

    @property
    def public_keys(self) -> Mapping[str, bytes]:
        """Return raw public keys by key id, including this coordinator's own."""
        return {**self._others, self.signer.key_id: self.signer.public_key}

    async def exchange(self, store: RedisStore, forget_ms: int) -> None:
        """Publish our public key, learn the others', and forget those unused for forget_ms. Raises Unavailable."""
        own = f"{self.signer.key_id}:{self.signer.public_key.hex()}"
        entries = await store.run("public_keys", [keys.PUBLIC_KEYS], [own, forget_ms])
        self.learn({name: bytes.fromhex(raw) for name, raw in (entry.split(":", 1) for entry in entries)})

    def learn(self, public_keys: Mapping[str, bytes]) -> None:
        """Add the keys of other coordinators; the keys that were seen longest ago make room."""
        for key_id, key in public_keys.items():
            if key_id != self.signer.key_id:
                self._others.pop(key_id, None)
                self._others[key_id] = key
        while len(self._others) >= MAX_KEYS:
            del self._others[next(iter(self._others))]


def load_or_create(state_dir: Path) -> Signer:
    """Return the signing key in the state directory, which is made at first use.

    Two processes that start together agree on one key. Raises BadRequest for a file that other users may read or that
    is no Ed25519 key.
    """
    path = state_dir.expanduser() / FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
    except OSError as error:
        raise BadRequest(f"signing key {path} cannot be made: {error.strerror}; {_REMEDY}") from error
    return Signer.load(path, "signing key", _REMEDY)


def _create(path: Path) -> None:
    """Write the key whole under another name first, so that no process reads half a key; the first writer wins."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=FILE) as file, contextlib.suppress(FileExistsError):
        file.write(Signer.generate().pem())
        file.flush()
        os.link(file.name, path)
