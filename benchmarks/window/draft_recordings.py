"""Record outputs of the target, and what a draft proposes around them, for the windows benchmark to replay."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.support.draft_replay.client import ServiceAddress
from benchmarks.support.draft_replay.recorder import generous, recorder
from benchmarks.support.draft_replay.recording import DraftRecording, Observation, RecordedProposals, RecordedRequest
from benchmarks.support.draft_replay.source import ReplayedSource
from benchmarks.support.draft_replay.swarm import record
from benchmarks.support.harness import Pair
from cloud_verifier.config import VerifierConfig
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.request import Request
from edge_agent.sdk.types import Options
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.vocabulary import token_table

Lessons = tuple[tuple[Observation, ...], ...]
"""Observations, as in a DraftRecording."""
LONG = 1_000
"""Tokens of a long prompt."""
NEAR = (0.75, 0.85)
"""Match rates of the recordings that are compared with the model."""


def options(tokens: int, temperature: float = 0.8) -> Options:
    return Options(max_tokens=tokens, temperature=temperature, seed=20_260_731, ignore_eos=True)


def long_prompts(prompts: Sequence[Sequence[int]], count: int, tokens: int = LONG) -> list[list[int]]:
    """Return prompts of about so many tokens, by joining others; each begins with another one.

    Raises ValueError where all of them together are shorter.
    """
    if sum(map(len, prompts)) < tokens:
        raise ValueError(f"{sum(map(len, prompts))} tokens of prompts make none of {tokens}")
    each = [[token for prompt in (*prompts[i:], *prompts[:i]) for token in prompt] for i in range(count)]
    return [joined[:tokens] for joined in each]


async def calls(
    where: ServiceAddress, prompts: Mapping[str, Sequence[int]], asked: Options, at_once: int = 8
) -> tuple[list[RecordedRequest], tuple[int, ...]]:
    """Generate each prompt's output by plain streaming; return the requests and the target's end tokens."""
    places = asyncio.Semaphore(at_once)
    async with AsyncClient(coordinator=where.coordinator, draft=None, timeout=None) as client:
        description = (await client.prepare()).description
        request = Request.of(**asked)

        async def one(name: str, prompt: Sequence[int]) -> RecordedRequest:
            async with places:
                output = (await client.generate(prompt, **asked)).token_ids
            most = request.max_tokens or len(output)
            return RecordedRequest(name, tuple(prompt), request.sampling, most, output, request.ignore_eos)

        found = await asyncio.gather(*(one(name, prompt) for name, prompt in prompts.items()))
    return found, tuple(description.eos_token_ids)


async def record_draft(
    pair: Pair, draft: Path, requests: Sequence[RecordedRequest], ends: Sequence[int], lessons: Lessons, file: Path
) -> DraftRecording:
    """Record what this draft proposes around the requests, and save it as `file`. lessons: of other prompts."""
    found = await asyncio.to_thread(record, replace(pair, draft=draft), requests, ends)
    recorded = replace(found, lessons=lessons)
    recorded.save(file)
    return recorded


def lessons_from(pair: Pair, draft: Path, requests: Sequence[RecordedRequest], ends: Sequence[int]) -> Lessons:
    """Return the observations of a device with this draft after it has gone through the requests once."""
    return _once(replace(pair, draft=draft), requests, ends, depth=None).lessons


def match_rates(pair: Pair, requests: Sequence[RecordedRequest], ends: Sequence[int], lessons: Lessons) -> list[float]:
    """Return the match rate of the pair's device for each request. No tree is grown for it."""
    recorded = replace(_once(pair, requests, ends, depth=1), lessons=lessons)
    return [match_rate(each) for each in acceptance_histories(recorded, starting_plan(pair))]


def _once(pair: Pair, requests: Sequence[RecordedRequest], ends: Sequence[int], depth: int | None) -> DraftRecording:
    config = VerifierConfig(model=pair.target)
    table = token_table((pair.target / "tokenizer.json").read_bytes())
    plan = generous(config.directive, config.limits)
    with recorder(pair.draft, table, replace(plan, depth=depth or plan.depth), ends) as recording:
        return recording.finish([recording.record(call) for call in requests], timed=False)


def nearest(shares: Sequence[float], most: int, within: tuple[float, float] = NEAR) -> tuple[list[int], int]:
    """Return the indices within the bounds, up to `most`, or else the nearest ones; and how many were within."""
    middle = sum(within) / 2
    order = sorted(range(len(shares)), key=lambda i: abs(shares[i] - middle))
    inside = sum(within[0] <= share <= within[1] for share in shares)
    return order[:most], inside


def acceptance_histories(recorded: DraftRecording, plan: SpeculationPlan) -> list[bytes]:
    """Return the acceptance history of each output (outrider.core.acceptance.history), one entry for each position.

    The proposals are the device's own, the n-gram source's included, beginning with the recording's lessons: its
    drafter is led along the output, one level deep. plan: what it may propose.
    """
    begun = recorded.calibrators()
    return [_acceptance_history(recorded, recording, plan, copy.deepcopy(begun)) for recording in recorded.recordings]


def _acceptance_history(
    recorded: DraftRecording, recording: RecordedProposals, plan: SpeculationPlan, begun: Sequence[Calibrator]
) -> bytes:
    source = ReplayedSource(recorded, sleep=lambda seconds: None)
    greedy, sampled, ngram_greedy, ngram_sampled = begun
    model = CalibratedSource(source, greedy, sampled, DecodeLatency(recorded.widths))
    drafter = Drafter([model, CalibratedSource(NgramSource(), ngram_greedy, ngram_sampled)])
    call = recording.call
    drafter.begin(DraftTask(call.prompt, (), call.sampling, call.max_tokens), replace(plan, depth=1))
    found = []
    for token in call.output:
        drafter.step()
        growth = drafter.harvest(moved=False)
        found.append(_outcome(token, [node.token for node in growth.nodes] if growth else []))
        drafter.advance([token])
    return bytes(found)


def _outcome(token: int, proposals: Sequence[int]) -> int:
    """Return the outcome of the proposals for the token. proposals: the likeliest first."""
    if token not in proposals:
        return MISS
    return HIT if proposals[0] == token else SIBLING


def starting_plan(pair: Pair) -> SpeculationPlan:
    """Return the speculation plan that devices of this pair begin with."""
    config = VerifierConfig(model=pair.target)
    return SpeculationPlan.of(config.directive, config.limits)


def match_rate(history: bytes) -> float:
    """Return the share of positions whose token was the first proposal."""
    return history.count(HIT) / max(1, len(history))
