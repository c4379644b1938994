"""How near a student is to the target on held-out text, class by class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cloud_verifier.distill.data.texts import Text
from cloud_verifier.distill.training.batches import Batch, pieces
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.student import Student


@dataclass(frozen=True)
class Nearness:
    """Means over positions."""

    overlap: float
    """sum min(p, q): how often a guess drawn from the draft is accepted, at temperature 1."""
    agreement: float
    """How often the draft's likeliest token is the target's."""
    kl: float
    """KL(p || q), nats"""


@dataclass(frozen=True)
class Report:
    """One measurement."""

    classes: Mapping[str, Nearness]

    @property
    def overlap(self) -> float:
        """The mean over classes, whatever their size: one that is rare must not be unlearnt unseen."""
        return sum(one.overlap for one in self.classes.values()) / len(self.classes)


def sample(texts: Sequence[Text], tokens: int) -> list[Text]:
    """The first texts of each class, up to `tokens` of it and at least one."""
    taken: dict[str, int] = defaultdict(int)
    some = []
    for text in texts:
        if taken[text.traffic_class] < tokens:
            taken[text.traffic_class] += text.learnt
            some.append(text)
    return some


def measure(student: Student, texts: Sequence[Text], ranks: Ranks, width: int, precision: torch.dtype) -> Report:
    """Measure on all texts, in forward passes of at most `width` tokens. All ranks must call it."""
    classes = sorted({text.traffic_class for text in texts})
    sums = torch.zeros(len(classes), 4, dtype=torch.float64, device=ranks.device)
    student.eval()
    for number, name in enumerate(classes):
        indices = [index for index, text in enumerate(texts) if text.traffic_class == name]
        for group in pieces(texts, indices, width * ranks.size):
            # Every rank takes part in every pass, for its share of the weights, even where it has no text of its own.
            mine = group[ranks.rank :: ranks.size]
            batch = Batch.of([texts[index] for index in mine or group[:1]], ranks.device)
            with torch.no_grad(), torch.autocast(ranks.device.type, precision, enabled=precision != torch.float32):
                kl, overlap, agreed = student(batch)
            if mine:
                found = (overlap.sum(), agreed.sum(), kl.sum(), torch.tensor(len(kl)))
                sums[number] += torch.stack([value.double().to(ranks.device) for value in found])
    student.train()
    rows = ranks.sum(sums).tolist()
    return Report(
        {name: Nearness(*(value / row[3] for value in row[:3])) for name, row in zip(classes, rows, strict=True)}
    )
