"""Make a draft worse on purpose: noise on the weights of a good one, exported like any other.

python -m benchmarks.distill.worse_draft GOOD.gguf TARGET FOLDER NOISE
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from cloud_verifier.distill.gguf.export import export
from cloud_verifier.distill.gguf.reader import read_gguf

FILE = "worse.gguf"
_SEED = 20_260_801


def worse_draft(draft: Path, tokenizer: Path, folder: Path, noise: float) -> Path:
    """Call `add_noise` in a process of its own, so that the output of libraries does not reach this one's."""
    command = [sys.executable, "-m", __spec__.name, str(draft), str(tokenizer), str(folder), str(noise)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"no worse draft: {ran.stderr[-1500:]}")
    return folder / FILE


def add_noise(draft: Path, tokenizer: Path, folder: Path, noise: float) -> Path:
    """Write a GGUF file like `draft`, with noise added to each matrix, in multiples of its standard deviation.

    tokenizer: the target's folder.
    """
    model = read_gguf(draft)
    dice = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=dice)
    model.save_pretrained(folder / "model")
    return export(folder / "model", tokenizer, folder / FILE).path


if __name__ == "__main__":
    add_noise(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
