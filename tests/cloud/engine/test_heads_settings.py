"""Test the setting `heads`: a file, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import SHAPE

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine.server_draft.head_models import HeadsShape, new_heads, save_heads
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.torch_target import _heads
from outrider.core.errors import ModelRefused


def config_of(directory: Path, heads: Path, **changes: Any) -> VerifierConfig:
    return VerifierConfig(**{"model": directory, "insecure": True, "heads": heads} | changes)


def test_heads_of_another_target_or_from_nowhere_stop_the_start(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = TargetModel.load(tiny_directory("qwen3"))
    save_heads(tmp_path / "other", new_heads(HeadsShape(hidden=SHAPE["hidden_size"])), "sha256:" + "0" * 64)
    with pytest.raises(ModelRefused, match="has heads of target sha256:0000"):
        _heads(config_of(tiny_directory("qwen3"), tmp_path / "other"), model, lambda text: None)
    with pytest.raises(ModelRefused, match="is no file"):
        _heads(config_of(tiny_directory("qwen3"), tmp_path / "nothing"), model, lambda text: None)
