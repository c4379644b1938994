"""Measure one user's speed on loopback: drafting on the device against plain streaming and Hugging Face.

The verifier has one core and the device another. `drafted` and `streamed` are the same service with and without a draft
(no drafter runs in the second); `generate` is Hugging Face's on the verifier's core; `forward` is the bare one-token
forward, which bounds what streaming can reach, and is compared with `streaming`: the time of `streamed` from its first
token to its last. The prompt is in neither; all other figures cover the time from request to last token. Streaming
should reach 0.97 of the bare forward, and of `generate`. The configurations are interleaved; a figure is the median
over rounds of tokens per second. Outputs with more than 30% repeated 4-grams are left out and counted, because any
draft predicts those well. The first round decides that for each prompt; later ones must repeat its output.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.support import harness
from benchmarks.support.harness import Criterion, Pair
from benchmarks.support.proc import JsonWorker
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options

REPETITIVE = 0.30
TEMPERATURES = {"greedy": 0.0, "T=0.8": 0.8}
SEED = 20_260_731
STREAMING = 0.97
"""Wanted of plain streaming, over the bare forward and over `generate`."""


@dataclass
class Throughput:
    """Hold the tokens and seconds of one configuration in one round."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += int(tokens)
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        """Return the tokens per second; None if nothing was measured."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass
class SettingResult:
    """Hold the measurements of one sampling setting over all rounds."""

    rounds: list[dict[str, Throughput]] = field(default_factory=list)
    """Throughput of each configuration, by round."""
    drafted: list[Completion] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Outputs by the prompt's id, those left out included."""

    @property
    def excluded(self) -> set[str]:
        """Return the ids of prompts whose output is repetitive."""
        return {name for name, tokens in self.outputs.items() if repetitive(tokens)}

    def rates(self, configuration: str) -> list[float]:
        """Return the tokens per second of each round that measured something."""
        return [rate for sums in self.rounds if (rate := sums[configuration].rate) is not None]

    def ratio(self, configuration: str, over: str) -> list[float]:
        """Return the ratio of two configurations' rates in each round that measured both."""
        rates = [(sums[configuration].rate, sums[over].rate) for sums in self.rounds]
        return [a / b for a, b in rates if a is not None and b is not None]


