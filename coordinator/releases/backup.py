"""A copy of what was decided of releases, in the state directory.

Redis may keep nothing, or come back as it was a while ago, and a bad draft that was rolled back must not go on trial
again, nor a good one prove itself twice. Of each target the copy with the greater revision counts, wherever it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.releases.records import ReleaseTrack, State
from coordinator.releases.store import Read, ReleaseStore, found
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

FILE = "releases.json"


class Backup:
    """Of one coordinator. Several over one Redis have one each; the first that finds something lost puts it back."""

    def __init__(self, state_dir: Path, releases: ReleaseStore) -> None:
        self._path = state_dir.expanduser() / FILE
        self._releases = releases
        self._kept = {one.line.weights_hash: one for one in _load(self._path)}

    async def restore(self, there: Sequence[Read], now: float) -> bool:
        """Put back what is lost or older in the store than here. True where any of it went in. Raises Unavailable.

        there: all that the store has.
        """
        by_target = {one.line.weights_hash: one for one in there}
        restored = False
        for weights, kept in self._kept.items():
            before = by_target.get(weights, Read(ReleaseTrack(weights), ""))
            if before.readable and before.line.revision < kept.line.revision:
                restored |= await self._releases.swap(before, _begun_anew(kept.line, before.line, now))
        if restored:
            log.warning("the store had lost decisions on draft releases; put back what %s knows of them", self._path)
        return restored

    async def keep(self, there: Sequence[Read]) -> None:
        """Copy what is not older than the copy. A disk that is full is no reason to stop.

        A target that the store does not know any more stays.
        """
        newer = {one.line.weights_hash: one for one in there if one.readable and not self._older(one)}
        kept = {**self._kept, **newer}
        if kept == self._kept:
            return
        try:
            await asyncio.to_thread(_save, self._path, {weights: one.written for weights, one in kept.items()})
        except OSError as error:
            log.warning("%s cannot be written (%s): draft releases live in Redis alone", self._path, error.strerror)
        self._kept = kept

    def _older(self, one: Read) -> bool:
        kept = self._kept.get(one.line.weights_hash)
        return kept is not None and one.line.revision < kept.line.revision


def _begun_anew(kept: ReleaseTrack, lost: ReleaseTrack, now: float) -> ReleaseTrack:
    """The samples of a trial are lost with the store: its window begins again. No version is taken twice."""
    releases = tuple(replace(r, since_unix=now) if r.state is State.CANARY else r for r in kept.releases)
    newest = max(kept.newest, lost.newest)
    return replace(kept, newest=newest, releases=releases, revision=kept.revision + 1)


def _load(path: Path) -> list[Read]:
    """What can be read of it."""
    try:
        targets = json.loads(path.read_text())
        read = [found(str(weights), str(text)) for weights, text in targets.items()]
        return [one for one in read if one.readable]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return []


def _save(path: Path, texts: dict[str, str]) -> None:
    atomic_files.write(path, json.dumps(texts).encode(), mode=0o600)
