"""Keep texts that the target wrote, with its distribution at every position, in a safetensors file a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from outrider.artifacts import atomic_files

TRAIN, VALIDATION, HELDOUT = "train", "validation", "heldout"
"""Folders of a dataset: texts to learn from, to choose the best checkpoint by, and to measure drafts on."""
FILE = "texts.safetensors"
_ARRAYS = "tokens", "top_ids", "top_log_probs", "tail"
"""The fields of a text with one entry, or row, for each token."""


@dataclass(frozen=True)
class Text:
    """A text of n consecutive tokens that one session has. A draft reads them all; those from `first` on are labels."""

    traffic_class: str
    tokens: NDArray[np.int32]
    """`[n]`"""
    top_ids: NDArray[np.int32]
    """`[n, K]`: the target's likeliest ids at each token's position, the likeliest first; -1 where there are fewer than
    K. Rows before `first` mean nothing."""
    top_log_probs: NDArray[np.float32]
    """`[n, K]`: their log-probabilities, before temperature and filters."""
    tail: NDArray[np.float32]
    """`[n]`: the probability of all other ids together."""
    first: int = 1
    """Index of the first label. It is at least 1, since nothing precedes the first token."""
    session: int = 0
    """A number that tells the sessions of a dataset apart."""

    @property
    def label_count(self) -> int:
        """Return the number of tokens that a draft learns from, or is measured on."""
        return len(self.tokens) - self.first


def save_texts(folder: Path, texts: Sequence[Text]) -> None:
    """Write texts to `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = [{"class": text.traffic_class, "first": text.first, "session": text.session} for text in texts]
    tensors = {name: np.concatenate([getattr(text, name) for text in texts]) for name in _ARRAYS}
    # Half precision is exact to 1 part in 1,000, far below what a quantized draft can show.
    tensors["top_log_probs"] = tensors["top_log_probs"].astype(np.float16)
    tensors["lengths"] = np.array([len(text.tokens) for text in texts], np.int64)
    with atomic_files.replacing(folder / FILE) as partial:
        save_file(tensors, partial, {"texts": json.dumps(labels)})


def load_texts(folder: Path) -> list[Text]:
    """Return the texts that `save_texts` wrote, in order. Raises ValueError if there are none."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} is no file of texts: build a dataset first")
    with safe_open(path, framework="numpy") as file:
        labels = json.loads(file.metadata()["texts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    tensors["top_log_probs"] = tensors["top_log_probs"].astype(np.float32)
    ends = np.cumsum(tensors["lengths"])[:-1]
    arrays = {name: np.split(tensors[name], ends) for name in _ARRAYS}
    return [
        Text(
            label["class"],
            first=label["first"],
            session=label["session"],
            **{name: pieces[i] for name, pieces in arrays.items()},
        )
        for i, label in enumerate(labels)
    ]
