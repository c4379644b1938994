"""Compare the tokens of the running system with those of the target alone.

Held-out prompts, greedy and sampled with penalties, go through coordinator, verifier and device: without a draft, with
one, with eight users at once, behind a round trip of 30 ms, with the verifier's own speculation, and with both. The
reference is Hugging Face's forward pass with our sampling written again from docs/protocol.md; it shares no code with
Outrider. It reads each output itself, so that every token is judged. A token other than the reference's is `differing`;
it is a `mismatch` if its score is further below the best one than rounding explains (1e-3 in float32, 0.05 in float16,
0.5 in bfloat16). `texts_unlike_undrafted` counts texts that are not, token for token, those without a draft. The exit
status is 1 if there is a mismatch.

`flips` has what rounding changes by itself: the verifier's own forward pass reads the greedy texts in steps of one
token and in steps of other shapes, and `per_1000` counts positions at which the likeliest token is another one after
the same text. `gap_median` and `gap_most` are how far it was from the likeliest in logits, and `probability_moved` is
the share of the probability that other tokens have then, on average. `first_tokens` compares the first three tokens of
many samples with drafts and without by a chi-square test: a small `p` would mean another distribution.

Caveat: in 16 bits rounding decides between near-equal tokens, and a text then goes on differently, with drafts as with
other users in the same step; in float32 this is rare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from benchmarks.support import harness
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.step_shapes import (
    AT_ONCE,
    SHAPES,
    UNDRAFTED,
    StepReader,
    Text,
    flipped,
    probability_moved,
)
from benchmarks.support.target_reference import TIES, Reference
from coordinator.cluster import Cluster
from edge_agent.bench.delay import DelayedAddresses
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "seed": 20_260_731,
    },
}


@dataclass(frozen=True)
class Way:
    """Describe a way to run the system."""

    name: str
    draft: str | None = "auto"
    verifier_drafts: bool = False
    at_once: int = 1
    rtt_ms: float = 0.0


WAYS = (
    Way("no draft", draft=None),
    Way("device drafts"),
    Way("device drafts, 8 users", at_once=8),
    Way("device drafts, 30 ms away", rtt_ms=30.0),
    Way("verifier drafts", draft=None, verifier_drafts=True),
    Way("both draft", verifier_drafts=True),
)
SAMPLED_PROMPTS = 4
BEGINNING, BEGINNING_TEMPERATURE = 3, 0.7
"""Tokens of a sample. Few beginnings are common at a higher temperature, and rare ones tell nothing."""
Outputs = dict[tuple[str, str], Completion]
"""By setting and the prompt's id."""


@dataclass
class Comparison:
    """Compares outputs with the reference, and with those of the first way."""

    reference: Reference
    prompts: Mapping[str, list[int]]
    tokens: int
    tie: float
    undrafted: Outputs = field(default_factory=dict)
    _judged: dict[tuple[str, str, tuple[int, ...]], list[float]] = field(default_factory=dict)

    def row(self, way: Way, outputs: Outputs) -> dict[str, Any]:
        """Return the way's row of the table."""
        gaps = [gap for key, one in outputs.items() for gap in self._gaps(*key, one.token_ids)]
        self.undrafted = self.undrafted or outputs
        tokens = sum(len(completion.token_ids) for completion in outputs.values())
        return {
            "way": way.name,
            "tokens": tokens,
            "acceptance_length": round(tokens / sum(one.statistics.steps for one in outputs.values()), 2),
            "differing": len(gaps),
            "mismatches": sum(gap > self.tie for gap in gaps),
            "texts_unlike_undrafted": sum(
                one.token_ids != self.undrafted[key].token_ids for key, one in outputs.items()
            ),
        }

    def _gaps(self, setting: str, prompt: str, output: tuple[int, ...]) -> list[float]:
        """Return the reference's gaps, which it computes once for equal outputs."""
        known = (setting, prompt, output)
        if known not in self._judged:
            sampling = {"temperature": 0.0} | SETTINGS[setting]
            self._judged[known] = self.reference.gaps(self.prompts[prompt], output, sampling, self.tokens)
        return self._judged[known]


@contextlib.asynccontextmanager
async def client_of(way: Way, cluster: Cluster) -> AsyncIterator[AsyncClient]:
    """Yield a device, behind its link."""
    settings = EdgeSettings(draft_workers=way.at_once)
    async with (
        DelayedAddresses(way.rtt_ms) as reroute,
        AsyncClient(
            coordinator=cluster.address, draft=way.draft, reroute=reroute, timeout=None, settings=settings
        ) as client,
    ):
        yield client


async def generate(way: Way, cluster: Cluster, prompts: Mapping[str, list[int]], tokens: int) -> Outputs:
    """Send every prompt in every setting."""
    outputs: Outputs = {}
    async with client_of(way, cluster) as client:

        async def one(setting: str, prompt: str) -> None:
            options = {"temperature": 0.0} | SETTINGS[setting]
            outputs[setting, prompt] = await client.generate(prompts[prompt], max_tokens=tokens, **options)

        await asyncio.gather(*(one(setting, prompt) for setting in SETTINGS for prompt in prompts))
    return outputs


