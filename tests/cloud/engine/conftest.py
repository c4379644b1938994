from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics


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
