"""Token for token: what comes out of the running system against what the target alone produces.

40 held-out prompts, greedy and sampled, through coordinator, verifier and device; then again with the narrow draft,
with no draft, with eight sessions at once, and behind 30 ms. The reference (benchmarks.support.reference) shares no
code with Outrider. Where an output differs it is held against the reference teacher-forced, so that every position
counts; `mismatches` are positions whose two best perturbed scores differ by more than 1e-3, closer ones are `ties`. The
verifier has one core, the device and the reference another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.support import harness
from benchmarks.support.harness import Pair
from benchmarks.support.network_proxy import DelayProxy
from benchmarks.support.reference import Reference, ReferenceSampling, TokenDifference
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion

Prompts = dict[str, list[int]]
"""Token ids by the prompt's name."""
Outputs = dict[tuple[str, str], Completion]
"""By (setting, prompt's name)."""

SETTINGS = {
    "greedy": ReferenceSampling(),
    "sampled": ReferenceSampling(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=20260731,
    ),
}


@dataclass(frozen=True)
class Deployment:
    """One way to run the system."""

    name: str
    draft: str | Path | None
    at_once: int = 1
    rtt_ms: float = 0.0


@dataclass
class TokenComparison:
    """Over all arms; the same output of the same request is held against the reference once."""

    tokens: int = 0
    mismatches: int = 0
    ties: list[str] = field(default_factory=list)
    known: dict[tuple[str, str, tuple[int, ...]], list[TokenDifference]] = field(default_factory=dict)


def arms(pair: Pair) -> list[Deployment]:
    return [
        Deployment("draft", "auto"),
        Deployment("narrow draft", pair.narrow),
        Deployment("no draft", None),
        Deployment("8 at once", "auto", at_once=8),
        Deployment("behind 30 ms", "auto", rtt_ms=30.0),
    ]


@dataclass(frozen=True)
class Service:
    """Addresses of a running system."""

    coordinator: str
    verifier: str


async def run_arm(arm: Deployment, where: Service, prompts: Prompts, max_tokens: int) -> Outputs:
    """Send every prompt in every setting."""
    outputs: Outputs = {}
    async with contextlib.AsyncExitStack() as stack:
        reroute = {}
        if arm.rtt_ms:
            proxy = await stack.enter_async_context(DelayProxy(where.verifier, arm.rtt_ms))
            reroute = {where.verifier: proxy.address}
        settings = EdgeSettings(max_sessions=arm.at_once, draft_workers=arm.at_once)
        client = await stack.enter_async_context(
            AsyncClient(
                coordinator=where.coordinator,
                draft=arm.draft,
                reroute=reroute,
                timeout=None,  # every request is sent at once, and the last one waits for all others
                settings=settings,
            )
        )

        async def one(setting: str, prompt_id: str, ids: list[int]) -> None:
            outputs[setting, prompt_id] = await client.generate(
                ids, max_tokens=max_tokens, **sampling(SETTINGS[setting])
            )

        await asyncio.gather(*(one(setting, *prompt) for setting in SETTINGS for prompt in prompts.items()))
    return outputs


def sampling(settings: ReferenceSampling) -> dict[str, Any]:
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "seed": settings.seed,
    }


def judge(
    arm: Deployment, outputs: Outputs, prompts: Prompts, reference: Reference, tally: TokenComparison, max_tokens: int
) -> int:
    """Hold every output against the reference; returns how many tokens differ at all."""
    differing = 0
    for (setting, prompt_id), completion in outputs.items():
        tokens = completion.token_ids
        key = (setting, prompt_id, tokens)
        if key not in tally.known:
            tally.known[key] = reference.differences(prompts[prompt_id], list(tokens), SETTINGS[setting], max_tokens)
        tally.tokens += len(tokens)
        for difference in tally.known[key]:
            differing += 1
            where = f"{arm.name}, {setting}, {prompt_id}, position {difference.position}"
            what = f"got {difference.got}, expected {difference.expected}, gap {difference.gap:.2e}"
            if difference.tie:
                tally.ties.append(f"{where}: {what}")
            else:
                tally.mismatches += 1
                print(f"MISMATCH {where}: {what}")
    return differing


def against_generate(
    outputs: Outputs, prompts: Prompts, reference: Reference, tally: TokenComparison, max_tokens: int
) -> tuple[int, int]:
    """Greedy outputs that equal Hugging Face's own generate, and how many there are; one that does not, and is no tie
    by `judge`, is a mismatch."""
    same = of = 0
    for (setting, prompt_id), completion in outputs.items():
        if setting != "greedy":
            continue
        of += 1
        equal = reference.generate(prompts[prompt_id], max_tokens) == list(completion.token_ids)
        same += equal
        if not equal and not tally.known[setting, prompt_id, completion.token_ids]:
            tally.mismatches += 1
            print(f"MISMATCH {prompt_id}: differs from generate where the teacher-forced reference agrees")
    return same, of


async def main() -> None:
    options = harness.arguments("lossless", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    chosen = harness.prompts("heldout")[: 6 if options.quick else 40]
    prompts = {prompt.id: tokenizer.encode(prompt.text, add_special_tokens=False).ids for prompt in chosen}
    max_tokens = 32 if options.quick else 96
    verifier_core, device_core = harness.cores()
    tally = TokenComparison()
    async with harness.cluster() as cluster:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[device_core])
        flags = ("--model", str(pair.target), "--draft", str(pair.draft))
        verifier = await cluster.start_verifier(*flags, cores=[verifier_core])
        harness.pin(device_core)
        reference = Reference(str(pair.target))
        where = Service(cluster.address, verifier.address)
        for arm in arms(pair):
            began = time.perf_counter()
            outputs = await run_arm(arm, where, prompts, max_tokens)
            seconds = time.perf_counter() - began
            differing = judge(arm, outputs, prompts, reference, tally, max_tokens)
            steps = sum(completion.statistics.steps for completion in outputs.values())
            count = sum(len(completion.token_ids) for completion in outputs.values())
            if arm.draft is not None and count <= steps:
                raise RuntimeError(f"nothing was drafted in the arm '{arm.name}', so it shows nothing")
            print(
                f"{arm.name:<14} {len(outputs):>3} outputs, {count:>5} tokens, {count / steps:.2f} tokens per step,"
                f" {seconds:.1f} s, {differing} differing",
                flush=True,
            )
            if arm.name == "draft":
                same, of = against_generate(outputs, prompts, reference, tally, max_tokens)
                print(f"{'':<14} {same} of {of} greedy outputs equal Hugging Face's generate")
    for tie in tally.ties:
        print("tie:", tie)
    harness.finish(
        {
            "prompts": len(prompts),
            "tokens": tally.tokens,
            "mismatches": tally.mismatches,
            "ties": len(tally.ties),
        }
    )
    if tally.mismatches:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
