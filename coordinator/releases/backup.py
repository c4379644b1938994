"""Keep a copy of the releases' states in the state directory.

Redis may keep nothing, or come back with old data. Then a bad draft that was rolled back must not go on trial again,
nor a good one prove itself twice. Of two copies of a target's track the one with the greater revision counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.releases.records import LifecycleState, ReleaseTrack
from coordinator.releases.store import ReleaseStore, StoredTrack, parsed
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

FILE = "releases.json"


class ReleaseBackup:
    """Keep the copy of one coordinator. Of several over one Redis, the first that finds something lost puts it back."""

    def __init__(self, state_dir: Path, store: ReleaseStore) -> None:
        self._path = state_dir.expanduser() / FILE
        self._store = store
        self._kept = {kept.track.weights_hash: kept for kept in _load(self._path)}

    async def restore(self, stored: Sequence[StoredTrack], now: float) -> bool:
        """Put back the tracks that the store has lost, or has in an older revision. Raises Unavailable.

        stored: all tracks of the store. Returns whether any of it was changed.
        """
        by_target = {one.track.weights_hash: one for one in stored}
        restored = False
        for weights, kept in self._kept.items():
            before = by_target.get(weights, StoredTrack(ReleaseTrack(weights), ""))
            if before.readable and before.track.revision < kept.track.revision:
                restored |= await self._store.swap(before, _restarted(kept.track, before.track, now))
        if restored:
            log.warning("the store had lost decisions on draft releases; put back what %s knows of them", self._path)
        return restored

    async def keep(self, stored: Sequence[StoredTrack]) -> None:
        """Copy the tracks that are not older than the copy. A disk that is full is logged and is no reason to stop.

        The copy keeps targets that the store does not know any more.
        """
        newer = {one.track.weights_hash: one for one in stored if one.readable and not self._older(one)}
        kept = {**self._kept, **newer}
        if kept == self._kept:
            return
        texts = {weights: one.text for weights, one in kept.items()}
        try:
            await asyncio.to_thread(atomic_files.write, self._path, json.dumps(texts).encode(), mode=0o600)
        except OSError as error:
            log.warning("%s cannot be written (%s): draft releases live in Redis alone", self._path, error.strerror)
        self._kept = kept

    def _older(self, one: StoredTrack) -> bool:
        kept = self._kept.get(one.track.weights_hash)
        return kept is not None and one.track.revision < kept.track.revision


def _restarted(kept: ReleaseTrack, lost: ReleaseTrack, now: float) -> ReleaseTrack:
    """Return the kept track with its trial's window begun anew, since samples are lost. No version is taken twice."""
    releases = tuple(replace(r, since_unix=now) if r.state is LifecycleState.CANARY else r for r in kept.releases)
    newest = max(kept.newest, lost.newest)
    return replace(kept, newest=newest, releases=releases, revision=kept.revision + 1)


def _load(path: Path) -> list[StoredTrack]:
    """Return the tracks of the copy that this version can read."""
    try:
        targets = json.loads(path.read_text())
        tracks = [parsed(str(weights), str(text)) for weights, text in targets.items()]
        return [one for one in tracks if one.readable]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return []
