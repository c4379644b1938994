"""Measure the engine's steps on a GPU: by rows, with and without CUDA graphs, outside the forward, and beside others.

The target has random weights and the shape of Qwen3 with 8B parameters, or of 1.7B; its output layer has 151,936
tokens. Four parts, which `--only` chooses from:

`rows`: milliseconds of a forward pass by the number of its rows, of up to 8 sessions behind 128 tokens each,
plan and argmax included: with CUDA graphs, without them, and with graphs of compiled layers (`--compile`).

`steps`: milliseconds of the engine's step, of the forward pass in it and outside it, by the number of sessions:
without trees and with trees of 4 nodes, greedy and with every row sampled (temperature 0.8, top-p 0.95). The forward
pass is what the GPU takes for it, by CUDA events; outside, it waits for the host, or chooses tokens.

`hf`: plain decoding of the same prompts by the engine, and by Hugging Face `generate` on the very same weights, with a
dynamic cache and with a static one, whose forward transformers compiles. Decode only: between the last request's first
token and the first request's last one. Figures are tokens per second by the wall clock, the engine's without its
scripted devices' time and measured before all others, and the ratio is over the better.

`attention`: microseconds of one layer's attention for steps of 16 and 64 sessions behind 256 to 32,768 tokens, by the
triton kernels and by sdpa, and the bytes of keys and values that the former read per second. Heads are the target's.

Without a CUDA device nothing is measured; `--device cpu` measures a tiny target, and its figures mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.support import harness
from benchmarks.support.engine_driver.configurations import DEVICE, PLAIN, Configuration
from benchmarks.support.engine_driver.random_models import SHAPES, ModelShape, random_model, random_module
from benchmarks.support.engine_driver.scripted_trees import TreeTally
from benchmarks.support.engine_driver.stepped_engine import Case, SteppedEngine, Workload
from benchmarks.support.harness import Size
from benchmarks.support.hf_baseline import GenerateRequest, HuggingFaceBaseline
from cloud_verifier.engine.step_profiler import SESSIONS
from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.executor import timed_steps
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionBackend, Scoring, SdpaBackend
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.sampling import SamplingParams

PARTS = ("rows", "attention", "steps", "hf")
"""In this order: the engine's graphs have failed in a process in which transformers had compiled."""
HF_ARMS = ("engine", "hf dynamic", "hf static")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
WARM = 2
"""Forward passes of each number of rows that are not timed; the first one captures a graph."""
TREE_NODES = 4
SEGMENT_ROWS = 5
"""Rows of each session in the steps of `attention`: its last token and a tree of TREE_NODES."""


@dataclass(frozen=True)
class Plan:
    """Set how much is measured."""

    sessions: tuple[int, ...] = (1, 16, 64, 256)
    steps: int = 8
    rounds: int = 2
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 512)
    repeats: int = 15
    """Forward passes of each number of rows."""
    hf_sessions: tuple[int, ...] = (1, 16, 64)
    hf_tokens: int = 96
    contexts: tuple[int, ...] = (256, 2_048, 8_192, 32_768)
    slots: int = 1 << 20
    """The most KV slots of one layer in `attention`; sessions that need more are left out."""
    prompt: int = 256


PLANS = {
    Size.FULL: Plan(),
    Size.QUICK: Plan(sessions=(1, 16, 64), steps=8, rounds=2, repeats=5, hf_sessions=(16,), contexts=(256, 8_192)),
    Size.SMOKE: Plan(
        sessions=(1, 2),
        steps=2,
        rounds=1,
        rows=(1, 16),
        repeats=1,
        hf_sessions=(2,),
        hf_tokens=6,
        contexts=(16,),
        slots=4_096,
        prompt=16,
    ),
}


