"""Files that are there whole or not at all, even where the machine loses power a moment later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put `data` into the place of `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def copy(source: Path, path: Path) -> None:
    """Put a copy of `source` into the place of `path`, which others may read."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.copyfile(source, partial)
    partial.chmod(0o644)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