@dataclass
class Sample:
    """Counts the beginnings of sampled texts, by prompt, and their draft tokens that were accepted."""

    counts: dict[str, Counter[tuple[int, ...]]]
    accepted: int = 0


async def sampled(way: Way, cluster: Cluster, prompts: Mapping[str, list[int]], seeds: range) -> Sample:
    """Sample a beginning of each prompt with each seed."""
    found = Sample({prompt: Counter() for prompt in prompts})
    async with client_of(way, cluster) as client:

        async def one(prompt: str, seed: int) -> None:
            completion = await client.generate(
                prompts[prompt], max_tokens=BEGINNING, temperature=BEGINNING_TEMPERATURE, seed=seed
            )
            found.counts[prompt][completion.token_ids] += 1
            found.accepted += completion.statistics.accepted

        for seed in seeds:
            await asyncio.gather(*(one(prompt, seed) for prompt in prompts))
    return found


async def distribution(cluster: Cluster, prompts: Mapping[str, list[int]], count: int) -> dict[str, Any]:
    """Return the chi-square of samples with drafts and without, whose seeds differ, having one distribution."""
    some = dict(list(prompts.items())[:SAMPLED_PROMPTS])
    drafted = await sampled(Way("", at_once=len(some)), cluster, some, range(1, 1 + count))
    plain = await sampled(Way("", draft=None, at_once=len(some)), cluster, some, range(1 + count, 1 + 2 * count))
    statistic, freedom = homogeneity([(drafted.counts[prompt], plain.counts[prompt]) for prompt in some])
    p = rounded(float(stats.chi2.sf(statistic, freedom)), 3) if freedom else None
    samples = 2 * count * len(some)
    return {
        "samples": samples,
        "accepted": drafted.accepted,
        "chi_square": rounded(statistic, 1),
        "freedom": freedom,
        "p": p,
    }


def homogeneity(pairs: Sequence[tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]]) -> tuple[float, int]:
    """Return chi-square and degrees of freedom of both samples of each pair, which are of one size, being alike.

    Beginnings that are expected less than five times in a sample count as one.
    """
    statistic, freedom = 0.0, 0
    for pair in pairs:
        both = pair[0] + pair[1]
        common = [start for start in both if both[start] >= 10]
        rare = [each.total() - sum(each[start] for start in common) for each in pair]
        table = [[each[start] for each in pair] for start in common] + ([rare] if any(rare) else [])
        if len(table) > 1:
            tested = stats.chi2_contingency(table, correction=False)
            statistic, freedom = statistic + float(tested.statistic), freedom + int(tested.dof)
    return statistic, freedom


def flips(reader: StepReader, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Return a row for each shape of steps, which are compared with steps of one token of one user."""
    gaps, moved, positions = {shape: list[float]() for shape in SHAPES}, dict.fromkeys(SHAPES, 0.0), 0
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        plain = reader.logits(some, UNDRAFTED)
        positions += len(plain)
        for shape in SHAPES:
            other = reader.logits(some, shape)
            gaps[shape] += flipped(plain, other)
            moved[shape] += probability_moved(plain, other)
    return [
        {
            "steps": shape.name,
            "tokens": positions,
            "flips": len(gaps[shape]),
            "per_1000": rounded(1e3 * len(gaps[shape]) / positions, 1),
            "gap_median": rounded(harness.quantile(gaps[shape], 0.5), 3),
            "gap_most": rounded(max(gaps[shape], default=None), 3),
            "probability_moved": rounded(moved[shape] / positions, 5),
        }
        for shape in SHAPES
    ]


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    count, tokens, samples = (3, 24, 30) if options.quick else (16, 64, 150)
    prompts = harness.prompts(options, pair, count)
    comparison = Comparison(Reference(str(pair.target), options.dtype), prompts, tokens, TIES[options.dtype])
    rows: list[dict[str, Any]] = []
    for verifier_drafts in (False, True):
        own = pair.own_speculation if verifier_drafts else ()
        async with harness.one_verifier(pair, "--dtype", options.dtype, *own) as cluster:
            for way in WAYS:
                if way.verifier_drafts == verifier_drafts:
                    rows.append(comparison.row(way, await generate(way, cluster, prompts, tokens)))
                    say(rows[-1])
            if not verifier_drafts:
                first_tokens = await distribution(cluster, prompts, samples)
                say(first_tokens)
    greedy = [(prompts[key[1]], one.token_ids) for key, one in comparison.undrafted.items() if key[0] == "greedy"]
    by_shape = flips(StepReader(pair.target, options.dtype), greedy)
    say(by_shape)
    mismatches = sum(row["mismatches"] for row in rows)
    setting = f"{count} prompts, greedy and sampled, {tokens} tokens at most, target in {options.dtype}."
    harness.finish(
        options,
        setting,
        rows,
        dtype=options.dtype,
        tokens=sum(row["tokens"] for row in rows),
        differing=sum(row["differing"] for row in rows),
        mismatches=mismatches,
        flips=by_shape,
        first_tokens=first_tokens,
    )
    if mismatches:
        sys.exit(1)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("lossless", __doc__)
    parser.add_argument("--dtype", choices=TIES, default="float32", help="of the verifier's target and the reference")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
