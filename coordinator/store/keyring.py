"""Keep the key that signs tickets, and the public keys of all coordinators over one Redis.

Who can write to Redis could publish a key of his own there. So coordinators that share a cluster key prove with it (an
HMAC) that a public key is one of theirs, and believe no other. Without a cluster key they believe Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.config import CoordinatorConfig
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire.ticket import Signer, key_id_of

log = logging.getLogger(__name__)

FILE = "ticket-key.pem"
CLUSTER_FILE = "cluster-key"
_REMEDY = "give another --state-dir"
MAX_KEYS = 64
"""Coordinators whose keys are in use at once, including rotated keys."""
MAX_READ = 256
"""Public keys that are read from Redis, the latest; others may have written more there."""
MAX_REVOKED = 1_024
"""Revoked keys that are remembered, the latest."""
MIN_CLUSTER_KEY = 16
"""Characters of a cluster key."""
_STORED = (keys.PUBLIC_KEYS, keys.PUBLIC_KEY_PROOFS, keys.REVOKED_KEYS)


@dataclass(frozen=True)
class PublicKey:
    """A coordinator's public key, as operators see it."""

    key_id: str
    seen_unix: float = 0.0
    """When a coordinator vouched for it last, in seconds; 0 where none does."""
    revoked_unix: float = 0.0
    """When it was revoked, in seconds; 0: it was not."""
    trusted: bool = False
    """Whether verifiers are told it, so that they take its tickets."""
    own: bool = False
    """Whether the coordinator that was asked signs with it."""


class Keyring:
    """The signer of this coordinator and the public keys of all, which are kept here since Redis may forget them.

    cluster_keys: the first proves our own public key, each proves others'; none for believing Redis. state_dir: where
    another signer is kept when an operator revokes this one.
    """

    def __init__(self, signer: Signer, cluster_keys: Sequence[bytes] = (), state_dir: Path | None = None) -> None:
        self.signer = signer
        self.pinned = bool(cluster_keys)
        """Whether public keys need a proof."""
        self._cluster_keys = cluster_keys
        self._state_dir = state_dir
        self._others: dict[str, bytes] = {}
        self._revoked: frozenset[str] = frozenset()
        self._refused: set[str] = set()
        """Key ids without a proof that were logged."""

    @property
    def public_keys(self) -> Mapping[str, bytes]:
        """Return raw public keys by key id, including this coordinator's own, without those that were revoked."""
        everything = {**self._others, self.signer.key_id: self.signer.public_key}
        return {key_id: key for key_id, key in everything.items() if key_id not in self._revoked}

    async def exchange(self, store: RedisStore, forget_ms: int) -> list[PublicKey]:
        """Publish our public key, learn the others', and forget those unused for forget_ms; return all.

        If ours was revoked, make another one and publish that. Raises Unavailable.
        """
        while True:
            own = f"{self.signer.key_id}:{self.signer.public_key.hex()}"
            proof = _proof(self._cluster_keys[0], own) if self._cluster_keys else ""
            arguments = [own, proof, self.signer.key_id, forget_ms, MAX_READ, MAX_REVOKED]
            found, revoked = await store.run("public_keys", _STORED, arguments)
            revoked_at = dict(zip(revoked[::2], (float(at) / 1000 for at in revoked[1::2]), strict=True))
            before = [key_id for key_id in self._revoked if key_id not in revoked_at]
            self._revoked = frozenset([*before, *revoked_at][-2 * MAX_REVOKED :])  # Redis may bring others each time
            if self.signer.key_id not in self._revoked:
                break
            await self._replace_signer()
        seen_at: dict[str, float] = {}
        for entry, proof, at in zip(found[::3], found[1::3], found[2::3], strict=True):
            key_id = entry.partition(":")[0]
            seen_at[key_id] = float(at) / 1000
            if (key := self._believed(entry, proof)) is not None:
                self.learn({key_id: key})
        return [
            self._listed(key_id, seen_at, revoked_at) for key_id in sorted({*seen_at, *revoked_at, *self.public_keys})
        ]

    async def revoke(self, store: RedisStore, key_id: str) -> None:
        """Take no ticket of this key any more, in every coordinator. Raises Unavailable."""
        await store.run("revoke_key", _STORED, [key_id, MAX_REVOKED])

    def learn(self, public_keys: Mapping[str, bytes]) -> None:
        """Add the keys of other coordinators; the keys that were seen longest ago make room."""
        for key_id, key in public_keys.items():
            if key_id != self.signer.key_id:
                self._others.pop(key_id, None)
                self._others[key_id] = key
        while len(self._others) >= MAX_KEYS:
            del self._others[next(iter(self._others))]

    def _believed(self, entry: str, proof: str) -> bytes | None:
        """Return the raw key of an entry in Redis; None for one that no coordinator of this cluster has written."""
        key_id, _, written = entry.partition(":")
        with contextlib.suppress(ValueError):
            key = bytes.fromhex(written)
            proven = any(hmac.compare_digest(_proof(one, entry), proof) for one in self._cluster_keys)
            if len(key) == 32 and key_id_of(key) == key_id and (proven or not self.pinned):
                return key
        if key_id not in self._refused and len(self._refused) < MAX_REVOKED:
            self._refused.add(key_id)
            log.warning(
                "the public key %.64r in Redis is ignored: it is malformed, or has no proof by the cluster key; if it"
                " is a coordinator's, give all the same OUTRIDER_COORDINATOR_CLUSTER_KEY, else somebody else wrote it",
                key_id,
            )
        return None

    def _listed(self, key_id: str, seen_at: Mapping[str, float], revoked_at: Mapping[str, float]) -> PublicKey:
        own, trusted = key_id == self.signer.key_id, key_id in self.public_keys
        return PublicKey(key_id, seen_at.get(key_id, 0.0), revoked_at.get(key_id, 0.0), trusted, own)

    async def _replace_signer(self) -> None:
        """Sign with another key, in place of one that was revoked."""
        revoked = self.signer.key_id
        try:
            if self._state_dir is None:
                raise BadRequest("there is no state directory")
            self.signer = await asyncio.to_thread(_replaced, self._state_dir, self._revoked)
        except (OSError, OutriderError) as error:
            log.error("another ticket key cannot be kept, so it lasts until this process ends: %s", error)
            self.signer = Signer.generate()
        log.warning("ticket key %s was revoked; this coordinator signs with %s", revoked, self.signer.key_id)


