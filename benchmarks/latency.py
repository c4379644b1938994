"""Measure one user's speed on loopback: drafting on the device against plain streaming and Hugging Face.

The verifier has one core and the device another. `drafted` and `streamed` are the same service with and without a draft
(no drafter runs in the second); `generate` is Hugging Face's on the verifier's core, and `forward` its bare one-token
forward; `own forward` is the engine's, argmax included, which bounds what streaming can reach. Both are compared with
`streaming`: the time of `streamed` from its first token to its last. The prompt is in none of them; all other figures
cover the time from request to last token. Streaming should reach 0.97 of either forward, and of `generate`. The
configurations are interleaved; a figure is the median over rounds of tokens per second. Outputs with more than 30%
repeated 4-grams are left out and counted, because any draft predicts those well. The first round decides that for each
prompt; later ones must repeat its output. Prompts whose answers quote them are measured apart, as `quoting`, repetitive
outputs included.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support import engine_options
from benchmarks.support import old_harness as harness
from benchmarks.support.engine_options import TORCH, VLLM
from benchmarks.support.old_harness import Criterion, Pair
from benchmarks.support.proc import JsonWorker
from benchmarks.support.texts import repetitive
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options

TEMPERATURES = {"greedy": 0.0, "T=0.8": 0.8}
SEED = 20_260_731
STREAMING = 0.97
"""Wanted of plain streaming, over the bare forwards and over `generate`."""
FORWARDS = ("forward", "own forward")


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
    drafted: dict[str, list[Completion]] = field(default_factory=dict)
    """Completions with a draft, by engine."""
    outputs: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Outputs by the prompt's id and the engine, those left out included."""
    keep_repetitive: bool = False
    """Whether repetitive outputs are measured, too."""

    @property
    def repetitive(self) -> set[str]:
        """Return the ids of prompts with a repetitive output."""
        return {name for name, outputs in self.outputs.items() if any(map(repetitive, outputs.values()))}

    @property
    def different(self) -> set[str]:
        """Return the ids of prompts whose outputs differ between the engines."""
        return {name for name, outputs in self.outputs.items() if len(set(outputs.values())) > 1}

    @property
    def excluded(self) -> set[str]:
        """Return the ids of prompts that are left out."""
        return self.different if self.keep_repetitive else self.repetitive | self.different

    def rates(self, configuration: str) -> list[float]:
        """Return the tokens per second of each round that measured something."""
        return [rate for sums in self.rounds if (rate := sums[configuration].rate) is not None]

    def ratio(self, configuration: str, over: str) -> list[float]:
        """Return the ratio of two configurations' rates in each round that measured both."""
        rates = [(sums[configuration].rate, sums[over].rate) for sums in self.rounds]
        return [a / b for a, b in rates if a is not None and b is not None]


@dataclass(frozen=True)
class LatencyRun:
    """Hold the clients and the baseline that are compared."""

    clients: Mapping[str, AsyncClient]
    """The clients `drafted` and `streamed`, and those of vLLM if it is compared."""
    baseline: JsonWorker
    """A process of benchmarks.support.hf_worker."""
    tokens: int
    """Tokens generated for each prompt."""

    async def measure(
        self, rounds: int, prompts: Mapping[str, list[int]], temperature: float, *, keep_repetitive: bool = False
    ) -> SettingResult:
        result = SettingResult(keep_repetitive=keep_repetitive)
        for number in range(rounds):
            result.rounds.append(await self._round(number, prompts, temperature, result))
        return result

    async def _round(
        self, number: int, prompts: Mapping[str, list[int]], temperature: float, result: SettingResult
    ) -> dict[str, Throughput]:
        """Run every prompt that is not left out in every configuration; their order rotates from prompt to prompt.

        Raises RuntimeError if two outputs of one engine for one prompt differ.
        """
        streaming = {name: name.replace("streamed", "streaming") for name in self.clients if name.endswith("streamed")}
        sums = {name: Throughput() for name in (*self.clients, *streaming.values(), "generate", *FORWARDS)}
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
                outputs = result.outputs.setdefault(name, {})
                if outputs.setdefault(engine_of(configuration), completion.token_ids) != completion.token_ids:
                    raise RuntimeError(
                        f"outputs of {name} differ between configurations or rounds: run benchmarks.lossless"
                    )
            if name in result.excluded:
                continue
            for configuration, completion in completions.items():
                if configuration in streaming:
                    measured[streaming[configuration]] = after_first_token(completion)
                else:
                    result.drafted.setdefault(engine_of(configuration), []).append(completion)
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
        own = await self.baseline.ask(own_forward=self.tokens)
        forwards = {name: (self.tokens, one["seconds"]) for name, one in zip(FORWARDS, (bare, own), strict=True)}
        return {"generate": (generated["tokens"], generated["seconds"]), **forwards}


def engine_of(configuration: str) -> str:
    return VLLM if configuration.startswith(VLLM) else TORCH


def after_first_token(completion: Completion) -> tuple[int, float]:
    """Return the number of tokens after the first, and the seconds that they took."""
    timing = completion.statistics
    if timing.first_token_s is None or timing.last_token_s is None:
        return 0, 0.0
    return timing.tokens - 1, timing.last_token_s - timing.first_token_s


