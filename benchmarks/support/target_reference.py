"""Compute what the target alone generates, without a line of Outrider, for benchmarks.lossless to compare with.

Only torch, transformers, numpy and the standard library: hash, processors and argmax are written again from
docs/protocol.md, and the model runs through Hugging Face's own forward.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}
"""Scores closer than this may change places by rounding, at the size that logits have, by the target's dtype."""
GOLDEN = 0x9E3779B97F4A7C15
Array = NDArray[Any]


class Reference:
    """Runs one target on the CPU, in the dtype that the verifier has."""

    def __init__(self, folder: str, dtype: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        self._model = loaded.eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._tie = TIES[dtype]

    @torch.inference_mode()
    def gaps(
        self, prompt: Sequence[int], output: Sequence[int], sampling: Mapping[str, Any], tokens: int
    ) -> list[float]:
        """Return how far each token of `output` that is not the target's own lies below it, in perturbed scores.

        The target reads `output` itself, so that one difference does not hide others. An output that ended before
        `tokens` without an end of the target's counts as infinitely far.
        """
        ids = torch.tensor([[*prompt, *output]])
        # Of the output alone: a long prompt's logits would take a gigabyte. The last ones decide on no token of it.
        logits = self._model(input_ids=ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        rows = (row.double().numpy() for row in logits)
        scored = (_scores(row, prompt, output[:i], **sampling) for i, row in enumerate(rows))
        found = [
            gap for token, scores in zip(output, scored, strict=True) if (gap := self._gap(token, *scores)) is not None
        ]
        if len(output) < tokens and not (output and output[-1] in self._ends):
            found.append(float("inf"))
        return found

    def _gap(self, token: int, scores: Array, outside: Array) -> float | None:
        """Return how far a token is below the best, None if it is the best. outside: as from `_scores`.

        Rounding also decides whether a token just belongs to those that `top_p` leaves.
        """
        if token == np.where(outside < 0.0, scores, -np.inf).argmax():
            return None
        rounding = self._tie / 10
        surely = scores[outside < -rounding].max(initial=-np.inf)
        return max(0.0, float(surely - scores[token])) if outside[token] < rounding else float("inf")


def _scores(
    logits: Array,
    prompt: Sequence[int],
    before: Sequence[int],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Return the perturbed scores `[V]`, and for each token the probability of those before it less `top_p`: it may be
    chosen where that is below 0."""
    scores: Array = logits.copy()
    counts = Counter(before)
    for token in {*prompt, *before}:
        value = scores[token] / repetition_penalty if scores[token] > 0 else scores[token] * repetition_penalty
        scores[token] = value - presence_penalty * (token in counts) - frequency_penalty * counts[token]
    if temperature == 0.0:
        return scores, np.full(len(scores), -1.0)
    log_p = scores / temperature
    log_p -= log_p.max()
    log_p -= np.log(np.sum(np.exp(log_p)))
    outside = np.full(len(log_p), -1.0)
    if top_p < 1.0:
        order = np.argsort(-log_p, kind="stable")  # most likely first, equals by id
        outside[order] = np.concatenate(([0.0], np.cumsum(np.exp(log_p[order]))[:-1])) - top_p
    return log_p + _noise(seed, prompt, len(before), len(log_p)), outside


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(seed: int, prompt: Sequence[int], position: int, vocabulary: int) -> Array:
    packed = struct.pack(f"<Q{len(prompt)}I", seed, *prompt)
    (key,) = struct.unpack("<Q", hashlib.blake2b(packed, digest_size=8, person=b"outrider.noise.1").digest())
    at = _mix(np.array([(key + (position + 1) * GOLDEN) % 2**64], dtype=np.uint64))
    hashed = _mix(np.arange(vocabulary, dtype=np.uint64) * np.uint64(GOLDEN) + at)
    u = np.minimum(((hashed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53, 1 - 2.0**-53)
    noise: Array = -np.log(-np.log(u))
    return noise
