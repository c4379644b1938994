"""Keep what a target's verifiers last said of it, which is enough to load its draft while none can be reached."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from edge_agent.target.artifact_client import Description
from outrider.artifacts import atomic_files
from outrider.core.errors import OutriderError

log = logging.getLogger(__name__)

_DESCRIPTION = TypeAdapter(Description)


class DescriptionCache:
    """Keeps one client's target description in a file under `folder`, named by cluster address and target."""

    def __init__(self, folder: Path, address: str, target: str) -> None:
        name = hashlib.sha256(f"{address}\n{target}".encode()).hexdigest()[:32]
        self._path = folder / f"{name}.json"

    def keep(self, description: Description) -> None:
        """Write the description down. A disk that cannot take it is logged, no more."""
        data = _DESCRIPTION.dump_json(description)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write(self._path, data, mode=0o600)
        except OSError as error:
            log.warning("the target's description cannot be cached, which offline generation needs: %s", error)

    def recall(self) -> Description | None:
        """Return the description; None where none was kept that can be read."""
        with contextlib.suppress(OSError, ValidationError):
            return _DESCRIPTION.validate_json(self._path.read_bytes())
        return None


class CachedSource:
    """An ArtifactSource without verifiers: a kept description, and the artifacts that are in the cache.

    Fetching anything else raises `cause`, the reason why no verifier can be reached.
    """

    def __init__(self, description: Description, cause: OutriderError) -> None:
        self._description = description
        self._cause = cause

    async def describe(self) -> Description:
        return self._description

    async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        nothing: tuple[bytes, ...] = ()
        for chunk in nothing:
            yield chunk
        raise self._cause
