"""Generate the devices' answers again by plain streaming, and compare them token for token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from benchmarks.distill.answer import DeviceAnswer
from benchmarks.support.old_harness import Pair
from benchmarks.support.reference import Reference, ReferenceSampling
from edge_agent import AsyncClient

AT_ONCE = 8


@dataclass(frozen=True)
class OutputComparison:
    """Count what was found in all answers that were generated again."""

    requests: int
    swapped: int
    """Answers during which the draft changed."""
    tokens: int
    lost: int
    """Tokens that differ, are missing or are too many, counted from the first difference of each request."""
    ties: int
    """Requests whose texts part where the scores of two tokens are so close that rounding decides."""

    @property
    def identical(self) -> bool:
        return self.lost == 0


def chosen(answers: Sequence[DeviceAnswer], count: int) -> list[DeviceAnswer]:
    """Return `count` finished requests drawn from all, and every one during which the draft changed."""
    done = [answer for answer in answers if not answer.error]
    drawn = {id(answer) for answer in random.Random(0).sample(done, min(count, len(done)))}
    return [answer for answer in done if answer.swaps_s or id(answer) in drawn]


def differing_tokens(got: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the number of tokens from the first difference on; 0 for equal texts."""
    same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return max(len(got), len(wanted)) - same


async def compare(plain: AsyncClient, answers: Sequence[DeviceAnswer], pair: Pair) -> OutputComparison:
    """Generate each answer again with `plain`, a client without a draft, and compare the tokens."""
    places = asyncio.Semaphore(AT_ONCE)

    async def again(answer: DeviceAnswer) -> tuple[int, ...]:
        async with places:
            return (await plain.generate(answer.prompt, **answer.options)).token_ids

    texts = await asyncio.gather(*(again(answer) for answer in answers))
    differing = [a for a, text in zip(answers, texts, strict=True) if differing_tokens(a.tokens, text)]
    ties = {id(answer) for answer in differing if await asyncio.to_thread(_is_tie, answer, pair)}
    return OutputComparison(
        requests=len(answers),
        swapped=sum(bool(answer.swaps_s) for answer in answers),
        tokens=sum(map(len, texts)),
        lost=sum(differing_tokens(a.tokens, text) for a, text in zip(answers, texts, strict=True) if id(a) not in ties),
        ties=len(ties),
    )


def _is_tie(answer: DeviceAnswer, pair: Pair) -> bool:
    """Return whether every token of the device's is one that the reference gives too, but for rounding."""
    ids = Tokenizer.from_file(str(pair.target / "tokenizer.json")).encode(answer.prompt, add_special_tokens=False).ids
    limit = int(answer.options["max_tokens"])
    found = Reference(str(pair.target)).differences(ids, answer.tokens, settings(answer.options), limit)
    return all(difference.tie for difference in found)


def settings(options: Mapping[str, Any]) -> ReferenceSampling:
    """Return the sampling settings of a request for the reference."""
    given = {name: options[name] for name in ("temperature", "top_p", "seed") if name in options}
    return ReferenceSampling(**given)
