"""Read given texts with the verifier's own forward pass in steps of different shapes, and compare what it would choose.

A text is read token by token, whatever the target would choose, so that a difference at one position hides no other.
Every shape has keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from cloud_verifier.engine.torch_backend.session_slots import SessionSlots
from outrider.core.verification import TreeBatch

Text = tuple[Sequence[int], Sequence[int]]
"""(prompt, output)"""


@dataclass(frozen=True)
class Shape:
    """Describe steps. nodes: draft tokens of each text in a step; their first `step % (accepted + 1)` are right."""

    name: str
    nodes: int = 0
    accepted: int = 3
    at_once: int = 1
    """Texts that share the steps."""


AT_ONCE = 8
"""Most texts that share a step."""
UNDRAFTED = Shape("no draft, 1 user")
SHAPES = (Shape("8 draft tokens, 1 user", nodes=8), Shape("no draft, 8 users", at_once=AT_ONCE))


class StepReader:
    """Holds a target as the verifier runs it on one core."""

    def __init__(self, folder: str | Path, dtype: str) -> None:
        self.model = TargetModel.load(folder, dtype=dtype, threads=1)
        check_numerics(self.model)

    def logits(self, texts: Sequence[Text], shape: Shape) -> torch.Tensor:
        """Return the logits `[n, V]` that decide on the n tokens of all texts' outputs, text by text."""
        groups = [texts[first : first + shape.at_once] for first in range(0, len(texts), shape.at_once)]
        return torch.cat([logits for group in groups for logits in self._together(group, shape)])

    @torch.inference_mode()
    def _together(self, texts: Sequence[Text], shape: Shape) -> list[torch.Tensor]:
        model, most = self.model, sum(len(prompt) + len(output) + shape.nodes for prompt, output in texts)
        pool = KVPool(model.layers, most, dtype=model.torch_dtype, device=model.device)
        reading = [_Reading(pool, text, shape, model.max_sequence) for text in texts]
        for one in reading:
            one.keep(self._step([one.prompt()], pool))
        while unread := [one for one in reading if one.at < len(one.output)]:
            segments = [one.step() for one in unread]
            logits = self._step(segments, pool)
            for one, segment in zip(unread, segments, strict=True):
                one.keep(logits[: segment.rows])
                logits = logits[segment.rows :]
        return [torch.cat(one.logits)[: len(one.output)] for one in reading]

    def _step(self, segments: Sequence[Segment], pool: KVPool) -> torch.Tensor:
        batch = PackedBatch.pack(segments, self.model.device)
        return self.model.forward(batch, self.model.attention.plan(segments, pool))


@torch.inference_mode()
def flipped(logits: torch.Tensor, others: torch.Tensor) -> list[float]:
    """Return how far the likeliest of `others` `[n, V]` lies below that of `logits` `[n, V]`, where it is another."""
    own, other = logits.argmax(dim=1), others.argmax(dim=1)
    rows = (own != other).nonzero()[:, 0]
    gaps: list[float] = (logits[rows, own[rows]].float() - logits[rows, other[rows]].float()).tolist()
    return gaps


@torch.inference_mode()
def probability_moved(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Return the total variation distance of the distributions at each position, summed up over the n positions."""
    return sum(
        float((one.double().softmax(dim=0) - other.double().softmax(dim=0)).abs().sum()) / 2.0
        for one, other in zip(logits, others, strict=True)
    )


class _Reading:
    """A text that is being read. at: tokens of its output whose logits are there."""

    def __init__(self, pool: KVPool, text: Text, shape: Shape, longest: int) -> None:
        self.output = text[1]
        self.at = 0
        self.logits: list[torch.Tensor] = []
        self._prompt, self._shape = text[0], shape
        tokens = [*text[0], *text[1]]
        self._slots = SessionSlots(pool, tokens, most=len(tokens) + shape.nodes, last_position=longest - 1)
        self._segment: Segment | None = None
        self._right = self._steps = 0

    def prompt(self) -> Segment:
        """Return the rows of the prompt but for its last token."""
        self._segment = self._slots.segment(len(self._prompt) - 1, None)
        return self._segment

    def step(self) -> Segment:
        """Return the rows of the next step: the last known token, the next ones of the text, and wrong ones beside."""
        self._right = min(self._steps % (self._shape.accepted + 1), self._shape.nodes, len(self.output) - self.at - 1)
        self._steps += 1
        rows = range(self._shape.nodes)
        parents = [row if row < self._right else row % (self._right + 1) for row in rows]
        tokens = [self.output[self.at + row] if row < self._right else row for row in rows]
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent == 0 else depths[parent - 1] + 1)
        ids = tuple(row + 1 for row in rows)
        batch = TreeBatch(ids, tuple(parents), tuple(tokens), tuple(depths), self.at)
        self._segment = self._slots.segment(1, batch)
        return self._segment

    def keep(self, logits: torch.Tensor) -> None:
        """Go on behind the right tokens."""
        if self._segment is None:
            raise RuntimeError("a step's logits are kept after the step")
        if not self._segment.wants_logits:
            self._slots.keep(self._segment)
            return
        self.logits.append(logits[: 1 + self._right].clone())
        self._slots.keep(self._segment, range(1, 1 + self._right))
        self.at += 1 + self._right
