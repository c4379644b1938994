"""One user's speed on loopback: drafting on the device against cloud streaming of the same service and Hugging Face.

The verifier has one core and the device another. `drafted` and `streamed` are the same service with and without a draft
(no drafter runs in the second); `generate` is Hugging Face's on the verifier's core; `forward` is the bare one-token
forward that streaming cannot beat. Arms are interleaved; a figure is the median over rounds of tokens per second, all
time from request to last token counted. Outputs with more than 30% repeated 4-grams are left out and counted: any draft
is good at those.
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

from benchmarks import harness
from benchmarks.harness import Pair
from edge_agent.client import AsyncClient
from edge_agent.completion import Completion, Options

TOKENS = 96
REPETITIVE = 0.30
SETTINGS = {
    "greedy": Options(max_tokens=TOKENS, temperature=0.0),
    "T=0.8": Options(max_tokens=TOKENS, temperature=0.8, seed=20_260_731),
}


class HuggingFace:
    """benchmarks.hf_worker on the verifier's core. An async context manager."""

    def __init__(self, target: Path, core: int) -> None:
        self._command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "benchmarks.hf_worker", str(target)]
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
class Sums:
    """Of one arm in one round."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += int(tokens)
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Outcome:
    """Of one setting over all rounds."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    drafted: list[Completion] = field(default_factory=list)
    excluded: int = 0

    def ratio(self, over: str) -> list[float]:
        return [a / b for a, b in zip(self.rates["drafted"], self.rates[over], strict=True)]


def repetitive(tokens: Sequence[int]) -> bool:
    """More than 30% of the 4-grams occurred before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > REPETITIVE


async def timed(client: AsyncClient, prompt: list[int], options: Options) -> tuple[Completion, float]:
    began = time.perf_counter()
    completion = await client.generate(prompt, **options)
    return completion, time.perf_counter() - began


async def one_round(
    number: int, prompts: Mapping[str, list[int]], options: Options, clients: Mapping[str, AsyncClient], hf: HuggingFace
) -> tuple[dict[str, Sums], list[Completion], int]:
    """Every prompt by every arm, the arms in an order that turns from prompt to prompt."""
    sums = {name: Sums() for name in (*clients, "generate", "forward")}
    drafted, excluded = [], 0
    for i, prompt in enumerate(prompts.values()):
        found: dict[str, tuple[int, float]] = {}
        arms = [*clients, "huggingface"]
        turn = (i + number) % len(arms)
        tokens: tuple[int, ...] = ()
        for arm in arms[turn:] + arms[:turn]:
            if arm == "huggingface":
                generated = await hf.ask(
                    generate=prompt, max_tokens=TOKENS, temperature=options.get("temperature", 0.0)
                )
                found["generate"] = (int(generated["tokens"]), generated["seconds"])
                bare = await hf.ask(forward=prompt, steps=TOKENS)
                found["forward"] = (TOKENS, bare["seconds"])
            else:
                completion, seconds = await timed(clients[arm], prompt, options)
                found[arm] = (len(completion.token_ids), seconds)
                if tokens and tokens != completion.token_ids:
                    raise RuntimeError("drafted and streamed outputs differ: run benchmarks.lossless")
                tokens = completion.token_ids
                if arm == "drafted":
                    drafted.append(completion)
        if repetitive(tokens):
            excluded += 1
            drafted.pop()
            continue
        for arm, measured in found.items():
            sums[arm].add(*measured)
    return sums, drafted, excluded


async def measure(
    rounds: int, prompts: Mapping[str, list[int]], options: Options, clients: Mapping[str, AsyncClient], hf: HuggingFace
) -> Outcome:
    outcome = Outcome()
    for number in range(rounds):
        sums, drafted, outcome.excluded = await one_round(number, prompts, options, clients, hf)
        outcome.drafted += drafted
        for arm, total in sums.items():
            outcome.rates.setdefault(arm, []).append(total.rate)
    return outcome


def report(setting: str, outcome: Outcome, count: int) -> None:
    print(f"{setting}: {count - outcome.excluded} prompts, {outcome.excluded} repetitive ones left out")
    for arm, rates in outcome.rates.items():
        print(f"  {arm:<10} {harness.spread(rates)} tokens/s")
    print(f"  over streaming    {harness.spread(outcome.ratio('streamed'))}")
    print(f"  over HF generate  {harness.spread(outcome.ratio('generate'))}")
    of_bare = [a / b for a, b in zip(outcome.rates["streamed"], outcome.rates["forward"], strict=True)]
    print(
        f"  streaming is {harness.spread(of_bare)} of what a bare one-token forward allows (prompt and wire included)"
    )
    print(f"  {per_step(outcome.drafted):.2f} tokens per step", flush=True)


def per_step(completions: Sequence[Completion]) -> float:
    return sum(c.statistics.tokens for c in completions) / sum(c.statistics.steps for c in completions)


def per_token(completions: Sequence[Completion], field_name: str) -> float:
    tokens = sum(c.statistics.tokens for c in completions)
    return sum(getattr(c.statistics, field_name) for c in completions) / tokens


async def main() -> None:
    options = harness.arguments("latency", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    rounds, count = (2, 4) if options.quick else (5, 18)
    verifier_core, device_core = harness.cores()
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")[:count]}
    outcomes: dict[str, Outcome] = {}
    async with harness.cluster() as cluster, HuggingFace(pair.target, verifier_core) as hf:
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
            await one_round(0, dict(enumerate(tuning)), SETTINGS["greedy"], clients, hf)  # type: ignore[arg-type]
            for setting, sampling in SETTINGS.items():
                outcomes[setting] = await measure(rounds, prompts, sampling, clients, hf)
                report(setting, outcomes[setting], count)
    everything = [completion for outcome in outcomes.values() for completion in outcome.drafted]
    harness.finish(
        {
            "speedup_vs_streaming": {s: round(statistics.median(o.ratio("streamed")), 3) for s, o in outcomes.items()},
            "speedup_vs_hf": {s: round(statistics.median(o.ratio("generate")), 3) for s, o in outcomes.items()},
            "tokens_per_step": {s: round(per_step(o.drafted), 3) for s, o in outcomes.items()},
            "bytes_up_per_token": round(per_token(everything, "bytes_up"), 1),
            "bytes_down_per_token": round(per_token(everything, "bytes_down"), 1),
            "excluded_repetitive": sum(outcome.excluded for outcome in outcomes.values()),
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
