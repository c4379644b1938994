"""The releases that this device has: loaded, tried, given up, each step written down before it is taken."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from edge_agent.drafting.health import DraftHealth, HitRate
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import Kind, ReleaseRefused
from edge_agent.releases.state import InstalledRelease, ReleaseState
from edge_agent.releases.store import SlotStore
from outrider.core.errors import VocabularyMismatch

log = logging.getLogger(__name__)

_LOAD_S = 120.0
"""A draft that has not begun by then does not do."""

Load = Callable[[Path, str, str, DraftHealth], Awaitable[DraftPool]]
"""(file, name for people, digest, health) -> its pool, compared with the target's token table."""


class RefusalLog:
    """What was not taken, or given up. Each release is said and counted once for each thing that was wrong with it."""

    def __init__(self) -> None:
        self.by_kind: Counter[Kind] = Counter()
        self._said: set[tuple[str, str]] = set()

    def note(self, kind: Kind, manifest: str, reason: str) -> None:
        """manifest: what the release is remembered by."""
        if (kind, manifest) not in self._said:
            self._said.add((kind, manifest))
            self.by_kind[kind] += 1
            log.warning("a draft release is not used (%s): %s", kind, reason)


class ReleaseLoader:
    """Over a store that this process keeps, or only reads. trusted: ids of the publishers' keys that are believed."""

    def __init__(self, store: SlotStore, load: Load, refusals: RefusalLog, trusted: Collection[str]) -> None:
        self.store = store
        self._load = load
        self._refusals = refusals
        self._trusted = trusted

    @property
    def state(self) -> ReleaseState:
        return self.store.state

    async def change(self, state: ReleaseState) -> None:
        """Holds at once, and is written down where the disk has room."""
        await asyncio.to_thread(self.store.hold, state)

    async def first(self) -> DraftPool | None:
        """The draft to start with; None for the verifier's own."""
        if not self.store.ours:
            return await self._look_in()
        await self.recover()
        return await self.current()

    async def recover(self) -> None:
        """Settle what the process before has left: a crash, releases of publishers that are not trusted any more."""
        if self.state.busy and (slot := self.state.current) is not None:
            if (struck := self.state.struck()) is not None:
                log.warning("the process ended while release %s was being loaded: it is tried once more", slot.digest)
                await self.change(struck)
            else:
                await self.give_up("crashed", "the process ended while the release was being loaded or on trial")
        trusting = self.state.trusting(self._trusted)
        if trusting != self.state:
            log.warning("releases of publishers that are not in OUTRIDER_EDGE_RELEASE_KEYS any more are left")
            await self.change(trusting)
        await asyncio.to_thread(self.store.tidy)

    async def current(self) -> DraftPool | None:
        """The current release, or the last good one where it does not do; None for the verifier's own draft."""
        while (slot := self.state.current) is not None:
            if not await asyncio.to_thread(self.store.files.verify, slot.digest):
                log.warning("the file of release %s is damaged or gone: it is fetched again when offered", slot.digest)
                await self.change(self.state.dropped())
                continue
            await self.change(self.state.loading())
            try:
                return await self._opened(slot)
            except ReleaseRefused as error:
                await self.give_up(error.kind, str(error))
        return None

    async def take(self, slot: InstalledRelease, before: HitRate) -> DraftPool:
        """A release whose file is here. Raises ReleaseRefused, and the last good one is the current one then."""
        now = time.time()
        try:
            await asyncio.to_thread(self.store.change, self.state.take(slot, before, now))
        except OSError as error:  # without a note of it, one that takes the process down would do so at every start
            raise ReleaseRefused("no room", f"{self.store.folder} cannot be written: {error}; mend that") from error
        try:
            return await self._opened(slot)
        except ReleaseRefused as error:
            await self.change(self.state.gave_up(error.kind, str(error), time.time()))
            raise

    async def give_up(self, kind: Kind, reason: str) -> None:
        """The current release did not do: remember that."""
        slot = self.state.current
        if slot is None:
            return
        await self.change(self.state.gave_up(kind, reason, time.time()))
        good = self.state.current
        back = f"release {good.digest[:12]} (version {good.version})" if good else "the verifier's own draft"
        day = "a day has passed, or " if kind == "worse" else ""  # it may have met texts that are none of its own
        self._refusals.note(
            kind,
            slot.manifest,
            f"release {slot.digest[:12]} (version {slot.version}) was given up: {reason}; back to {back}, and this one "
            f"is not taken again before {day}`outrider-edge releases forget`",
        )

    async def _look_in(self) -> DraftPool | None:
        """What another process has found good, without touching anything of it."""
        state = self.state.trusting(self._trusted)
        slot = state.last_good if state.busy or state.trial else state.current
        if slot is None or not await asyncio.to_thread(self.store.files.verify, slot.digest):
            return None
        try:
            return await self._pool(slot, DraftHealth())
        except ReleaseRefused as error:
            log.warning("%s", error)
            return None

    async def _opened(self, slot: InstalledRelease) -> DraftPool:
        """The pool of the current slot, whose file is whole; that it is being loaded has been written down."""
        trial = self.state.trial
        pool = await self._pool(slot, DraftHealth(trial.now.score if trial else None))
        try:
            await self.change(self.state.loaded())
        except BaseException:
            await pool.close()
            raise
        return pool

    async def _pool(self, slot: InstalledRelease, health: DraftHealth) -> DraftPool:
        """Loaded, and its first worker at work. Raises ReleaseRefused."""
        release = f"release {slot.digest[:12]} (version {slot.version})"
        pool: DraftPool | None = None
        try:
            async with asyncio.timeout(_LOAD_S):
                pool = await self._load(
                    self.store.files.path(slot.digest), f"version {slot.version}", slot.digest, health
                )
                await pool.warm_up()
            if health.failure:
                raise ReleaseRefused("unusable", f"{release} cannot start: {health.failure}")
            return pool
        except BaseException as error:
            if pool is not None:
                await pool.close()
            # What is no fault of the release: llama.cpp is not here, or nobody waits for it any more.
            if isinstance(error, ReleaseRefused | ImportError) or not isinstance(error, Exception):
                raise
            raise _unusable(release, error) from error


def _unusable(release: str, error: Exception) -> ReleaseRefused:
    """Whatever a file can make llama.cpp do, the session must not hear of it."""
    if isinstance(error, VocabularyMismatch):
        return ReleaseRefused("vocabulary", f"{release} has another vocabulary than the target: {error}")
    if isinstance(error, TimeoutError):
        return ReleaseRefused("unusable", f"{release} had not begun after {_LOAD_S:.0f} s")
    return ReleaseRefused("unusable", f"{release} cannot be loaded: {error}")
