"""Hash the files of a target that decide on its tokens, and find its tokens and those that end its answers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from outrider.artifacts.model_files import weight_files
from outrider.artifacts.store import known_file_digest
from outrider.core.errors import ModelRefused
from outrider.core.vocabulary import token_table

log = logging.getLogger(__name__)

CONFIGURATIONS = ("config.json", "generation_config.json")
"""The files that configure how weights are used: rope, softcap, windows, and the end-of-sequence tokens."""

Progress = Callable[[str], None]
"""Receives a line about how far a load has come."""


def hash_of(directory: Path, on_progress: Progress = lambda text: None) -> str:
    """Return the hex digest of all that decides on a target's tokens: its weights and their configuration.

    Raises ModelRefused for a shard that is missing.
    """
    weights = weight_files(directory)
    if missing := [file.name for file in weights if not file.is_file()]:
        raise ModelRefused(f"{directory} has no {missing[0]}, which its index names; download it again")
    files = [*(directory / name for name in CONFIGURATIONS if (directory / name).is_file()), *weights]
    sizes = [file.stat().st_size for file in files]
    total, done = hashlib.sha256(), 0
    for file, size in zip(files, sizes, strict=True):
        total.update(f"{known_file_digest(file)}  {file.name}\n".encode())  # as `sha256sum` prints them
        done += size
        on_progress(f"hashing weights: {100 * done // max(1, sum(sizes))} %")
    return total.hexdigest()


def end_token_ids(directory: Path | None, configured: Iterable[Any], vocabulary: int) -> tuple[int, ...]:
    """Return all ids that end an answer: the configured ones, the tokenizer's, and what ends a turn of the template.

    Files of fine-tuned models often disagree about it. directory: of the target, where there is one. configured: the
    `eos_token_id` of each configuration: an id, several or None; these come first. Ids at or beyond `vocabulary` are
    left out.
    """
    ends = [one for ids in configured for one in (ids if isinstance(ids, list | tuple) else [ids])]
    if directory is not None and (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # those who hash alone need not wait for it

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            ends.append(tokenizer.eos_token_id)
            ends.append(_turn_end(tokenizer))
        except Exception as error:  # a tokenizer or a template may fail in any way
            log.warning("what ends an answer in %s's chat template is not known: %s", directory, error)
    return tuple(dict.fromkeys(one for one in ends if isinstance(one, int) and 0 <= one < vocabulary))


def vocabulary_of(directory: Path | None, logits: int, ends: Iterable[int]) -> int:
    """Return the number of ids that may be chosen: models pad their logits beyond the ids that stand for a token.

    directory: of the target; without a tokenizer.json that can be read all ids count. ends: ids that do in any case.
    """
    file = directory and directory / "tokenizer.json"
    if not file or not file.is_file():
        return logits
    try:
        known = len(token_table(file.read_bytes()))
    except ModelRefused as error:
        log.warning("all %d ids may be chosen, since those with a token are not known: %s", logits, error)
        return logits
    return min(logits, max([known, *(end + 1 for end in ends)]))


def _turn_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template puts behind an answer; None if there is none."""
    if not tokenizer.chat_template:
        return None
    answer = "An answer"
    turns = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": answer}]
    _, written, rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)
    ids = tokenizer.encode(rest.lstrip(), add_special_tokens=False) if written else []
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return ids[0] if ids and ids[0] in special else None
