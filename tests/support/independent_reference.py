"""Compute what a target alone says, with transformers and the definitions of docs/protocol.md alone."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE = 1e-3
"""Scores closer than this are equal up to rounding, which two ways to compute in float32 may do differently."""
GOLDEN = 0x9E3779B97F4A7C15
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request, with the protocol's defaults."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


class Reference:
    """Runs one target in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ends = self._model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Scores:
        """Return the logits after each token, one row each."""
        return self._model(torch.tensor([list(tokens)])).logits[0].double().numpy()

    def log_probs(self, tokens: Sequence[int]) -> Scores:
        """Return the logarithms of the target's distributions after each token."""
        logits = self.logits(tokens)
        return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)

    def differences(self, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> list[str]:
        """Return where an output differs from what the target chooses after the tokens before, but for ties."""
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        found = []
        for position, (row, got) in enumerate(zip(rows, output, strict=True)):
            scores = perturbed(row, prompt, output[:position], sampling)
            best = int(scores.argmax())
            if scores[best] - scores[got] > TIE:
                found.append(f"{position}: {got}, the target's own is {best} by {scores[best] - scores[got]:.4f}")
        return found

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return so many tokens by the `generate` of transformers."""
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, top_k=None, top_p=None
        )
        return list(out[0, len(prompt) :].tolist())


def perturbed(logits: Scores, prompt: Sequence[int], before: Sequence[int], sampling: Sampling) -> Scores:
    """Return the scores whose greatest is the target's token: log-probabilities plus the position's noise."""
    scores = logits.copy()
    counts = Counter(before)
    for token in {*prompt, *before}:
        rate = sampling.repetition_penalty
        scores[token] = scores[token] / rate if scores[token] > 0 else scores[token] * rate
        scores[token] -= sampling.presence_penalty * (token in counts) + sampling.frequency_penalty * counts[token]
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if sampling.temperature == 0:
        return scores
    scores /= sampling.temperature
    scores -= np.logaddexp.reduce(scores)
    order = np.argsort(-scores, kind="stable")
    kept = np.ones(len(scores), bool)
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        mass = np.exp(np.where(kept, scores, -np.inf)[order])
        mass /= mass.sum()
        kept[order[np.cumsum(mass) - mass >= sampling.top_p]] = False
    if sampling.min_p:
        kept &= scores >= scores.max() + math.log(sampling.min_p)
    return np.where(kept, scores, -np.inf) + noise(sampling.seed, prompt, len(before), len(scores))


def noise(seed: int, prompt: Sequence[int], position: int, vocabulary: int) -> Scores:
    """Return the Gumbel noise of a position for each token."""
    return -np.log(-np.log(uniform(seed, prompt, position, np.arange(vocabulary, dtype=np.uint64))))


def uniform(seed: int, prompt: Sequence[int], position: int, tokens: NDArray[np.uint64]) -> Scores:
    """Return the protocol's uniform numbers of a position for these tokens."""
    packed = struct.pack(f"<Q{len(prompt)}I", seed, *prompt)
    key = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"outrider.noise.1").digest(), "little")
    at = _mix(np.array([(key + (position + 1) * GOLDEN) % 2**64], dtype=np.uint64))
    hashed = _mix(tokens * np.uint64(GOLDEN) + at)
    return np.minimum(((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
