"""Read the n-gram stores of tenants from a folder of the verifier, one file for each, and again when one is replaced.

A tenant's sessions get that tenant's store alone. Files are read on a thread of their own, so that no step waits, and
into memory, since an operator may overwrite them in place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outrider.artifacts.ngram_store import SUFFIX, NgramStore
from outrider.core.errors import OutriderError
from outrider.core.ngram import NgramTable
from outrider.wire.bounds import is_label

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at a tenant's file while it has sessions."""
MAX_TENANTS = 1_024
"""Tenants that are remembered, with or without a file."""
MAX_BYTES = 1 << 30
"""Bytes of all stores in memory; those that were not asked for for the longest time go first."""


@dataclass(eq=False)
class _Entry:
    """Holds what is known of one tenant's file."""

    looked_s: float = float("-inf")
    stamp: tuple[int, int, int] | None = None
    """Of the file that was read last, or could not be; None without a file."""
    store: NgramStore | None = None
    reading: Future[None] | None = None


class TenantStores:
    """Gives each tenant's n-gram table. Not thread-safe.

    weights_hash: of the target ("sha256:<hex>"), whose stores alone are taken. vocabulary: number of its token ids.
    """

    def __init__(
        self, folder: Path, weights_hash: str, vocabulary: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to read the stores that are there, the newest first, as far as the memory for them goes."""
        self._folder = folder.expanduser()
        self._weights_hash = weights_hash
        self._vocabulary = vocabulary
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        """Held while entries are added or forgotten."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ngram-stores")
        entries = [(tenant, _Entry(self._clock())) for tenant in self._newest()]
        self._entries.update(reversed(entries))  # the oldest one is forgotten first
        for tenant, entry in entries:
            entry.reading = self._reader.submit(self._look, tenant, entry)

    def of(self, tenant: str) -> NgramTable | None:
        """Return a tenant's table as it was read last; None where there is none, or none that can be used, so far."""
        if not tenant or not is_label(tenant):
            return None
        with self._lock:
            entry = self._entries.setdefault(tenant, _Entry())
            self._entries.move_to_end(tenant)
        if (entry.reading is None or entry.reading.done()) and self._clock() - entry.looked_s >= LOOK_S:
            entry.looked_s = self._clock()
            entry.reading = self._reader.submit(self._look, tenant, entry)
            with self._lock:
                self._make_room()
        return entry.store.table if entry.store is not None else None

    def wait(self) -> None:
        """Wait until all that is being read is read, for tests and for the start."""
        for entry in list(self._entries.values()):
            if entry.reading is not None:
                entry.reading.result()

    def _newest(self) -> list[str]:
        """Return the tenants of the newest files that fit into memory together, the newest one first."""
        files = []
        for file in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        files = sorted(files, reverse=True)[:MAX_TENANTS]
        sizes = itertools.accumulate(size for _, size, _ in files)
        names = [file.stem for (_, _, file), size in zip(files, sizes, strict=True) if size <= MAX_BYTES]
        return [name for name in names if is_label(name)]

    def close(self) -> None:
        """Read nothing any more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _look(self, tenant: str, entry: _Entry) -> None:
        """Read a tenant's file if it is another one than before."""
        path = self._folder / f"{tenant}{SUFFIX}"
        try:
            stat = path.stat()
            stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
        except OSError:
            entry.stamp, entry.store = None, None
            return
        if stamp == entry.stamp:
            return
        try:
            store = NgramStore.load(path, self._vocabulary, mapped=False)
            store.check(weights_hash=self._weights_hash, tenant=tenant)
        except (OSError, OutriderError) as error:
            log.warning("the n-gram store of tenant %s is not used: %s", tenant, error)
            entry.stamp, entry.store = stamp, None
            return
        log.info(
            "n-gram store of tenant %s: %d n-grams of %d sessions", tenant, len(store.table.tokens), store.sessions
        )
        entry.stamp, entry.store = stamp, store
        with self._lock:
            self._make_room()

    def _make_room(self) -> None:
        """Forget the tenants that were not asked for for the longest time, but never the latest one."""
        size = sum(entry.store.size for entry in self._entries.values() if entry.store is not None)
        while len(self._entries) > 1 and (size > MAX_BYTES or len(self._entries) > MAX_TENANTS):
            _, entry = self._entries.popitem(last=False)
            size -= entry.store.size if entry.store is not None else 0
