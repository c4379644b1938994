"""A copy of what was decided of releases, in the state directory.

Redis may keep nothing, and a bad draft that was rolled back must not go on trial again, nor a good one prove itself
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.releases.records import Line, State
from coordinator.releases.store import Read, ReleaseStore, read

log = logging.getLogger(__name__)

FILE = "releases.json"


class Backup:
    """Of one coordinator. Several over one Redis have one each; the first that finds Redis empty puts its own back."""

    def __init__(self, state_dir: Path, releases: ReleaseStore) -> None:
        self._path = state_dir.expanduser() / FILE
        self._releases = releases
        self._kept = _load(self._path)

    async def restore(self, now: float) -> bool:
        """Put the copy in place of nothing. True where any of it went in. Raises Unavailable."""
        restored = [
            await self._releases.swap(Read(Line(weights), ""), _begun_anew(read(weights, text), now))
            for weights, text in self._kept.items()
        ]
        if any(restored):
            log.warning("the store had lost the draft releases; put back what %s knows of them", self._path)
        return any(restored)

    async def keep(self, found: Sequence[Read]) -> None:
        """Copy what there is, if it is not what is there already. A disk that is full is no reason to stop."""
        texts = {one.line.weights_hash: one.written for one in found}
        if not texts or texts == self._kept:
            return
        try:
            await asyncio.to_thread(_save, self._path, texts)
        except OSError as error:
            log.warning("%s cannot be written (%s): draft releases live in Redis alone", self._path, error.strerror)
        self._kept = texts


def _begun_anew(line: Line, now: float) -> Line:
    """The samples of a trial are lost with the store: its window begins again."""
    releases = tuple(replace(r, since_unix=now) if r.state is State.CANARY else r for r in line.releases)
    return replace(line, releases=releases)


def _load(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
        return {str(weights): str(text) for weights, text in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return {}


def _save(path: Path, texts: dict[str, str]) -> None:
    """Whole or not at all, as after a power cut."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{FILE}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(texts, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
