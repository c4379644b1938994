"""Load a target's draft releases; each change is written to disk first, so that the next start notices a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import RefusalKind, ReleaseRefused
from edge_agent.releases.folder import ReleaseFolder
from edge_agent.releases.state import MOST_LOADS, InstalledRelease, ReleaseState
from outrider.core.errors import VocabularyMismatch

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
"""A draft that has not started within this time is refused."""

LoadPool = Callable[[Path, str, str], Awaitable[DraftPool]]
"""(file, displayed name, digest) -> pool. Raises VocabularyMismatch if the target's is another."""


class RefusalLog:
    """Logs and counts releases that were refused or given up, each release once per kind of refusal."""

    def __init__(self) -> None:
        self.by_kind: Counter[RefusalKind] = Counter()
        self._seen: set[tuple[str, str]] = set()

    def note(self, kind: RefusalKind, manifest: str, reason: str) -> None:
        """Log and count a refusal. manifest: digest of the release's manifest."""
        if (kind, manifest) not in self._seen:
            self._seen.add((kind, manifest))
            self.by_kind[kind] += 1
            log.warning("a draft release is not used (%s): %s", kind, reason)


class ReleaseLoader:
    """Loads a folder's releases; only reads them if another process has its lock. trusted: publishers' key ids."""

    def __init__(self, folder: ReleaseFolder, load: LoadPool, refusals: RefusalLog, trusted: Collection[str]) -> None:
        self.folder = folder
        self._load = load
        self._refusals = refusals
        self._trusted = trusted

    @property
    def state(self) -> ReleaseState:
        return self.folder.state

    async def change(self, state: ReleaseState) -> None:
        """Change the state, and write it to disk if there is room."""
        await asyncio.to_thread(self.folder.change, state)

    async def load_first(self) -> DraftPool | None:
        """Load the draft to start with; return None for the fallback."""
        if not self.folder.writable:
            return await self._load_unchanged()
        await self.recover()
        return await self.load_current()

    async def recover(self) -> None:
        """Recover from a crash of an earlier process, and drop releases of publishers that are no longer trusted."""
        if self.state.loads >= MOST_LOADS:
            await self.give_up("crashed", "processes have ended while they loaded it")
        trusting = self.state.trusting(self._trusted)
        if trusting != self.state:
            log.warning("releases of publishers that are no longer in OUTRIDER_EDGE_RELEASE_KEYS are given up")
            await self.change(trusting)
        await asyncio.to_thread(self.folder.tidy)

    async def load_current(self) -> DraftPool | None:
        """Load the current release, or the last good one if that fails; return None for the fallback."""
        while (release := self.state.current) is not None:
            if not await self._is_intact(release):
                log.warning(
                    "the file of release %s is damaged or gone: it is fetched again when offered", release.digest
                )
                await self.change(self.state.dropped())
                continue
            await self.change(self.state.loading())
            try:
                return await self._load_and_record(release)
            except ReleaseRefused as error:
                await self.give_up(error.kind, str(error))
        return None

    async def take(self, release: InstalledRelease) -> DraftPool:
        """Make another release, whose file is in the folder, the current one, and load it.

        Raises ReleaseRefused; then the release before is current again.
        """
        before = self.state
        try:
            await asyncio.to_thread(self.folder.write, before.take(release).loading())
        except OSError as error:  # without this record, a release that crashes the process would do so at every start
            raise ReleaseRefused(
                "no room", f"{self.folder.path} cannot be written: {error}; make it writable"
            ) from error
        try:
            return await self._load_and_record(release)
        except ReleaseRefused as error:
            refused = self.state.gave_up(error.kind, str(error), time.time()).refused
            await self.change(before.model_copy(update={"refused": refused}))
            raise

    async def give_up(self, kind: RefusalKind, reason: str) -> None:
        """Go back to the last good release, and refuse the current one, which has failed."""
        release = self.state.current
        if release is None:
            return
        await self.change(self.state.gave_up(kind, reason, time.time()))
        good = self.state.current
        fallback = f"release {good.digest[:12]} (version {good.version})" if good else "n-grams alone"
        self._refusals.note(
            kind,
            release.manifest,
            f"release {release.digest[:12]} (version {release.version}) was given up: {reason}; back to {fallback}, "
            "and this one is not taken again before `outrider-edge releases forget`",
        )

    async def _load_unchanged(self) -> DraftPool | None:
        """Load the release that the process with the lock has loaded, and leave the folder as it is."""
        state = self.state.trusting(self._trusted)
        release = state.last_good if state.loads else state.current
        if release is None or not await self._is_intact(release):
            return None
        try:
            return await self._load_pool(release)
        except ReleaseRefused as error:
            log.warning("%s", error)
            return None

    async def _is_intact(self, release: InstalledRelease) -> bool:
        return await asyncio.to_thread(self.folder.files.verify, release.digest)

    async def _load_and_record(self, release: InstalledRelease) -> DraftPool:
        """Load the current release, which the state says is being loaded, and record success. Raises ReleaseRefused."""
        pool = await self._load_pool(release)
        try:
            await self.change(self.state.loaded())
        except BaseException:
            await pool.close()
            raise
        return pool

    async def _load_pool(self, release: InstalledRelease) -> DraftPool:
        """Load a release and start its first worker. Raises ReleaseRefused, or ImportError if llama.cpp is missing."""
        name = f"release {release.digest[:12]} (version {release.version})"
        file = self.folder.files.path(release.digest)
        pool: DraftPool | None = None
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                pool = await self._load(file, f"version {release.version}", release.digest)
                await pool.warm_up()
            if pool.start_failure:
                raise ReleaseRefused("unusable", f"{name}: {pool.start_failure}")
            return pool
        except BaseException as error:
            if pool is not None:
                await pool.close()
            # The release is not at fault if llama.cpp is missing or if loading was cancelled.
            if isinstance(error, ReleaseRefused | ImportError) or not isinstance(error, Exception):
                raise
            if isinstance(error, VocabularyMismatch):
                message = f"{name} has another vocabulary than the target: {error}"
                raise ReleaseRefused("vocabulary", message) from error
            timed_out = isinstance(error, TimeoutError)
            reason = f"had not started after {_LOAD_TIMEOUT_S:.0f} s" if timed_out else f"cannot be loaded: {error}"
            raise ReleaseRefused("unusable", f"{name} {reason}") from error
