"""One user's speed on loopback: drafting on the device against cloud streaming of the same service and Hugging Face.

The verifier has one core and the device another. `drafted` and `streamed` are the same service with and without a draft
(no drafter runs in the second); `generate` is Hugging Face's on the verifier's core; `forward` is the bare one-token
forward that streaming cannot beat, to be held against `streaming`, the time of `streamed` from its first token to its
last: the prompt is in neither. Arms are interleaved; a figure is the median over rounds of tokens per second, in the
other arms all time from request to last token. Outputs with more than 30% repeated 4-grams are left out and counted:
any draft is good at those. That is decided once for each prompt, by the first round; later ones must repeat its output.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer

from benchmarks.support import harness
from benchmarks.support.harness import Pair
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options

TOKENS = 96
REPETITIVE = 0.30
SETTINGS = {
    "greedy": Options(max_tokens=TOKENS, temperature=0.0),
    "T=0.8": Options(max_tokens=TOKENS, temperature=0.8, seed=20_260_731),
}


class HuggingFaceWorker:
    """benchmarks.support.hf_worker on the verifier's core. An async context manager."""

    def __init__(self, target: Path, core: int) -> None:
        self._command = [
            "taskset",
            "--cpu-list",
            str(core),
            sys.executable,
            "-m",
            "benchmarks.support.hf_worker",
            str(target),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=harness.ROOT,
        )
        await self._answer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, **request: Any) -> dict[str, float]:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the Hugging Face worker is not running")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, float]:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the Hugging Face worker is not running")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the Hugging Face worker has ended")
        answer: dict[str, float] = json.loads(line)
        return answer


@dataclass
class Throughput:
    """Of one arm in one round."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += int(tokens)
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        """Tokens per second; None where nothing was measured."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass
class SettingResult:
    """Of one setting over all rounds."""

    rounds: list[dict[str, Throughput]] = field(default_factory=list)
    """By arm."""
    drafted: list[Completion] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By the prompt's name, those left out included."""

    @property
    def excluded(self) -> set[str]:
        """The prompts whose output is repetitive."""
        return {name for name, tokens in self.outputs.items() if repetitive(tokens)}

    def rates(self, arm: str) -> list[float]:
        """One for each round that measured something."""
        return [rate for sums in self.rounds if (rate := sums[arm].rate) is not None]

    def ratio(self, arm: str, over: str) -> list[float]:
        """One for each round that measured both."""
        rates = [(sums[arm].rate, sums[over].rate) for sums in self.rounds]
        return [a / b for a, b in rates if a is not None and b is not None]


