"""Quantise GGUF files with llama.cpp."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from outrider.artifacts import atomic_files
from outrider.llama.library import library

QuantKind = Literal["Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "F16"]


def quantize(source: Path, destination: Path, kind: QuantKind, threads: int = 1) -> None:
    """Write ``source`` quantised to ``destination``, which appears whole or not at all.

    llama.cpp silently stores a tensor wider than asked for where its rows do not fit the blocks of
    ``kind``: compare the types of what came out (``cloud_verifier.distill.gguf.writer.tensor_types``).
    Raises ValueError when llama.cpp refuses the file.
    """
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads
    # Never truncate a file in place: a process that has mapped it would die of SIGBUS.
    with atomic_files.replacing(destination) as partial:
        code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params)
        if code != 0:
            raise ValueError(
                f"llama.cpp could not quantise {source.name} to {kind} (code {code}): is it a whole GGUF file?"
            )
