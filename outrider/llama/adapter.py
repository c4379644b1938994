"""LoRA adapters: small GGUF files that change a loaded model's weights without another copy of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelRefused
from outrider.llama.library import errors_collected, library
from outrider.llama.model import LlamaModel, check_header


class LoraAdapter:
    """An adapter in memory, for contexts of the one model that it was loaded with; freed with that model."""

    def __init__(self, handle: Any, model: LlamaModel, path: Path) -> None:
        self.handle = handle
        self.model = model
        self.path = path

    @classmethod
    def load(cls, model: LlamaModel, path: str | os.PathLike[str]) -> LoraAdapter:
        """Raises ModelRefused, with the reason, for a file that is no adapter of this model."""
        path = Path(path)
        check_header(path)
        with errors_collected() as errors:
            handle = library().llama_adapter_lora_init(model.handle, os.fsencode(path))
        if not handle:
            raise ModelRefused(f"{path} is no adapter of {model.path}: {'; '.join(errors) or 'no reason was given'}")
        return cls(handle, model, path)
