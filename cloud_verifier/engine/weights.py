"""Hash the files of a target that decide on its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from outrider.artifacts.model_files import weight_files
from outrider.artifacts.store import known_file_digest
from outrider.core.errors import ModelRefused

CONFIGURATIONS = ("config.json", "generation_config.json")
"""The files that configure how weights are used: rope, softcap, windows, and the end-of-sequence tokens."""

Progress = Callable[[str], None]
"""Receives a line about how far a load has come."""


def hash_of(directory: Path, on_progress: Progress = lambda text: None) -> str:
    """Return the hex digest of all that decides on a target's tokens: its weights and their configuration.

    Raises ModelRefused for a shard that is missing.
    """
    weights = weight_files(directory)
    if missing := [file.name for file in weights if not file.is_file()]:
        raise ModelRefused(f"{directory} has no {missing[0]}, which its index names; download it again")
    files = [*(directory / name for name in CONFIGURATIONS if (directory / name).is_file()), *weights]
    sizes = [file.stat().st_size for file in files]
    total, done = hashlib.sha256(), 0
    for file, size in zip(files, sizes, strict=True):
        total.update(f"{known_file_digest(file)}  {file.name}\n".encode())  # as `sha256sum` prints them
        done += size
        on_progress(f"hashing weights: {100 * done // max(1, sum(sizes))} %")
    return total.hexdigest()
