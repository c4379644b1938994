from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The GGUF writer of the llama tests, for the tests of the draft on llama.cpp.
sys.path.insert(0, str(Path(__file__).parents[1] / "llama"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft of 400 kB; its vocabulary is `scripted.tokenizer_json`'s."""
    from tiny_gguf import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
