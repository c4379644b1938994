from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_llama

from outrider.llama import LlamaModel, TreeContext


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def model(tiny_path: Path) -> Iterator[LlamaModel]:
    with LlamaModel.load(tiny_path) as model:
        yield model


@pytest.fixture
def context(model: LlamaModel) -> Iterator[TreeContext]:
    with TreeContext(model, n_ctx=128, max_sequences=16, batch=32, kv_type="f32") as context:
        yield context


@pytest.fixture
def linear(model: LlamaModel) -> Iterator[TreeContext]:
    """Yield a second context that only ever evaluates plain sequences: the reference."""
    with TreeContext(model, n_ctx=256, max_sequences=1, batch=256, kv_type="f32") as context:
        yield context
