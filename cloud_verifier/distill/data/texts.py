"""A text of the target's own, with its distribution at every position, and folders of such texts as safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from outrider.artifacts import atomic_files

FORMAT = 2
PART_TOKENS = 1 << 17
"""Tokens in one file: with 64 ids at each position about 50 MB."""


@dataclass(frozen=True)
class Text:
    """n tokens in a row of one session. A draft reads them all and learns from those at `first` and after."""

    traffic_class: str
    tenant: str
    tokens: NDArray[np.int32]
    """`[n]`"""
    top_ids: NDArray[np.int32]
    """`[n, K]`: the target's likeliest ids where it produced each token, the likeliest first; -1 where there is none.
    Rows before `first` mean nothing."""
    top_log_probs: NDArray[np.float32]
    """`[n, K]`, before temperature and filters"""
    tail: NDArray[np.float32]
    """`[n]`: the probability of all other ids"""
    first: int = 1
    """At least 1: nothing precedes the first token, so a draft has nothing to guess it from."""
    session: int = 0
    """Tells the sessions of a dataset apart; nothing else."""

    @property
    def learnt(self) -> int:
        """Positions that a draft learns from."""
        return len(self.tokens) - self.first


def save_texts(folder: Path, texts: Sequence[Text]) -> None:
    """Write texts to `folder`, made if need be, in files of about `PART_TOKENS` tokens. Empty lists write nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(_parts(texts)):
        names = [
            {"class": text.traffic_class, "tenant": text.tenant, "first": text.first, "session": text.session}
            for text in part
        ]
        lengths = np.array([len(text.tokens) for text in part], np.int64)
        tensors = {
            "lengths": lengths,
            "tokens": np.concatenate([text.tokens for text in part]),
            "top_ids": np.concatenate([text.top_ids for text in part]),
            # Half precision is 1 part in 1,000 of a log-probability, far below what a quantised draft can show.
            "top_log_probs": np.concatenate([text.top_log_probs for text in part]).astype(np.float16),
            "tail": np.concatenate([text.tail for text in part]),
        }
        metadata = {"format": str(FORMAT), "texts": json.dumps(names)}
        atomic_files.write(folder / f"{number:05d}.safetensors", save(tensors, metadata))


def load_texts(folder: Path) -> list[Text]:
    """Read what `save_texts` wrote, in its order. Raises ValueError for a folder or a format that is not ours."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of texts: build a dataset first")
    return [text for path in sorted(folder.glob("*.safetensors")) for text in _load_part(path)]


def _load_part(path: Path) -> list[Text]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != str(FORMAT):
            raise ValueError(f"{path} has format {metadata.get('format')}, must be {FORMAT}: build the dataset again")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    ends = np.cumsum(tensors["lengths"])
    cut = {name: np.split(tensors[name], ends[:-1]) for name in ("tokens", "top_ids", "top_log_probs", "tail")}
    return [
        Text(
            name["class"],
            name["tenant"],
            cut["tokens"][i],
            cut["top_ids"][i],
            cut["top_log_probs"][i].astype(np.float32),
            cut["tail"][i],
            name["first"],
            name["session"],
        )
        for i, name in enumerate(json.loads(metadata["texts"]))
    ]


def _parts(texts: Sequence[Text]) -> list[list[Text]]:
    parts: list[list[Text]] = []
    room = 0
    for text in texts:
        if room < len(text.tokens):
            parts.append([])
            room = PART_TOKENS
        parts[-1].append(text)
        room -= len(text.tokens)
    return parts
