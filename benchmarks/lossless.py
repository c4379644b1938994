"""Compare every token of the running system with the output of the target alone.

40 held-out prompts, greedy and sampled, go through coordinator, verifier and device; then again with the narrow draft,
with no draft, with eight sessions at once, and behind a round trip of 30 ms. The reference, which is
benchmarks.support.reference, shares no code with Outrider. An output that differs is compared with the reference
teacher-forced, so that every position counts; `mismatches` are positions whose two best perturbed scores differ by more
than 1e-3, closer ones are `ties`. The verifier has one core, the device and the reference another.

Then 200 requests, greedy, sampled and penalised, with and without drafts, in one piece and resumed on another verifier,
are compared with one another (benchmarks.support.engine_equality). With `--vllm-python` verifiers that run vLLM get the
same 200, and the two engines' outputs are compared too. `--only engines` leaves out all that comes before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import engine_equality, engine_options
from benchmarks.support import old_harness as harness
from benchmarks.support.network_proxy import DelayProxy
from benchmarks.support.old_harness import Criterion, Pair, Size
from benchmarks.support.reference import Reference, ReferenceSampling, TokenDifference
from coordinator.cluster import Cluster
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion

Outputs = dict[tuple[str, str], Completion]
"""By setting and the prompt's id."""

REFERENCE, ENGINES = PARTS = ("reference", "engines")

MOST_TIES = 0.001
"""Share of the tokens that may be ties: with more of them, a wrong token could hide among them."""
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
    """Describe a way to run the system: the draft, the number of sessions at once, and the round trip."""

    name: str
    draft: str | Path | None
    at_once: int = 1
    rtt_ms: float = 0.0


def deployments(pair: Pair) -> list[Deployment]:
    return [
        Deployment("draft", "auto"),
        Deployment("narrow draft", pair.narrow),
        Deployment("no draft", None),
        Deployment("8 at once", "auto", at_once=8),
        Deployment("behind 30 ms", "auto", rtt_ms=30.0),
    ]


async def generate(deployment: Deployment, cluster: Cluster, prompts: dict[str, list[int]], max_tokens: int) -> Outputs:
    """Send every prompt in every setting."""
    outputs: Outputs = {}
    async with contextlib.AsyncExitStack() as stack:
        reroute = {}
        if deployment.rtt_ms:
            verifier = cluster.verifiers[0].address
            proxy = await stack.enter_async_context(DelayProxy(verifier, deployment.rtt_ms))
            reroute = {verifier: proxy.address}
        settings = EdgeSettings(max_sessions=deployment.at_once, draft_workers=deployment.at_once)
        client = await stack.enter_async_context(
            AsyncClient(
                coordinator=cluster.address,
                draft=deployment.draft,
                reroute=reroute,
                timeout=None,  # all requests are sent at once, and the last one waits for all others
                settings=settings,
            )
        )

        async def one(setting: str, prompt_id: str, ids: list[int]) -> None:
            sampling = asdict(SETTINGS[setting])
            outputs[setting, prompt_id] = await client.generate(ids, max_tokens=max_tokens, **sampling)

        await asyncio.gather(*(one(setting, *prompt) for setting in SETTINGS for prompt in prompts.items()))
    return outputs


@dataclass
class TokenComparison:
    """Compare outputs with the reference, over all deployments."""

    reference: Reference
    prompts: dict[str, list[int]]
    max_tokens: int
    tokens: int = 0
    mismatches: int = 0
    ties: list[str] = field(default_factory=list)
    _known: dict[tuple[str, str, tuple[int, ...]], list[TokenDifference]] = field(default_factory=dict)
    """Results by output and request, so that equal outputs of one request are compared once."""

    def add(self, deployment: Deployment, outputs: Outputs) -> int:
        """Compare every output with the reference; return how many tokens differ, ties included."""
        differing = 0
        for (setting, prompt_id), completion in outputs.items():
            self.tokens += len(completion.token_ids)
            for difference in self._differences(setting, prompt_id, completion.token_ids):
                differing += 1
                where = f"{deployment.name}, {setting}, {prompt_id}, position {difference.position}"
                what = f"got {difference.got}, expected {difference.expected}, gap {difference.gap:.2e}"
                if difference.tie:
                    self.ties.append(f"{where}: {what}")
                else:
                    self.mismatches += 1
                    print(f"MISMATCH {where}: {what}")
        return differing

    def add_greedy(self, outputs: Outputs) -> tuple[int, int]:
        """Compare greedy outputs with Hugging Face's own generate; return how many are equal, and of how many.

        An output that differs without being a tie in the teacher-forced comparison is a mismatch.
        """
        equal = total = 0
        for (setting, prompt_id), completion in outputs.items():
            if setting != "greedy":
                continue
            total += 1
            if self.reference.generate(self.prompts[prompt_id], self.max_tokens) == list(completion.token_ids):
                equal += 1
            elif not self._differences(setting, prompt_id, completion.token_ids):
                self.mismatches += 1
                print(f"MISMATCH {prompt_id}: differs from generate where the teacher-forced reference agrees")
        return equal, total

    def _differences(self, setting: str, prompt_id: str, tokens: tuple[int, ...]) -> list[TokenDifference]:
        key = (setting, prompt_id, tokens)
        if key not in self._known:
            self._known[key] = self.reference.differences(
                self.prompts[prompt_id], list(tokens), SETTINGS[setting], self.max_tokens
            )
        return self._known[key]


