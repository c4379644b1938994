"""The artifact store: a folder of drafts, each named by its content, that the coordinator or a web server serves."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.artifacts import atomic_files


class Shelf:
    """`FOLDER/<64 hex digits>.gguf`. A file never changes once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, file: Path) -> str:
        """Copy a file in, unless it is there; returns the hex digest that names it."""
        digest = digest_of(file)
        place = self.place(digest)
        if not place.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_files.copy(file, place)
        return digest

    def place(self, digest: str) -> Path:
        """Where a file is or would be."""
        return self.folder / f"{digest}.gguf"


def digest_of(file: Path) -> str:
    """SHA-256 in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
