"""Generate the output of the target alone, without a line of Outrider, for benchmarks.lossless to compare with.

Only torch, transformers, numpy and the standard library. Hash, processors and argmax are written again from
docs/protocol.md; the model runs through Hugging Face's own forward, one token at a time over a DynamicCache.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

TIE = 1e-3
"""Perturbed scores closer than this are a floating-point tie."""
WORD = 2**64


@dataclass(frozen=True)
class ReferenceSampling:
    """Hold the sampling parameters of a request, as in the wire contract's Sampling."""

    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TokenDifference:
    position: int
    got: int
    expected: int
    gap: float
    """Distance of the token from the best one in the reference's perturbed scores."""

    @property
    def tie(self) -> bool:
        """Return whether rounding may decide: the two best scores are closer than TIE, and the token is one of them."""
        return self.gap <= TIE


class Reference:
    """Run one target, in float32 on one CPU core, which the benchmark shares with the device."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        config = self.model.generation_config.eos_token_id
        self.eos = set(config if isinstance(config, list) else [config])

    @torch.inference_mode()
    def differences(
        self, prompt: list[int], output: list[int], settings: ReferenceSampling, max_tokens: int
    ) -> list[TokenDifference]:
        """Compare `output` with the reference at every position, teacher-forced on `output` itself."""
        found = []
        cache = DynamicCache()
        fed = prompt
        for position, got in enumerate(output):
            logits = self.model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
            scores = self._scores(logits.double().numpy(), prompt, output[:position], settings)
            best = int(scores.argmax())
            if best != got:
                found.append(TokenDifference(position, got, best, float(scores[best] - scores[got])))
            fed = [got]
        ended = bool(output) and output[-1] in self.eos
        if len(output) != max_tokens and not ended:
            found.append(TokenDifference(len(output), -1, -1, float("inf")))  # it stopped without a reason
        if any(token in self.eos for token in output[:-1]):
            found.append(TokenDifference(len(output), -1, -1, float("inf")))  # it went on after the end
        return found

    @torch.inference_mode()
    def gap(self, prompt: list[int], before: list[int], settings: ReferenceSampling, tokens: Sequence[int]) -> float:
        """Return how far the worst of these next tokens lies below the best one, in perturbed scores.

        before: the output so far. Of greedy settings the scores are log-probabilities, up to a constant.
        """
        logits = self.model(input_ids=torch.tensor([prompt + before])).logits[0, -1]
        scores = self._scores(logits.double().numpy(), prompt, before, settings)
        return float(scores.max() - scores[list(tokens)].min())

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Generate greedily with Hugging Face's own `generate`, and return the new tokens."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def _scores(
        self, logits: np.ndarray, prompt: list[int], before: list[int], settings: ReferenceSampling
    ) -> np.ndarray:
        scores = logits.copy()
        for token, count in Counter(prompt + before).items():
            value = scores[token]
            value = value / settings.repetition_penalty if value > 0 else value * settings.repetition_penalty
            scores[token] = value - settings.presence_penalty - settings.frequency_penalty * count
        if settings.temperature == 0.0:
            return scores
        scores = scores / settings.temperature
        log_p = scores - scores.max()
        log_p = log_p - np.log(np.sum(np.exp(log_p)))
        if settings.top_p < 1.0:
            order = np.argsort(-log_p, kind="stable")  # most likely first, equals by id
            mass_before = np.concatenate(([0.0], np.cumsum(np.exp(log_p[order]))[:-1]))
            log_p[order[mass_before >= settings.top_p]] = -np.inf
        return log_p + _noise(settings.seed, prompt, len(before), len(log_p))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(seed: int, prompt: list[int], position: int, vocabulary: int) -> np.ndarray:
    packed = struct.pack("<Q", seed) + struct.pack(f"<{len(prompt)}I", *prompt)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"outrider.noise.1").digest()
    (key,) = struct.unpack("<Q", digest)
    golden = 0x9E3779B97F4A7C15
    at = _mix(np.array([(key + (position + 1) * golden) % WORD], dtype=np.uint64))
    hashed = _mix(np.arange(vocabulary, dtype=np.uint64) * np.uint64(golden) + at)
    u = np.minimum(((hashed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53, 1 - 2.0**-53)
    return -np.log(-np.log(u))
