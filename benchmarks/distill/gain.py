"""Measure what the learnt draft gains: tokens per step at a fixed tree, of quantised files, on held-out prompts.

The texts are what the target wrote, by plain streaming, greedily and at temperature 0.8, after prompts that no device
asks. Those that repeat themselves are counted apart: any draft guesses them. Every draft reads prompt and text, and
each token that the target wrote counts (but those within the first few positions, see `eval_gguf.UNPROMPTED`). The
steps follow from a fixed shape, so there is no calibrator, and no plain step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.support import old_harness as harness
from benchmarks.support import texts
from benchmarks.support.old_harness import Pair
from cloud_verifier.distill.gguf import eval_gguf
from cloud_verifier.distill.gguf.eval_gguf import DraftCounts
from edge_agent import AsyncClient

KINDS = ("arithmetic", "code")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 20_260_731},
}
_DRAWS = 1_000
LEAST_GAP = 0.5
"""Smallest gap between the first draft and the reference, in tokens per step, at which the gain is judged."""


@dataclass(frozen=True)
class HeldOutText:
    """Hold a prompt and the text that the target wrote after it."""

    traffic_class: str
    """The kind of its prompt and its group, see `texts.grouped`."""
    tokens: NDArray[np.int32]
    first: int
    """Position of the first written token."""
    session: int = 0
    """Number of its prompt, which has a greedy text and a sampled one."""


@dataclass(frozen=True)
class DraftGain:
    """Hold the tokens per step by kind of prompt, and by kind and group of text, for three drafts."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    reference: Mapping[str, float]

    @property
    def gap(self) -> float:
        """Return the tokens per step on arithmetic by which the reference exceeds the first draft."""
        return self.reference["arithmetic"] - self.before["arithmetic"]

    @property
    def valid(self) -> bool:
        return self.gap >= LEAST_GAP

    @property
    def gap_closed(self) -> float:
        """Return the share of the gap that is closed; 0 without a gap."""
        return (self.after["arithmetic"] - self.before["arithmetic"]) / self.gap if self.gap > 0 else 0.0

    @property
    def code_loss(self) -> float:
        """Return the share by which tokens per step fell on code; negative if they rose."""
        return 1.0 - self.after["code"] / self.before["code"]


async def written(plain: AsyncClient, pair: Pair, count: int, tokens: int) -> list[HeldOutText]:
    """Return the target's texts after `count` held-out prompts of each kind. plain: a client without a draft."""
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    asked = [
        (kind, tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        for kind in KINDS
        for prompt in [one for one in harness.prompts("heldout") if one.kind == kind][:count]
    ]
    found = []
    for sampling, options in SAMPLINGS.items():
        done = await asyncio.gather(*(plain.generate(ids, max_tokens=tokens, **options) for _, ids in asked))
        found += [
            HeldOutText(
                texts.grouped(kind, sampling, one.token_ids),
                np.array([*ids, *one.token_ids], np.int32),
                len(ids),
                prompt,
            )
            for prompt, ((kind, ids), one) in enumerate(zip(asked, done, strict=True))
            if one.token_ids
        ]
    return found


Counted = list[tuple[str, int, DraftCounts]]
"""The (kind and group, tokens, steps) of each text."""


def measured(
    drafts: tuple[Path, Path], written: Sequence[HeldOutText], threads: int = 2
) -> tuple[Counted, Counted, list[int]]:
    """Compare two drafts on each text. Also returns the number of each text's prompt."""
    found = eval_gguf.compare(drafts[0], drafts[1], written, threads).texts  # type: ignore[arg-type]
    return (
        [(text.traffic_class, text.positions, text.candidate) for text in found],
        [(text.traffic_class, text.positions, text.incumbent) for text in found],
        [text.session for text in found],
    )


def interval(
    before: Counted, after: Counted, reference: Counted, prompts: Sequence[int], seed: int = 0
) -> tuple[float, float]:
    """Return the 95% interval of the share of the gap that is closed, by bootstrap over prompts.

    prompts: of each text the number of its prompt, since the texts of one are alike.
    """
    dice = random.Random(seed)
    places: dict[int, list[int]] = {}
    for place, ((name, _, _), prompt) in enumerate(zip(before, prompts, strict=True)):
        if KINDS[0] in texts.groups_of(name):
            places.setdefault(prompt, []).append(place)
    shares = []
    for _ in range(_DRAWS):
        drawn = [place for prompt in dice.choices(list(places), k=len(places)) for place in places[prompt]]
        one = DraftGain(*(per_step(counted[place] for place in drawn) for counted in (before, after, reference)))
        shares.append(one.gap_closed)
    shares.sort()
    return shares[int(0.025 * _DRAWS)], shares[int(0.975 * _DRAWS)]


def per_step(counted: Iterable[tuple[str, int, DraftCounts]]) -> dict[str, float]:
    """Return the tokens per step with a token tree, by kind of prompt, and by kind and group."""
    tokens: dict[str, int] = {}
    steps: dict[str, int] = {}
    for name, positions, counts in counted:
        for kind in texts.groups_of(name):
            tokens[kind] = tokens.get(kind, 0) + positions
            steps[kind] = steps.get(kind, 0) + counts.tree_steps
    return {kind: tokens[kind] / steps[kind] for kind in tokens}