async def against_reference(pair: Pair, size: Size) -> tuple[dict[str, Any], list[Criterion]]:
    """Run every deployment, and compare its tokens with the reference's; return the figures and criteria."""
    count, max_tokens = size.pick(smoke=(1, 24), quick=(4, 32), full=(40, 96))
    prompts = pair.encode(harness.prompts("heldout", count))
    undrafted: list[str] = []
    async with harness.one_verifier(pair) as cluster:
        comparison = TokenComparison(Reference(str(pair.target)), prompts, max_tokens)
        for deployment in deployments(pair):
            began = time.perf_counter()
            outputs = await generate(deployment, cluster, prompts, max_tokens)
            seconds = time.perf_counter() - began
            differing = comparison.add(deployment, outputs)
            steps = sum(completion.statistics.steps for completion in outputs.values())
            tokens = sum(len(completion.token_ids) for completion in outputs.values())
            if deployment.draft is not None and tokens <= steps:
                undrafted.append(deployment.name)
            print(
                f"{deployment.name:<14} {len(outputs):>3} outputs, {tokens:>5} tokens, {tokens / steps:.2f} tokens per"
                f" step, {seconds:.1f} s, {differing} differing",
                flush=True,
            )
            if deployment.name == "draft":
                equal, total = comparison.add_greedy(outputs)
                print(f"{'':<14} {equal} of {total} greedy outputs equal Hugging Face's generate")
    for tie in comparison.ties:
        print("tie:", tie)
    found = {
        "prompts": len(prompts),
        "tokens": comparison.tokens,
        "mismatches": comparison.mismatches,
        "ties": len(comparison.ties),
    }
    return found, [
        Criterion.none("positions that are not the target's token", comparison.mismatches),
        Criterion.bound("ties", len(comparison.ties), at_most=MOST_TIES * comparison.tokens),
        # Whether a proposal comes in time within a few tokens depends on the machine.
        Criterion(
            "deployments with a draft in which no proposal was accepted",
            "none",
            ", ".join(undrafted) or "none",
            not undrafted,
            enforced_from=Size.QUICK,
        ),
    ]


async def among_engines(pair: Pair, vllm_python: Path | None, size: Size) -> tuple[dict[str, Any], list[Criterion]]:
    """Compare the outputs of one set of requests within each engine, and between them; return figures and criteria."""
    requests, max_tokens = size.pick(smoke=(12, 32), quick=(32, 32), full=(200, 64))
    engines = engine_options.engines(vllm_python)
    found = await engine_equality.run(pair, engines, requests, max_tokens)
    for engine, one in found["engines"].items():
        print(
            f"{engine}: {one['requests']} requests, {one['tokens']} tokens, {one['resumed']} resumed on the other"
            f" verifier, {one['tokens_per_step']} tokens per step with drafts"
        )
    criteria = [Criterion.none(name, count) for name, count in engine_equality.mismatches(found)]
    for engine, one in found["engines"].items():
        name = f"requests that were resumed, {engine}"
        least = size.pick(smoke=1.0, quick=requests / 4, full=requests / 4)  # texts may end before they are cut
        criteria.append(Criterion.bound(name, one["resumed"], at_least=least, enforced_from=Size.SMOKE))
        criteria.append(
            Criterion.bound(f"ties between requests, {engine}", len(one["ties"]), at_most=MOST_TIES * one["tokens"])
        )
    return found, criteria


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("lossless", __doc__)
    engine_options.add_python(parser, "--vllm-python")
    parser.add_argument("--only", choices=PARTS, help="run this part alone")
    options = parser.parse_args(argv)
    pair = Pair.in_folder(options.models)
    result: dict[str, Any] = {}
    criteria: list[Criterion] = []
    cores = os.sched_getaffinity(0)
    for part in [options.only] if options.only else PARTS:
        os.sched_setaffinity(0, cores)  # a part may have kept this process on one
        if part == REFERENCE:
            found, wanted = await against_reference(pair, options.size)
        else:
            found, wanted = await among_engines(pair, options.vllm_python, options.size)
        result |= found
        criteria += wanted
    harness.finish(result, criteria, options.size)


if __name__ == "__main__":
    asyncio.run(main())
