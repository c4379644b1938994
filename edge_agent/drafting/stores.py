"""Hold the n-gram store that a client's sessions draft with, and replace it while they run.

A store is shared by all n-gram sources of a client. A source that finds another one in its place, with the tokens that
come next, reads its text again and goes on: no token waits, and no node of the tree is lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from edge_agent.drafting.health import DraftHealth
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.ngram import NgramTable
from outrider.wire.ticket import Target


class LoadedStore:
    """A store in memory, or none; what is counted in `health` is how the n-gram sources do with it.

    release: hex digest of its file. tenant: whose sessions it was made of, as the file says. It has the members of a
    `DraftPool` by which releases are tried.
    """

    closing = False
    has_model = True

    def __init__(
        self, table: NgramTable | None = None, release: str = "", health: DraftHealth | None = None, tenant: str = ""
    ) -> None:
        self.table = table
        self.release = release
        self.tenant = tenant
        self.health = health or DraftHealth()

    @classmethod
    async def load(cls, path: Path, digest: str, health: DraftHealth, target: Target, vocabulary: int) -> LoadedStore:
        """Map a file into memory and check it. Raises BadRequest, ModelRefused for another target's, or OSError."""
        store = await asyncio.to_thread(NgramStore.load, path, vocabulary)
        store.check(weights_hash=target.weights_hash, tokenizer_hash=target.tokenizer_hash)
        return cls(store.table, digest, health, store.tenant)

    async def warm_up(self) -> None:
        """Do nothing: a store is ready once it is checked."""

    async def close(self) -> None:
        """Do nothing: the file is unmapped when no source uses it any more."""


class StoreManager:
    """Gives a client's n-gram sources their store. Sources read `table` on threads of their own."""

    def __init__(self) -> None:
        self._without = LoadedStore()
        self.pool = self._without

    @property
    def table(self) -> NgramTable | None:
        """Return the store in use; None for none."""
        return self.pool.table

    @property
    def release(self) -> str:
        """Return the digest of the store in use; empty for none."""
        return self.pool.release

    def count(self, accepted: bool) -> None:
        """Count a position at which an n-gram source was asked and the target's token became known."""
        self.pool.health.count(accepted)

    def failed(self, reason: str) -> None:
        """Record why an n-gram source gave up for a session."""
        self.pool.health.failed(reason)

    def replace(self, pool: LoadedStore | None) -> None:
        """Let all sources draft with another store, or with none."""
        self.pool = pool or self._without

    def recall(self, release: str) -> bool:
        """Return False: a store that was replaced is not kept."""
        return False

    async def retired(self, within_s: float | None = None) -> bool:
        """Return True: a store that was replaced is only pages of a file."""
        return True
