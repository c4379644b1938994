"""Compute what the target alone generates, from docs/protocol.md and Hugging Face, without a line of Outrider."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3
"""Perturbed scores closer than this are a floating-point tie."""
GOLDEN = 0x9E3779B97F4A7C15


class TargetReference:
    """Runs one target in float32."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        ends = self.model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def mismatches(
        self, prompt: list[int], output: list[int], settings: dict[str, float], tokens: int
    ) -> list[tuple[int, int, int]]:
        """Return (position, token, expected token) wherever `output` is not the target's own, ties left out.

        The comparison is teacher-forced on `output`, so that one difference does not hide others. settings: sampling
        parameters as requests have them. tokens: how many were asked for; the output may end early only at an end.
        """
        logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :].double().numpy()
        found = []
        for position, token in enumerate(output):
            scores = _scores(logits[position], prompt, output[:position], **settings)
            best = int(scores.argmax())
            if scores[best] - scores[token] > TIE:
                found.append((position, token, best))
        if len(output) != tokens and not (output and output[-1] in self._ends):
            found.append((len(output), -1, -1))  # it stopped without a reason
        return found


def _scores(
    logits: np.ndarray,
    prompt: list[int],
    before: list[int],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    scores = logits.copy()
    for token, count in Counter(prompt + before).items():
        value = scores[token] / repetition_penalty if scores[token] > 0 else scores[token] * repetition_penalty
        scores[token] = value - presence_penalty - frequency_penalty * count
    if temperature == 0.0:
        return scores
    scores = scores / temperature
    log_p = scores - scores.max()
    log_p -= np.log(np.sum(np.exp(log_p)))
    order = np.argsort(-log_p, kind="stable")  # most likely first, equals by id
    mass_before = np.concatenate(([0.0], np.cumsum(np.exp(log_p[order]))[:-1]))
    if top_p < 1.0:
        log_p[order[mass_before >= top_p]] = -np.inf
    return log_p + _noise(seed, prompt, len(before), len(log_p))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(seed: int, prompt: list[int], position: int, vocabulary: int) -> np.ndarray:
    packed = struct.pack(f"<Q{len(prompt)}I", seed, *prompt)
    (key,) = struct.unpack("<Q", hashlib.blake2b(packed, digest_size=8, person=b"outrider.noise.1").digest())
    at = _mix(np.array([(key + (position + 1) * GOLDEN) % 2**64], dtype=np.uint64))
    hashed = _mix(np.arange(vocabulary, dtype=np.uint64) * np.uint64(GOLDEN) + at)
    u = np.minimum(((hashed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53, 1 - 2.0**-53)
    return -np.log(-np.log(u))