def repetitive(tokens: Sequence[int]) -> bool:
    """More than 30% of the 4-grams occurred before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > REPETITIVE


async def timed(client: AsyncClient, prompt: list[int], options: Options) -> tuple[Completion, float]:
    began = time.perf_counter()
    completion = await client.generate(prompt, **options)
    return completion, time.perf_counter() - began


async def one_round(
    number: int,
    prompts: Mapping[str, list[int]],
    options: Options,
    clients: Mapping[str, AsyncClient],
    hf: HuggingFaceWorker,
    outcome: SettingResult,
) -> dict[str, Throughput]:
    """Every prompt that is not left out by every arm, the arms in an order that turns from prompt to prompt."""
    sums = {name: Throughput() for name in (*clients, "streaming", "generate", "forward")}
    left_out = outcome.excluded
    for i, (name, prompt) in enumerate(prompts.items()):
        if name in left_out:
            continue
        arms = [*clients, "huggingface"]
        turn = (i + number) % len(arms)
        found: dict[str, tuple[float, float]] = {}
        completions: dict[str, Completion] = {}
        for arm in arms[turn:] + arms[:turn]:
            if arm == "huggingface":
                generated = await hf.ask(
                    generate=prompt, max_tokens=TOKENS, temperature=options.get("temperature", 0.0)
                )
                found["generate"] = (generated["tokens"], generated["seconds"])
                bare = await hf.ask(forward=prompt, steps=TOKENS)
                found["forward"] = (TOKENS, bare["seconds"])
            else:
                completions[arm], seconds = await timed(clients[arm], prompt, options)
                tokens = completions[arm].token_ids
                found[arm] = (len(tokens), seconds)
                if outcome.outputs.setdefault(name, tokens) != tokens:
                    raise RuntimeError(f"outputs of {name} differ between arms or rounds: run benchmarks.lossless")
        if repetitive(outcome.outputs[name]):
            continue
        found["streaming"] = after_the_first(completions["streamed"])
        outcome.drafted.append(completions["drafted"])
        for arm, measured in found.items():
            sums[arm].add(*measured)
    return sums


def after_the_first(completion: Completion) -> tuple[int, float]:
    """Tokens after the first, and the seconds that they took."""
    timing = completion.statistics
    if timing.first_token_s is None or timing.last_token_s is None:
        return 0, 0.0
    return timing.tokens - 1, timing.last_token_s - timing.first_token_s


async def measure(
    rounds: int,
    prompts: Mapping[str, list[int]],
    options: Options,
    clients: Mapping[str, AsyncClient],
    hf: HuggingFaceWorker,
) -> SettingResult:
    outcome = SettingResult()
    for number in range(rounds):
        outcome.rounds.append(await one_round(number, prompts, options, clients, hf, outcome))
    return outcome


def report(setting: str, outcome: SettingResult) -> None:
    left, excluded = len(outcome.outputs) - len(outcome.excluded), len(outcome.excluded)
    print(f"{setting}: {left} prompts, {excluded} repetitive ones left out")
    if not left:
        print("  every output is repetitive, so there is nothing to compare: its ratios are null", flush=True)
        return
    for arm in outcome.rounds[0]:
        print(f"  {arm:<10} {spread(outcome.rates(arm))} tokens/s")
    print(f"  over streaming    {spread(outcome.ratio('drafted', 'streamed'))}")
    print(f"  over HF generate  {spread(outcome.ratio('drafted', 'generate'))}")
    of_bare = outcome.ratio("streaming", "forward")
    print(f"  streaming is {spread(of_bare)} of what a bare one-token forward allows (prompt in neither)")
    print(f"  {per_step(outcome.drafted):.2f} tokens per step", flush=True)


def spread(values: Sequence[float]) -> str:
    return harness.spread(values) if values else "(not measured)"


def median(ratios: Sequence[float]) -> float | None:
    return round(statistics.median(ratios), 3) if ratios else None


def per_step(completions: Sequence[Completion]) -> float | None:
    """None where nothing was measured."""
    steps = sum(c.statistics.steps for c in completions)
    return round(sum(c.statistics.tokens for c in completions) / steps, 3) if steps else None


def per_token(completions: Sequence[Completion], field_name: str) -> float | None:
    """None where nothing was measured."""
    tokens = sum(c.statistics.tokens for c in completions)
    return round(sum(getattr(c.statistics, field_name) for c in completions) / tokens, 1) if tokens else None


async def main() -> None:
    options = harness.arguments("latency", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    rounds, count = (2, 4) if options.quick else (5, 18)
    verifier_core, device_core = harness.cores()
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")[:count]}
    outcomes: dict[str, SettingResult] = {}
    async with harness.cluster(prefix_cache=False) as cluster, HuggingFaceWorker(pair.target, verifier_core) as hf:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[device_core])
        arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1"]
        await cluster.start_verifier(*arguments, cores=[verifier_core])
        harness.pin(device_core)
        async with (
            AsyncClient(coordinator=cluster.address) as drafting,
            AsyncClient(coordinator=cluster.address, draft=None) as streaming,
        ):
            clients = {"drafted": drafting, "streamed": streaming}
            tuning = [tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("tuning")[:4]]
            await measure(1, {str(i): ids for i, ids in enumerate(tuning)}, SETTINGS["greedy"], clients, hf)
            for setting, sampling in SETTINGS.items():
                outcomes[setting] = await measure(rounds, prompts, sampling, clients, hf)
                report(setting, outcomes[setting])
    everything = [completion for outcome in outcomes.values() for completion in outcome.drafted]
    harness.finish(
        {
            "speedup_vs_streaming": {s: median(o.ratio("drafted", "streamed")) for s, o in outcomes.items()},
            "speedup_vs_hf": {s: median(o.ratio("drafted", "generate")) for s, o in outcomes.items()},
            "streaming_over_bare_forward": {s: median(o.ratio("streaming", "forward")) for s, o in outcomes.items()},
            "tokens_per_step": {s: per_step(o.drafted) for s, o in outcomes.items()},
            "bytes_up_per_token": per_token(everything, "bytes_up"),
            "bytes_down_per_token": per_token(everything, "bytes_down"),
            "excluded_repetitive": sum(len(outcome.excluded) for outcome in outcomes.values()),
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