def repetitive(tokens: Sequence[int]) -> bool:
    """Return whether more than 30% of the 4-grams occurred before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > REPETITIVE


@dataclass(frozen=True)
class LatencyRun:
    """Hold the clients and the baseline that are compared."""

    clients: Mapping[str, AsyncClient]
    """The clients `drafted` and `streamed`."""
    baseline: JsonWorker
    """A process of benchmarks.support.hf_worker."""
    tokens: int
    """Tokens generated for each prompt."""

    async def measure(self, rounds: int, prompts: Mapping[str, list[int]], temperature: float) -> SettingResult:
        result = SettingResult()
        for number in range(rounds):
            result.rounds.append(await self._round(number, prompts, temperature, result))
        return result

    async def _round(
        self, number: int, prompts: Mapping[str, list[int]], temperature: float, result: SettingResult
    ) -> dict[str, Throughput]:
        """Run every prompt that is not left out in every configuration; their order rotates from prompt to prompt.

        Raises RuntimeError if two outputs for one prompt differ.
        """
        sums = {name: Throughput() for name in (*self.clients, "streaming", "generate", "forward")}
        excluded = result.excluded
        for i, (name, prompt) in enumerate(prompts.items()):
            if name in excluded:
                continue
            measured: dict[str, tuple[float, float]] = {}
            completions: dict[str, Completion] = {}
            for configuration in harness.rotated([*self.clients, "huggingface"], i + number):
                if configuration == "huggingface":
                    measured |= await self._baseline(prompt, temperature)
                    continue
                completion, seconds = await self._generate(configuration, prompt, temperature)
                completions[configuration] = completion
                measured[configuration] = (len(completion.token_ids), seconds)
                if result.outputs.setdefault(name, completion.token_ids) != completion.token_ids:
                    raise RuntimeError(
                        f"outputs of {name} differ between configurations or rounds: run benchmarks.lossless"
                    )
            if repetitive(result.outputs[name]):
                continue
            measured["streaming"] = after_first_token(completions["streamed"])
            result.drafted.append(completions["drafted"])
            for configuration, (count, seconds) in measured.items():
                sums[configuration].add(count, seconds)
        return sums

    async def _generate(self, configuration: str, prompt: list[int], temperature: float) -> tuple[Completion, float]:
        options = Options(max_tokens=self.tokens, temperature=temperature, seed=SEED)
        began = time.perf_counter()
        completion = await self.clients[configuration].generate(prompt, **options)
        return completion, time.perf_counter() - began

    async def _baseline(self, prompt: list[int], temperature: float) -> dict[str, tuple[float, float]]:
        generated = await self.baseline.ask(generate=prompt, max_tokens=self.tokens, temperature=temperature)
        bare = await self.baseline.ask(forward=prompt, steps=self.tokens)
        return {"generate": (generated["tokens"], generated["seconds"]), "forward": (self.tokens, bare["seconds"])}


def after_first_token(completion: Completion) -> tuple[int, float]:
    """Return the number of tokens after the first, and the seconds that they took."""
    timing = completion.statistics
    if timing.first_token_s is None or timing.last_token_s is None:
        return 0, 0.0
    return timing.tokens - 1, timing.last_token_s - timing.first_token_s


def report(setting: str, result: SettingResult) -> None:
    left, excluded = len(result.outputs) - len(result.excluded), len(result.excluded)
    print(f"{setting}: {left} prompts, {excluded} repetitive ones left out")
    if not left:
        print("  every output is repetitive, so there is nothing to compare: its ratios are null", flush=True)
        return
    for configuration in result.rounds[0]:
        print(f"  {configuration:<10} {spread(result.rates(configuration))} tokens/s")
    print(f"  over streaming    {spread(result.ratio('drafted', 'streamed'))}")
    print(f"  over HF generate  {spread(result.ratio('drafted', 'generate'))}")
    of_bare = result.ratio("streaming", "forward")
    print(f"  streaming is {spread(of_bare)} of what a bare one-token forward allows (prompt in neither)")
    print(f"  streaming is {spread(result.ratio('streamed', 'generate'))} of HF generate (prompt in both)")
    print(f"  {per_step(result.drafted):.2f} tokens per step", flush=True)


def spread(values: Sequence[float]) -> str:
    return harness.spread(values) if values else "(not measured)"


def median(ratios: Sequence[float]) -> float | None:
    return round(statistics.median(ratios), 3) if ratios else None


def per_step(completions: Sequence[Completion]) -> float | None:
    """Return tokens per verification step; None if nothing was measured."""
    steps = sum(c.statistics.steps for c in completions)
    return round(sum(c.statistics.tokens for c in completions) / steps, 3) if steps else None


def per_token(completions: Sequence[Completion], field_name: str) -> float | None:
    """Return a statistic per token; None if nothing was measured."""
    tokens = sum(c.statistics.tokens for c in completions)
    return round(sum(getattr(c.statistics, field_name) for c in completions) / tokens, 1) if tokens else None


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("latency", __doc__).parse_args(argv)
    pair = Pair.in_folder(options.models)
    rounds, count, tokens = options.size.pick(smoke=(1, 2, 16), quick=(2, 4, 96), full=(5, 18, 96))
    verifier_core, _ = harness.cores()
    prompts = pair.encode(harness.prompts("heldout", count))
    warm_up = pair.encode(harness.prompts("tuning", options.size.pick(smoke=1, quick=4, full=4)))
    results: dict[str, SettingResult] = {}
    async with harness.one_verifier(pair, prefix_cache=False) as cluster:
        baseline = await JsonWorker.start("benchmarks.support.hf_worker", str(pair.target), cores=[verifier_core])
        try:
            async with (
                AsyncClient(coordinator=cluster.address) as drafting,
                AsyncClient(coordinator=cluster.address, draft=None) as streaming,
            ):
                run = LatencyRun({"drafted": drafting, "streamed": streaming}, baseline, tokens)
                await run.measure(1, warm_up, 0.0)
                for setting, temperature in TEMPERATURES.items():
                    results[setting] = await run.measure(rounds, prompts, temperature)
                    report(setting, results[setting])
        finally:
            await baseline.kill()
    drafted = [completion for result in results.values() for completion in result.drafted]
    of_bare = {s: median(r.ratio("streaming", "forward")) for s, r in results.items()}
    of_generate = {s: median(r.ratio("streamed", "generate")) for s, r in results.items()}
    harness.finish(
        {
            "speedup_vs_streaming": {s: median(r.ratio("drafted", "streamed")) for s, r in results.items()},
            "speedup_vs_hf": {s: median(r.ratio("drafted", "generate")) for s, r in results.items()},
            "streaming_over_bare_forward": of_bare,
            "streaming_over_generate": of_generate,
            "tokens_per_step": {s: per_step(r.drafted) for s, r in results.items()},
            "bytes_up_per_token": per_token(drafted, "bytes_up"),
            "bytes_down_per_token": per_token(drafted, "bytes_down"),
            "excluded_repetitive": sum(len(result.excluded) for result in results.values()),
        },
        [
            Criterion.bound(f"streaming over {what}, {setting}", found, at_least=STREAMING, enforced_from=None)
            for what, figures in (("the bare forward", of_bare), ("generate", of_generate))
            for setting, found in figures.items()
        ],
        options.size,
    )


if __name__ == "__main__":
    asyncio.run(main())
