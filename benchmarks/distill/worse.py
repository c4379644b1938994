"""A draft that is worse on purpose: noise on the weights of a good one, exported like any other."""

from __future__ import annotations

from pathlib import Path

import torch

from cloud_verifier.distill.export import export
from cloud_verifier.distill.gguf_import import import_gguf

_SEED = 20_260_801


def spoil(draft: Path, tokenizer: Path, folder: Path, noise: float) -> Path:
    """A GGUF file like `draft`, with noise of so many of a matrix's standard deviations on each of them.

    tokenizer: the target's folder.
    """
    model = import_gguf(draft)
    dice = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=dice)
    model.save_pretrained(folder / "model")
    return export(folder / "model", tokenizer, folder / "worse.gguf").path
