"""Keep the latest responses in memory, for the requests that continue them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


class ResponseStore:
    """Holds JSON objects by their ids, within a number, a size in bytes and an age; the oldest go first.

    Each is kept as the bytes of its JSON, so that the size is exact and nobody changes what is kept. Nothing is written
    to disk.
    """

    def __init__(
        self, max_count: int, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes = 0
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: dict[str, tuple[float, bytes]] = {}
        """Time of keeping and data, the oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, name: str, content: dict[str, Any]) -> None:
        """Keep an object, and drop as many old ones as that takes. One beyond `max_bytes` is not kept."""
        self.remove(name)
        data = json.dumps(content, separators=(",", ":")).encode()
        if len(data) > self._max_bytes:
            return
        self._kept[name] = self._clock(), data
        self.bytes += len(data)
        while len(self._kept) > self._max_count or self.bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))
        self._drop_aged()

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a copy of an object; None if it is not kept, or no longer."""
        self._drop_aged()
        _, data = self._kept.get(name, (0.0, b"null"))
        found: dict[str, Any] | None = json.loads(data)
        return found

    def remove(self, name: str) -> bool:
        """Drop an object, and return whether it was kept."""
        _, data = self._kept.pop(name, (0.0, None))
        self.bytes -= len(data or b"")
        return data is not None

    def _drop_aged(self) -> None:
        now = self._clock()
        for name in [name for name, (at, _) in self._kept.items() if now - at > self._max_age_s]:
            self.remove(name)
