"""Provide what all tests of the verifier share: one CPU thread, and tiny random models made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_targets import Reference, make_tiny, save_tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: kind -> the directory of a tiny random model, made once."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: root / kind if (root / kind).exists() else save_tiny(kind, root / kind)


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Reference]:
    """Return a function: kind -> plain transformers on the same weights, made once."""
    made: dict[str, Reference] = {}
    return lambda kind: made.setdefault(kind, Reference(make_tiny(kind))) if kind not in made else made[kind]