def load_or_create(state_dir: Path) -> Signer:
    """Return the signing key in the state directory, which is made at first use.

    Two processes that start together agree on one key. Raises BadRequest for a file that other users may read or that
    is no Ed25519 key.
    """
    path = state_dir.expanduser() / FILE
    _make(path, lambda: Signer.generate().pem(), "signing key")
    return Signer.load(path, "signing key", _REMEDY)


def make_cluster_key(state_dir: Path) -> Path:
    """Make a cluster key in the state directory unless there is one, and return its file. Raises BadRequest."""
    path = state_dir.expanduser() / CLUSTER_FILE
    _make(path, lambda: secrets.token_hex(32).encode() + b"\n", "cluster key")
    return path


def cluster_keys(config: CoordinatorConfig) -> tuple[bytes, ...]:
    """Return the cluster's keys, by the settings or the file in the state directory. Raises BadRequest."""
    path = config.state_dir.expanduser() / CLUSTER_FILE
    if config.cluster_key is not None:
        where, given = "OUTRIDER_COORDINATOR_CLUSTER_KEY", config.cluster_key.get_secret_value().split(",")
    else:
        where = str(path)
        try:
            mode, given = path.stat().st_mode, path.read_text().split()
        except FileNotFoundError:
            return ()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"cluster key {path} cannot be read: {error}; {_REMEDY}", field="cluster_key") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadRequest(f"cluster key {path} is accessible to other users; run: chmod 600 {path}")
    found = [key.strip().encode() for key in given if key.strip()]
    if not found or min(map(len, found)) < MIN_CLUSTER_KEY:
        raise BadRequest(
            f"{where} has a key of less than {MIN_CLUSTER_KEY} characters; make one with openssl rand -hex 32",
            field="cluster_key",
        )
    return tuple(found)


def _proof(cluster_key: bytes, entry: str) -> str:
    return hmac.new(cluster_key, b"outrider coordinator key " + entry.encode(), hashlib.sha256).hexdigest()


def _replaced(state_dir: Path, revoked: Collection[str]) -> Signer:
    """Return the key in the state directory, replaced by a new one if it is revoked. Raises OSError, BadRequest."""
    found = load_or_create(state_dir)
    if found.key_id in revoked:  # else another coordinator, which shares the folder, was faster
        found = Signer.generate()
        atomic_files.write(state_dir.expanduser() / FILE, found.pem(), mode=0o600)
    return found


def _make(path: Path, content: Callable[[], bytes], what: str) -> None:
    """Write a secret whole under another name first, so that no process reads half of it; the first writer wins."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:
            file.write(content())
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    except OSError as error:
        raise BadRequest(f"{what} {path} cannot be made: {error.strerror}; {_REMEDY}") from error
