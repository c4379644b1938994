"""What this publisher has signed, on its own disk: the coordinator's store may lose everything."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest
from outrider.wire.manifest import Manifest, read_unverified


@dataclass(frozen=True)
class Entry:
    """One release of ours."""

    raw: bytes
    """SignedManifest, as it went out or is about to."""
    state: str = ""
    """As the coordinator last said; empty as long as it has not."""
    reason: str = ""

    @property
    def manifest(self) -> Manifest:
        return read_unverified(self.raw)


class Ledger:
    """`FOLDER/<64 hex digits>.json`, one file for each release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, entry: Entry) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = {"manifest": b64encode(entry.raw).decode(), "state": entry.state, "reason": entry.reason}
        atomic_files.write(self._place(entry.manifest.digest), json.dumps(text, indent=1).encode())

    def get(self, digest: str) -> Entry | None:
        """Raises BadRequest for a file that is no entry."""
        place = self._place(digest)
        return _read(place) if place.is_file() else None

    def all(self) -> list[Entry]:
        """By version, the oldest first."""
        entries = [_read(path) for path in self._folder.glob("*.json")]
        return sorted(entries, key=lambda entry: entry.manifest.version)

    def note(self, digest: str, state: str, reason: str = "") -> None:
        """What the coordinator says of a release; nothing where it is not one of ours."""
        entry = self.get(digest)
        if entry is not None and (entry.state, entry.reason) != (state, reason):
            self.put(replace(entry, state=state, reason=reason))

    def _place(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"


def _read(path: Path) -> Entry:
    try:
        text = json.loads(path.read_bytes())
        return Entry(b64decode(text["manifest"], validate=True), str(text["state"]), str(text["reason"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadRequest(f"{path} is no entry of the publisher's ledger ({error}); move it away") from error