def report(setting: str, result: SettingResult) -> None:
    left, different = len(result.outputs) - len(result.excluded), len(result.different)
    apart = f", and {different} whose outputs differ between the engines" if different else ""
    kept = "are among them" if result.keep_repetitive else "are left out"
    print(f"{setting}: {left} prompts; {len(result.repetitive)} repetitive ones {kept}{apart}")
    if not left:
        print("  every output is left out, so there is nothing to compare: its ratios are null", flush=True)
        return
    for configuration in result.rounds[0]:
        print(f"  {configuration:<14} {spread(result.rates(configuration))} tokens/s")
    print(f"  over streaming    {spread(result.ratio('drafted', 'streamed'))}")
    print(f"  over HF generate  {spread(result.ratio('drafted', 'generate'))}")
    for forward in FORWARDS:
        of_bare = result.ratio("streaming", forward)
        print(f"  streaming is {spread(of_bare)} of what the bare {forward} allows (prompt in neither)")
    print(f"  streaming is {spread(result.ratio('streamed', 'generate'))} of HF generate (prompt in both)")
    for engine, completions in result.drafted.items():
        print(f"  {per_step(completions):.2f} tokens per step, {engine}")
    if VLLM in result.drafted:
        print(f"  vLLM's streaming over ours {spread(result.ratio('vllm streamed', 'streamed'))}")
        print(f"  vLLM's chains over our trees {spread(result.ratio('vllm drafted', 'drafted'))}", flush=True)


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


def beside(results: Mapping[str, SettingResult]) -> dict[str, dict[str, float | None]]:
    """Return vLLM's figures, by name and setting; `over_torch` compares it with our engine in the same rounds."""
    ratios = {
        "speedup_vs_streaming": ("vllm drafted", "vllm streamed"),
        "speedup_vs_hf": ("vllm drafted", "generate"),
        "streaming_over_bare_forward": ("vllm streaming", "forward"),
        "drafted_over_torch": ("vllm drafted", "drafted"),
        "streamed_over_torch": ("vllm streamed", "streamed"),
    }
    found = {name: {s: median(r.ratio(*pair)) for s, r in results.items()} for name, pair in ratios.items()}
    return found | {"tokens_per_step": {s: per_step(r.drafted.get(VLLM, ())) for s, r in results.items()}}


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("latency", __doc__)
    engine_options.add_options(parser)
    options = parser.parse_args(argv)
    engines = engine_options.chosen(options)
    pair = Pair.in_folder(options.models)
    rounds, count, tokens = options.size.pick(smoke=(1, 2, 16), quick=(1, 3, 48), full=(5, 18, 96))
    to_quote = pair.encode(harness.prompts("quoting", options.size.pick(smoke=1, quick=2, full=12)))
    cores = harness.cores()
    prompts = pair.encode(harness.prompts("heldout", count))
    warm_up = pair.encode(harness.prompts("tuning", options.size.pick(smoke=1, quick=2, full=4)))
    results: dict[str, SettingResult] = {}
    quoting: dict[str, SettingResult] = {}
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, AsyncClient] = {}
        for engine, flags in engines.items():
            one = harness.one_verifier(pair, *flags, prefix_cache=False, on=cores)
            cluster = await stack.enter_async_context(one)
            for name, draft in (("drafted", "auto"), ("streamed", None)):
                client = AsyncClient(coordinator=cluster.address, draft=draft, timeout=None)
                clients[name if engine == TORCH else f"{engine} {name}"] = await stack.enter_async_context(client)
        baseline = await JsonWorker.start("benchmarks.support.hf_worker", str(pair.target), cores=[cores[0]])
        stack.push_async_callback(baseline.kill)
        run = LatencyRun(clients, baseline, tokens)
        await run.measure(1, warm_up, 0.0)
        for setting, temperature in TEMPERATURES.items():
            results[setting] = await run.measure(rounds, prompts, temperature)
            report(setting, results[setting])
            quoting[setting] = await run.measure(rounds, to_quote, temperature, keep_repetitive=True)
            report(f"{setting}, quoting", quoting[setting])
    drafted = [completion for result in results.values() for completion in result.drafted.get(TORCH, ())]
    of_bare = {s: median(r.ratio("streaming", "forward")) for s, r in results.items()}
    of_own = {s: median(r.ratio("streaming", "own forward")) for s, r in results.items()}
    of_generate = {s: median(r.ratio("streamed", "generate")) for s, r in results.items()}
    found: dict[str, Any] = {
        "speedup_vs_streaming": {s: median(r.ratio("drafted", "streamed")) for s, r in results.items()},
        "speedup_vs_hf": {s: median(r.ratio("drafted", "generate")) for s, r in results.items()},
        "streaming_over_bare_forward": of_bare,
        "streaming_over_own_forward": of_own,
        "streaming_over_generate": of_generate,
        "tokens_per_step": {s: per_step(r.drafted.get(TORCH, ())) for s, r in results.items()},
        "bytes_up_per_token": per_token(drafted, "bytes_up"),
        "bytes_down_per_token": per_token(drafted, "bytes_down"),
        "excluded_repetitive": sum(len(result.repetitive) for result in results.values()),
        "quoting": {
            "speedup_vs_streaming": {s: median(r.ratio("drafted", "streamed")) for s, r in quoting.items()},
            "tokens_per_step": {s: per_step(r.drafted.get(TORCH, ())) for s, r in quoting.items()},
            "repetitive": sum(len(result.repetitive) for result in quoting.values()),
        },
    }
    if VLLM in engines:
        found["excluded_different"] = sum(len(result.different) for result in results.values())
        found[VLLM] = beside(results)
    harness.finish(
        found,
        [
            Criterion.bound(f"streaming over {what}, {setting}", value, at_least=STREAMING, enforced_from=None)
            for what, figures in (("the bare forward", of_bare), ("the own forward", of_own), ("generate", of_generate))
            for setting, value in figures.items()
        ],
        options.size,
    )


if __name__ == "__main__":
    asyncio.run(main())