class ForwardTimer:
    """Time the forward passes of a model while it is entered: on a GPU by events, so that nothing waits for them."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> ForwardTimer:
        self._patch = patch.object(self._model, "forward", partial(self._timed, self._model.forward))
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _timed(self, forward: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        begin, logits, end = self._mark(), forward(*arguments), self._mark()
        self._spans.append((begin, end))
        return logits

    def _mark(self) -> Any:
        if self._model.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take(self, count: int) -> list[float]:
        """Return the milliseconds of the last `count` forward passes, which the device has finished."""
        spans, self._spans = self._spans[-count:], []
        if self._model.device.type == "cuda":
            return [begin.elapsed_time(end) for begin, end in spans]
        return [1e3 * (end - begin) for begin, end in spans]


def by_rows(model: TargetModel, plan: Plan) -> dict[str, dict[str, float]]:
    """Return median milliseconds of a forward pass by rows: with CUDA graphs, without, and with compiled layers."""
    found: dict[str, dict[str, float]] = {}
    graphs = model.graphs
    for name in ("graphs", "plain", "compiled"):
        model.graphs = graphs if name == "graphs" else None
        if name == "compiled":
            model.compile()
        seconds = timed_steps(model, max(plan.rows), time.perf_counter)
        found[name] = {}
        for rows in plan.rows:
            counts = [rows // SESSIONS] * SESSIONS if rows > SESSIONS else [1] * rows
            taken = [seconds(counts) for _ in range(WARM + plan.repeats)][WARM:]
            found[name][str(rows)] = round(1e3 * statistics.median(taken), 3)
        print(f"{name}: ms by rows {found[name]}", flush=True)
    model.uncompile()
    check_numerics(model)
    return found


def steps(model: TargetModel, draft: TargetModel, plan: Plan) -> dict[str, dict[str, list[float]]]:
    """Return, by configuration and sessions, milliseconds of a step, of its forward, and outside of it."""
    work = Workload(plan.sessions, (TREE_NODES,), plan.rounds, plan.steps, plan.prompt)
    bench = SteppedEngine(model, draft, work)
    found: dict[str, dict[str, list[float]]] = {}
    for sessions in plan.sessions:
        for sampling, kind in ((SamplingParams(), "greedy"), (SAMPLED, "sampled")):
            rng = Random(sessions)
            cases = bench.continued(
                [
                    Case(tuple(rng.choices(range(model.vocab_size), k=plan.prompt)), sampling=replace(sampling, seed=i))
                    for i in range(sessions)
                ]
            )
            for arm in (Configuration(PLAIN), Configuration(DEVICE, TREE_NODES)):
                times: list[tuple[float, float]] = []
                for number in range(plan.rounds + 1):
                    with ForwardTimer(model) as timer:
                        result = bench.run(cases, arm, f"{sessions} {number}", TreeTally())
                        forwards = timer.take(len(result.steps))
                    if number:  # the first round makes what later ones find: graphs, and prompts in the cache
                        whole = [1e3 * step.verify_s for step in result.steps]
                        times += zip(whole, forwards, strict=True)
                step_ms, forward_ms = (statistics.median(column) for column in zip(*times, strict=True))
                outside = statistics.median(whole - forward for whole, forward in times)
                key = f"{kind}, {'trees' if arm.nodes else 'plain'}"
                found.setdefault(key, {})[str(sessions)] = [round(x, 3) for x in (step_ms, forward_ms, outside)]
                print(f"{sessions} sessions, {key}: step {step_ms:.2f} ms, forward {forward_ms:.2f}, outside "
                      f"{outside:.2f}", flush=True)  # fmt: skip
    return found


def beside_hugging_face(model: TargetModel, draft: TargetModel, module: Any, plan: Plan) -> dict[str, Any]:
    """Return tokens per second of plain decoding, and the engine's over the better of Hugging Face's.

    module: the target as transformers made it.
    """
    work = Workload(plan.hf_sessions, (TREE_NODES,), plan.rounds, plan.hf_tokens, plan.prompt)
    bench, hf = SteppedEngine(model, draft, work), HuggingFaceBaseline(module, clock=time.perf_counter)
    prompts = {
        sessions: [tuple(Random(place).choices(range(model.vocab_size), k=plan.prompt)) for place in range(sessions)]
        for sessions in plan.hf_sessions
    }
    rates: dict[tuple[int, str], list[float]] = {}
    # The engine's graphs have failed after torch.compile had captured transformers' own in the same process.
    for sessions, texts in prompts.items():
        cases, rounds = [Case(text) for text in texts], range(plan.rounds + 1)
        found = [bench.run(cases, Configuration(PLAIN), f"hf {number}", TreeTally()).tokens_per_s for number in rounds]
        rates[sessions, "engine"] = found[1:]  # the first round captures, or compiles
        print(f"{sessions} requests, engine: {found[1:]} tokens/s", flush=True)
    for sessions, texts in prompts.items():
        requests = [GenerateRequest(text, plan.hf_tokens) for text in texts]
        for name, static in (("hf dynamic", False), ("hf static", True)):
            rates[sessions, name] = [hf.batch(requests, static=static).decode_rate for _ in range(plan.rounds + 1)][1:]
            print(f"{sessions} requests, {name}: {rates[sessions, name]} tokens/s", flush=True)
    result: dict[str, Any] = {}
    for sessions in plan.hf_sessions:
        figures = {name: round(statistics.median(rates[sessions, name]), 1) for name in HF_ARMS}
        figures["engine_vs_best_hf"] = round(figures["engine"] / max(figures[name] for name in HF_ARMS[1:]), 3)
        result[str(sessions)] = figures
        print(f"{sessions} requests: {figures}", flush=True)
    return result


def attention(model: TargetModel, shape: ModelShape, plan: Plan) -> dict[str, dict[str, float]]:
    """Return microseconds of one layer's attention by sessions and context, and GB of keys and values per second."""
    scoring, found = Scoring(shape.head_dim**-0.5), {}
    backends: dict[str, AttentionBackend] = {model.attention.name: model.attention, "sdpa": SdpaBackend()}
    for sessions in plan.hf_sessions:
        for context in plan.contexts:
            if sessions * (context + SEGMENT_ROWS) > plan.slots:
                continue
            layers = [LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)]
            pool = KVPool(layers, sessions * (context + SEGMENT_ROWS), dtype=model.torch_dtype, device=model.device)
            pool.keys[0].normal_()
            pool.values[0].normal_()
            segments = [_tree_step(pool, context) for _ in range(sessions)]
            rows = sessions * SEGMENT_ROWS
            query, key, value = (
                torch.randn(1, n, rows, shape.head_dim, dtype=model.torch_dtype, device=model.device)
                for n in (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            line: dict[str, float] = {}
            for name, backend in backends.items():
                plan_of_step = backend.plan(segments, pool)
                line[name] = round(_us(partial(plan_of_step.attend, 0, query, key, value, scoring), model.device), 1)
            read = 2 * sessions * context * shape.kv_heads * shape.head_dim * model.torch_dtype.itemsize
            line["GB/s"] = round(read / 1e3 / line[model.attention.name], 1)
            found[f"{sessions} x {context}"] = line
            print(f"attention, {sessions} sessions behind {context} tokens: {line}", flush=True)
    return found


def _tree_step(pool: KVPool, context: int) -> Segment:
    """Return a segment of the last token and two branches of two nodes below it."""
    return Segment(
        tokens=np.zeros(SEGMENT_ROWS, dtype=np.int64),
        chain=1,
        parents=np.array([0, 0, 1, 2], dtype=np.int64),
        positions=context + np.array([0, 1, 1, 2, 2], dtype=np.int64),
        prefix=pool.allocate(context),
        slots=pool.allocate(SEGMENT_ROWS),
        wants_logits=True,
    )


@torch.inference_mode()
def _us(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the microseconds of one call, on average over `repeats` calls that follow one another."""
    for _ in range(3):
        work()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / repeats
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e6 * (time.perf_counter() - begun) / repeats


def measure(plan: Plan, *, device: str, shape: str, only: Sequence[str] = PARTS) -> dict[str, Any]:
    """Run the parts named by `only` on a target of this shape; return their figures."""
    where, pair = torch.device(device), (SHAPES[shape], SHAPES["qwen3-0.2b" if SHAPES[shape].qwen3 else "tiniest"])
    model, draft = (random_model(one, where, seed=seed) for seed, one in enumerate(pair))
    print(f"{shape}, {model.hardware}, {model.dtype}, attention {model.backend}, deviation {model.deviation:.2e}")
    parts: dict[str, Callable[[], Any]] = {
        "rows": lambda: by_rows(model, plan),
        "steps": lambda: steps(model, draft, plan),
        "attention": lambda: attention(model, pair[0], plan),
        "hf": lambda: beside_hugging_face(model, draft, random_module(pair[0], where, seed=0), plan),
    }
    found = {part: parts[part]() for part in PARTS if part in only}
    off = model.graphs.off if model.graphs else "not on this device"
    return found | {"target": shape, "device": model.hardware, "graphs_off": off, "deviation": model.deviation}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("engine_gpu", __doc__)
    parser.add_argument("--device", help="cuda or cpu (default: cuda)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="shape of the target")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    options = parser.parse_args(argv)
    found = None
    device, shape = options.device or "cuda", options.shape
    if options.size is Size.SMOKE and not torch.cuda.is_available():
        print("no CUDA device: the smoke run uses the CPU and the tiny shape")
        device, shape = "cpu", "tiny"
    if device == "cpu" or torch.cuda.is_available():
        found = measure(PLANS[options.size], device=device, shape=shape, only=options.only)
    else:
        print("nothing was measured: there is no CUDA device; --smoke for a trial")
    harness.finish({"gpu": found})


if __name__ == "__main__":
    main()
