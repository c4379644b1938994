"""Evaluate a student on validation text: how close it is to the target, for each traffic class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloud_verifier.distill.data.texts import Text
from cloud_verifier.distill.training.batches import TrainingBatch, micro_batches
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.student import Student


@dataclass(frozen=True)
class StudentScores:
    """Averages what a student predicts over the positions of one class."""

    overlap: float
    """sum min(p, q): the probability that a token drawn from the draft is accepted at temperature 1."""
    agreement: float
    """Share of positions where draft and target have the same likeliest token."""
    kl: float
    """KL(p || q) in nats."""


def mean_overlap(scores: Mapping[str, StudentScores]) -> float:
    """Return the mean over classes, all equal in weight, so that a rare class is not forgotten unseen."""
    return sum(one.overlap for one in scores.values()) / len(scores)


def sample(texts: Sequence[Text], tokens: int) -> list[Text]:
    """Return the first texts of each class, until they have `tokens` labels; at least one text of each."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for text in texts:
        if taken[text.traffic_class] < tokens:
            taken[text.traffic_class] += text.label_count
            chosen.append(text)
    return chosen


def evaluate(
    student: Student, texts: Sequence[Text], ranks: Ranks, max_tokens: int, precision: torch.dtype
) -> dict[str, StudentScores]:
    """Return the scores of each class, from forward passes of at most `max_tokens`. All ranks must call it."""
    classes = sorted({text.traffic_class for text in texts})
    sums = torch.zeros(len(classes), 4, dtype=torch.float64, device=ranks.device)
    student.eval()
    for number, name in enumerate(classes):
        indices = [index for index, text in enumerate(texts) if text.traffic_class == name]
        for group in micro_batches(texts, indices, max_tokens * ranks.size):
            # A rank without a text of its own takes part all the same: the others need its share of the weights.
            mine = group[ranks.rank :: ranks.size]
            batch = TrainingBatch.of([texts[index] for index in mine or group[:1]], ranks.device)
            with torch.no_grad(), torch.autocast(ranks.device.type, precision, enabled=precision != torch.float32):
                kl, overlap, agreed = student(batch)
            if mine:
                found = (overlap.sum(), agreed.sum(), kl.sum(), torch.tensor(len(kl)))
                sums[number] += torch.stack([value.double().to(ranks.device) for value in found])
    student.train()
    rows = ranks.sum(sums).tolist()
    return {
        name: StudentScores(*(value / row[3] for value in row[:3])) for name, row in zip(classes, rows, strict=True)
    }
