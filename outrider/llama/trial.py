"""Try a draft in a process of its own, since llama.cpp may end the process that opens a damaged file.

`python -m outrider.llama.trial FILE` decodes a token, and ends with 0, or with 2 and the reason on stderr.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from outrider.core.errors import ModelRefused, OutriderError
from outrider.llama.context import TextContext
from outrider.llama.model import LlamaModel
from outrider.processes import tied_to_this_process

TIMEOUT_S = 300.0
"""Seconds that the trial may take; a file of several gigabytes is read whole."""
EXIT_REFUSED = 2
EXIT_NO_LIBRARY = 3


def try_draft(file: Path, name: str = "--draft") -> str:
    """Open a GGUF file and decode a token of it in a child process. Raises ModelRefused, which names the file.

    Return why it could not be tried here; "" if it was. name: what named the file, for messages.
    """
    command = [*tied_to_this_process(), sys.executable, "-m", __name__, str(file)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelRefused(f"{name} {file}: no token came within {TIMEOUT_S:.0f} s; is the draft too large?") from None
    if ran.returncode == 0:
        return ""
    said = ran.stderr.strip().splitlines()[-1:] or [""]
    if ran.returncode == EXIT_NO_LIBRARY:
        return said[0]
    if ran.returncode != EXIT_REFUSED:
        how = signal.Signals(-ran.returncode).name if ran.returncode < 0 else f"exit code {ran.returncode}"
        said = [f"llama.cpp crashed on it ({how})"]
    raise ModelRefused(f"{name} {file}: no token can be decoded with it: {said[0]}; download or export it again")


def _decode(file: Path) -> None:
    """Decode the vocabulary's first token. Raises ModelRefused, ImportError."""
    with LlamaModel.load(file) as model, TextContext(model, length=1, batch=1) as reader:
        (logits,) = reader.read([0])
        if not np.isfinite(logits).any():
            raise ModelRefused("its first logits are no numbers")


if __name__ == "__main__":
    try:
        _decode(Path(sys.argv[1]))
    except ImportError as missing:
        print(missing, file=sys.stderr)
        raise SystemExit(EXIT_NO_LIBRARY) from None
    except OutriderError as refused:
        print(refused, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
