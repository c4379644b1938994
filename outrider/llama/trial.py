"""Try a draft in a process of its own, since llama.cpp may end the process that opens a damaged or a hostile file.

`python -m outrider.llama.trial FILE [TOKENIZER]` decodes a few tokens within limits of time and memory, and compares
the vocabulary with that of a tokenizer.json. It ends with 0, or with 2 or 4 and the reason on stderr.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from outrider.artifacts import atomic_files
from outrider.artifacts.model_files import parts
from outrider.core.errors import ModelRefused, OutriderError, VocabularyMismatch
from outrider.core.vocabulary import compare_token_tables, special_ids, token_table
from outrider.llama.model import LlamaModel
from outrider.llama.tree_context import TIP, TreeContext
from outrider.processes import tied_to_this_process

TIMEOUT_S = 300.0
"""Seconds that the trial may take; a file of several gigabytes is read whole."""
MEMORY_BYTES = 8 << 30
"""Address space that the trial may take, beside that of the file and twice that for its weights in another form."""
TOKENS = 4
"""Tokens that are decoded."""
EXIT_REFUSED = 2
EXIT_NO_LIBRARY = 3
EXIT_OTHER_VOCABULARY = 4


def try_draft(file: Path, name: str = "--draft", tokenizer: Path | None = None) -> str:
    """Open a GGUF file and decode a few tokens with it in a child process.

    Return why it could not be tried here; "" if it was. name: what named the file, for messages. tokenizer: the
    target's tokenizer.json, where it is known. Raises ModelRefused or VocabularyMismatch, which name the file.
    """
    command = [
        *tied_to_this_process(),
        sys.executable,
        "-m",
        __name__,
        str(file),
        *([str(tokenizer)] if tokenizer else []),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelRefused(f"{name} {file}: no token came within {TIMEOUT_S:.0f} s; is the draft too large?") from None
    if ran.returncode == 0:
        return ""
    said = ran.stderr.strip().splitlines()[-1:] or [""]
    if ran.returncode == EXIT_NO_LIBRARY:
        return said[0]
    if ran.returncode == EXIT_OTHER_VOCABULARY:
        raise VocabularyMismatch(f"{name} {file}: {said[0]}", field="token_table")
    if ran.returncode != EXIT_REFUSED:
        how = signal.Signals(-ran.returncode).name if ran.returncode < 0 else f"exit code {ran.returncode}"
        said = [f"llama.cpp crashed on it ({how})"]
    raise ModelRefused(f"{name} {file}: no token can be decoded with it: {said[0]}; download or export it again")


def survived(file: Path, name: str) -> None:
    """Try a file that came over the network, once for each version of llama.cpp: a file beside it says so.

    The file's name must be of its content, as in an ArtifactStore. Raises ModelRefused, or ImportError without
    llama-cpp-python. name: what to call the file, for messages.
    """
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = ""  # the trial says what is missing
    marker = file.with_name(f"{file.name}.tried")
    with contextlib.suppress(OSError):
        if version and marker.read_text() == version:
            return
    if missing := try_draft(file, name):
        raise ImportError(missing)
    with contextlib.suppress(OSError):  # it is tried again next time
        atomic_files.write(marker, version.encode())


def _limit(file: Path) -> None:
    """Bound this process, so that a file which asks for too much ends it alone. Raises OSError without the file."""
    memory = MEMORY_BYTES + 3 * sum(file.with_name(part).stat().st_size for part in parts(file.name))
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: int(TIMEOUT_S), resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        bounded = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bounded, bounded))


def _decode(file: Path, tokenizer: bytes) -> None:
    """Decode the vocabulary's first token a few times, as a prompt and as a tree, and compare the vocabulary.

    Raises ModelRefused, VocabularyMismatch, ImportError.
    """
    with LlamaModel.load(file) as model:
        if tokenizer:
            special = model.special_ids() | special_ids(tokenizer)
            compare_token_tables(model.token_table(), token_table(tokenizer), special)
        room = min(2 * TOKENS, model.n_ctx_train)
        with TreeContext(model, n_ctx=room, max_sequences=TOKENS, batch=TOKENS) as context:
            rows = [context.reset([0] * min(TOKENS, room - 1))]
            rows += context.decode([TIP], [0])[1] if room > 1 else []
    if not all(np.isfinite(row).any() for row in rows):
        raise ModelRefused("its logits are no numbers")


if __name__ == "__main__":
    try:
        _limit(Path(sys.argv[1]))
        _decode(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes() if sys.argv[2:] else b"")
    except ImportError as missing:
        print(missing, file=sys.stderr)
        raise SystemExit(EXIT_NO_LIBRARY) from None
    except VocabularyMismatch as mismatch:
        print(mismatch, file=sys.stderr)
        raise SystemExit(EXIT_OTHER_VOCABULARY) from None
    except (OutriderError, OSError, MemoryError) as refused:
        print(refused, file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
