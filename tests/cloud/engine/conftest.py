from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics

# The GGUF writer of the llama tests, for the tests of drafts on the verifier.
sys.path.insert(0, str(Path(__file__).parents[2] / "llama"))


@pytest.fixture(scope="session")
def target(tiny_directory: Callable[[str], Path]) -> Callable[[str], TargetModel]:
    """Return a function: kind -> a loaded and tested tiny target, made once."""
    made: dict[str, TargetModel] = {}

    def get(kind: str) -> TargetModel:
        if kind not in made:
            made[kind] = TargetModel.load(tiny_directory(kind))
            check_numerics(made[kind])
        return made[kind]

    return get
