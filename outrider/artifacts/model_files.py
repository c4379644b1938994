"""Look at the files of a target and a draft before anything is loaded, so that a mistake is named at once."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.core.errors import ModelRefused

MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, at most; the format's own bound."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_GGUF = b"GGUF"
_LFS = b"version https://git-lfs"


def check_target(folder: Path, name: str = "--model", *, needs_weights: bool = True) -> None:
    """Raise ModelRefused, which names the file, unless the folder has all that a target needs, in whole files.

    name: what named the folder, for messages. needs_weights: False for engines that may read other weights than
    safetensors.
    """
    mend = "give the folder of a Hugging Face model, with config.json, tokenizer.json and *.safetensors"
    if not folder.is_dir():
        why = "this is a file" if folder.exists() else "no such folder"
        raise ModelRefused(f"{name} {folder}: {why}; {mend}, or org/name on the Hugging Face hub")
    for wanted in ("config.json", "tokenizer.json"):
        if not (folder / wanted).is_file():
            raise ModelRefused(f"{name} {folder}: it has no {wanted}; {mend}")
        read_json(folder / wanted, name)
    shards = weight_files(folder, name)
    if needs_weights and not shards:
        raise ModelRefused(f"{name} {folder}: it has no *.safetensors; {mend}")
    for shard in shards:
        if why := _damage(shard):
            raise ModelRefused(f"{name} {folder}: {shard.name} {why}; download it again")


def weight_files(folder: Path, name: str = "--model") -> list[Path]:
    """Return the safetensors files that are a target's weights, by name; one of an index may be missing.

    These are model.safetensors and the files of the index, and an adapter of them; all files where there is neither.
    Others beside them, such as Mistral's consolidated.safetensors, hold the same weights again. name: what named the
    folder, for messages. Raises ModelRefused for an index that is no JSON.
    """
    named = read_json(folder / INDEX, name).get("weight_map") if (folder / INDEX).is_file() else None
    files = {folder / str(file) for file in named.values()} if isinstance(named, dict) else set()
    files |= {folder / WEIGHTS} if (folder / WEIGHTS).is_file() else set()
    if not files:
        return sorted(folder.glob("*.safetensors"))
    return sorted(files | ({folder / _ADAPTER} if (folder / _ADAPTER).is_file() else set()))


def check_gguf(file: Path, name: str = "--draft", *, others: str = "") -> None:
    """Raise ModelRefused, which names the file, unless it is there and begins as a GGUF file does.

    name: what named the file. others: what may be given instead, for messages.
    """
    mend = f"give the path of a GGUF file, or org/name:file.gguf on the Hugging Face hub{others and ', or '}{others}"
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(_LFS))
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror}"
        raise ModelRefused(f"{name} {file}: {why}; {mend}") from error
    if begin == _LFS:
        raise ModelRefused(f"{name} {file}: it is a pointer of Git LFS; fetch the file with `git lfs pull`")
    if begin[: len(_GGUF)] != _GGUF:
        raise ModelRefused(f"{name} {file}: it is no GGUF file, it begins with {begin[: len(_GGUF)]!r}; {mend}")


def _damage(shard: Path) -> str:
    """Return what is wrong with a safetensors file by its header and its size; "" if nothing is."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            begin = file.read(8)
            if _LFS.startswith(begin) and begin:
                return "is a pointer of Git LFS (`git lfs pull`)"
            length = int.from_bytes(begin, "little")
            if length > min(MAX_HEADER, size - 8):
                return f"is truncated or no safetensors file: it has {size} bytes, and its header would end beyond them"
            header = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return "is no safetensors file: its header cannot be read"
    if size != whole:
        return f"is {'truncated' if size < whole else 'damaged'}: it has {size} bytes, by its header {whole}"
    return ""


def read_json(file: Path, name: str) -> dict[str, object]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelRefused(f"{name} {file.parent}: {file.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{name} {file.parent}: {file.name} is no JSON ({error}); download it again") from error
    return found if isinstance(found, dict) else {}
