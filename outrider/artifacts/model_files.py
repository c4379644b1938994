"""Look at the files of a target and a draft before anything is loaded, so that a mistake is named at once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from outrider.core.errors import ModelRefused

MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, at most; the format's own bound."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_GGUF = b"GGUF"
_LFS = b"version https://git-lfs"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


def check_target(folder: Path, name: str = "--model", *, needs_weights: bool = True) -> None:
    """Raise ModelRefused, which names the file, unless the folder has all that a target needs, in whole files.

    name: what named the folder, for messages. needs_weights: False for engines that may read other weights than
    safetensors.
    """
    mend = "give the folder of a Hugging Face model, with config.json, tokenizer.json and *.safetensors"
    if not folder.is_dir():
        why = "this is a file" if folder.exists() else "no such folder"
        raise ModelRefused(f"{name} {folder}: {why}; {mend}, or org/name on the Hugging Face hub")
    shards, index = weight_files(folder, name), _index(folder, name)
    if (adapter := folder / "adapter_config.json").is_file() and not {*shards} - {folder / _ADAPTER}:
        base = read_json(adapter, name).get("base_model_name_or_path")
        raise ModelRefused(
            f"{name} {folder}: it is an adapter alone, of {base or 'a model that it does not name'}; merge it into that"
            " model (peft: merge_and_unload), and give the folder of the result"
        )
    for wanted in ("config.json", "tokenizer.json"):
        if not (folder / wanted).is_file():
            raise ModelRefused(f"{name} {folder}: it has no {wanted}; {mend}")
        read_json(folder / wanted, name)
    if needs_weights and not shards:
        raise ModelRefused(f"{name} {folder}: it has no *.safetensors; {mend}")
    if needs_weights and not index and folder / WEIGHTS not in shards:
        raise ModelRefused(
            f"{name} {folder}: it has {shards[0].name}, but neither {WEIGHTS} nor {INDEX}, which says what is in which"
            " file; download it again"
        )
    if not index:  # the files' own names say how many there are
        shards = sorted({folder / part for shard in shards for part in parts(shard.name)})
    for shard in shards:
        try:
            tensors = _tensors(shard)
            if lost := {one for one, file in index.items() if file == shard.name} - {*tensors}:
                raise ModelRefused(f"lacks {len(lost)} of the tensors that {INDEX} has in it, such as {min(lost)}")
        except ModelRefused as error:
            raise ModelRefused(f"{name} {folder}: {shard.name} {error}; download it again") from error


def weight_files(folder: Path, name: str = "--model") -> list[Path]:
    """Return the safetensors files that are a target's weights, by name; one of an index may be missing.

    These are model.safetensors and the files of the index, and an adapter of them; all files where there is neither.
    Others beside them, such as Mistral's consolidated.safetensors, hold the same weights again. name: what named the
    folder, for messages. Raises ModelRefused for an index that is no JSON, or names no file.
    """
    files = {folder / file for file in _index(folder, name).values()}
    files |= {folder / WEIGHTS} if (folder / WEIGHTS).is_file() else set()
    if not files:
        return sorted(folder.glob("*.safetensors"))
    return sorted(files | ({folder / _ADAPTER} if (folder / _ADAPTER).is_file() else set()))


def parts(file: str) -> list[str]:
    """Return the names of all parts of a file that is split as `NAME-00001-of-00003.gguf`; of another one its own."""
    if (split := _PART.fullmatch(file)) is None:
        return [file]
    stem, _, count, suffix = split.groups()
    return [f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def check_gguf(file: Path, name: str = "--draft", *, others: str = "") -> None:
    """Raise ModelRefused, which names the file, unless it is there, with all its parts, and begins as a GGUF file does.

    name: what named the file. others: what may be given instead, for messages.
    """
    mend = f"give the path of a GGUF file, or org/name:file.gguf on the Hugging Face hub{others and ', or '}{others}"
    first, *_ = split = parts(file.name)
    if file.is_file() and first != file.name:
        raise ModelRefused(f"{name} {file}: it is one of {len(split)} parts; give the first one, {first}")
    for part in dict.fromkeys([file, *map(file.with_name, split)]):
        where = f"{name} {file}" if part == file else f"{name} {file}: its part {part.name}"
        try:
            with part.open("rb") as opened:
                begin = opened.read(len(_LFS))
        except OSError as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror}"
            raise ModelRefused(f"{where}: {why}; {mend}") from error
        if begin == _LFS:
            raise ModelRefused(f"{where}: it is a pointer of Git LFS; fetch the file with `git lfs pull`")
        if begin[: len(_GGUF)] != _GGUF:
            raise ModelRefused(f"{where}: it is no GGUF file, it begins with {begin[: len(_GGUF)]!r}; {mend}")


def _index(folder: Path, name: str) -> Mapping[str, str]:
    """Return tensor -> file of an index; {} without one. Raises ModelRefused for one that names no file."""
    if not (folder / INDEX).is_file():
        return {}
    named = read_json(folder / INDEX, name).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ModelRefused(f"{name} {folder}: {INDEX} does not say which tensor is in which file; download it again")
    return named


def _tensors(shard: Path) -> Collection[str]:
    """Return the names of a safetensors file's tensors. Raises ModelRefused, by its header and its size, for a damaged
    file; the message says what it is."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            begin = file.read(8)
            if _LFS.startswith(begin) and begin:
                raise ModelRefused("is a pointer of Git LFS (`git lfs pull`)")
            length = int.from_bytes(begin, "little")
            if length > min(MAX_HEADER, size - 8):
                raise ModelRefused(
                    f"is truncated or no safetensors file: it has {size} bytes, and its header would end beyond them"
                )
            header = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ModelRefused("is missing" if missing else f"cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelRefused("is no safetensors file: its header cannot be read") from error
    if size != whole:
        how = "truncated" if size < whole else "damaged"
        raise ModelRefused(f"is {how}: it has {size} bytes, by its header {whole}")
    tensors: Collection[str] = header
    return tensors


def read_json(file: Path, name: str) -> dict[str, object]:
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelRefused(f"{name} {file.parent}: {file.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{name} {file.parent}: {file.name} is no JSON ({error}); download it again") from error
    return found if isinstance(found, dict) else {}
