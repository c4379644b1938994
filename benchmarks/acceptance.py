"""Measure how well a GGUF draft predicts the target's text: the quantised file itself, in llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.texts import groups_of
from outrider.llama import LlamaModel, TreeContext

CHAIN = 6
"""Tokens that the draft proposes ahead of each step of the target."""


@dataclass(frozen=True)
class TargetText:
    """Hold a text that the target wrote after a prompt."""

    kind: str
    """The prompt's kind, and maybe the text's group, see `texts.grouped`."""
    prompt: list[int]
    written: list[int]


@dataclass(frozen=True)
class DraftAcceptance:
    tokens_per_step: float
    """Tokens that a step of the target commits, with a chain of `CHAIN` draft tokens in every one."""
    greedy: float
    """Share of positions at which the draft's first choice is the target's."""


def measure(draft: Path, samples: Sequence[TargetText]) -> dict[str, DraftAcceptance]:
    """Measure the draft for each kind of prompt, and for each group of its texts if they have any.

    The draft reads the prompt, and then the target's text as it comes.
    """
    agreed: dict[str, list[NDArray[np.bool_]]] = {}
    with LlamaModel.load(draft) as model, TreeContext(model, n_ctx=model.n_ctx_train) as context:
        for sample in samples:
            row = _agreement(context, sample)
            for kind in groups_of(sample.kind):
                agreed.setdefault(kind, []).append(row)
    return {
        kind: DraftAcceptance(
            sum(map(len, rows)) / sum(target_steps(row, CHAIN) for row in rows), float(np.concatenate(rows).mean())
        )
        for kind, rows in agreed.items()
    }


def target_steps(agreed: NDArray[np.bool_], chain: int) -> int:
    """Return the target's steps for a text, if each verifies a chain of `chain` tokens and adds one of its own."""
    steps, place = 0, 0
    while place < len(agreed):
        proposal = agreed[place : place + chain]
        place += 1 + (len(proposal) if proposal.all() else int(proposal.argmin()))
        steps += 1
    return steps


def _agreement(context: TreeContext, sample: TargetText) -> NDArray[np.bool_]:
    rows = [context.reset(sample.prompt)]
    parent = 0
    for token in sample.written[:-1]:
        (parent,), logits = context.decode([parent], [token])
        rows.append(logits[0])
    same: NDArray[np.bool_] = np.stack(rows).argmax(1) == np.array(sample.written)
    return same
