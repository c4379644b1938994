"""Measure the tokens per second of one verifier with a GPU, by who drafts: nobody, the verifier, the devices.

The real Engine serves a target of 1B to 8B with random weights to 1 to 128 greedy sessions at once, with prompts of
256 random tokens. The target's own continuations are generated first, by plain steps; then each device sends trees that
agree with its continuation with probability `rate` at every depth (benchmarks.support.engine_driver.scripted_trees),
and the engine verifies them as any others. The time of a step lasts from the first Append handed to the engine until
its commits are there and the GPU is idle; devices act between two steps, and their time is reported apart. So the
figures show what a verifier can do, without a network.

`device` is swept over nodes per session, all of which every step evaluates; with `pruned` the engine takes those of
them that its cost model finds worth it, as in production. `server draft` verifies the same trees at the same seeds,
pruned likewise, but before each step a draft model on the same GPU computes as many depths as their spines have, with
one packed forward of all sessions for each; its time counts, and its tokens are discarded. Random weights agree with
nothing, so acceptance equals that of `device` at equal depth by construction, and only the draft's time differs. The
rest of a pruned tree is not drafted again. The best of each sweep counts; ratios are taken within a round.

A continuation may differ in a tree's batch where two tokens tie up to rounding. Such a session's trees agree with
nothing from there on, which lowers the figure; it is counted, and gets another prompt in the next round. The first
round is not counted. `server_draft_bound` is the gain expected from drafting elsewhere: 0.9 of 1 + draft time / verify
time of the best server draft.

With sdpa attention a step launches a kernel per session and layer, and with many sessions waits for those launches, in
target and draft alike, so such ratios say little about a GPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from benchmarks.support import harness
from benchmarks.support.engine_driver.configurations import (
    DEVICE,
    PLAIN,
    SERVER,
    Configuration,
    LoadLevel,
    show,
    summary,
)
from benchmarks.support.engine_driver.random_models import DRAFTS, SHAPES, ModelShape, dtype_on, random_model
from benchmarks.support.engine_driver.scripted_trees import TreeTally
from benchmarks.support.engine_driver.stepped_engine import RATE, Case, SteppedEngine, Workload
from benchmarks.support.harness import Size
from cloud_verifier.engine.torch_backend.model import BACKENDS

PRUNED_FROM = 4
"""Nodes per session; with fewer there is little to leave out."""
SPARE = 1.2
"""Factor for memory that is not accounted for: activations, workspaces, CUDA graphs."""


def workload(size: Size) -> Workload:
    """Return how much a run of this size measures."""
    return size.pick(
        smoke=Workload(batches=(2,), nodes=(4,), rounds=1, steps=2, prompt=16, profile_s=0.2),
        quick=Workload(batches=(1, 16, 128), nodes=(4, 8), rounds=2, steps=6),
        full=Workload(),
    )


def arms(nodes: Sequence[int]) -> list[Configuration]:
    whole = [Configuration(kind, count) for count in nodes for kind in (DEVICE, SERVER)]
    return [Configuration(PLAIN), *whole, *(replace(arm, pruned=True) for arm in whole if arm.nodes >= PRUNED_FROM)]


def level(bench: SteppedEngine, sessions: int) -> LoadLevel:
    """Measure every configuration once per round, in rotated order; the first round is not counted."""
    rng = Random(sessions)
    found = LoadLevel()

    def fresh() -> Case:
        return Case(tuple(rng.choices(range(bench.target.vocab_size), k=bench.plan.prompt)))

    every = arms(bench.plan.nodes)
    cases = bench.continued([fresh() for _ in range(sessions)])
    for number in range(bench.plan.rounds + 1):
        turn = number % len(every)
        diverged: set[int] = set()
        for arm in (*every[turn:], *every[:turn]):
            tally = found.tally if number and arm.nodes and not arm.pruned else TreeTally()
            result = bench.run(cases, arm, f"{sessions} {number}", tally)
            diverged |= result.diverged
            if number:
                found.rounds[arm].append(result)
                found.diverged += len(result.diverged)
                found.served += sessions
        if diverged:
            cases = bench.continued([fresh() if i in diverged else case for i, case in enumerate(cases)])
    return found


def memory_needed(target: ModelShape, draft: ModelShape, plan: Workload, device: torch.device) -> int:
    """Return the bytes of the weights, of keys and values, and of a step's logits."""
    size = dtype_on(device).itemsize
    slots = plan.engine.kv_slots, max(plan.batches) * plan.room
    held = target.parameters + draft.parameters + slots[0] * target.kv_values + slots[1] * draft.kv_values
    logits = plan.engine.token_budget * target.vocabulary
    return int(SPARE * size * (held + 2 * logits))


def memory_free(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fitting(
    shapes: Sequence[str], draft: str | None, plan: Workload, device: torch.device
) -> tuple[ModelShape, ModelShape] | None:
    """Return the first target, with its draft, that fits into the memory; print a line for each that does not."""
    free = memory_free(device)
    for name in shapes:
        pair = SHAPES[name], SHAPES[draft or DRAFTS[name]]
        needed = memory_needed(*pair, plan, device)
        if needed <= free:
            return pair
        print(f"{name} is left out: it needs {needed / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB are free")
    return None


def measure(
    *,
    size: Size = Size.FULL,
    device: str | None = None,
    shape: str | None = None,
    draft: str | None = None,
    attention: str = "auto",
    rate: float = RATE,
    plan: Workload | None = None,
) -> dict[str, Any] | None:
    """Run all measurements; return None without a CUDA device, unless one is named, or if no shape fits its memory.

    shape: one of DRAFTS; without it the greatest that fits. plan: instead of that of `size` and `rate` (0 to 1).
    """
    if device is None and not torch.cuda.is_available():
        return None
    where = torch.device(device or "cuda")
    plan = plan or replace(workload(size), rate=rate)
    pair = fitting([shape] if shape else ["qwen3-8b", "3b", "qwen3-1.7b"], draft, plan, where)
    if pair is None:
        return None
    models = [random_model(one, where, attention=attention, seed=seed) for seed, one in enumerate(pair)]
    share = pair[1].parameters / pair[0].parameters
    print(f"target {pair[0].name}, {pair[0].parameters / 1e6:.1f}M; draft {pair[1].name}, {share:.0%} of it")
    print(f"{models[0].hardware}, {models[0].dtype}, attention {models[0].backend}, rate {plan.rate}")
    bench = SteppedEngine(models[0], models[1], plan)
    levels = {}
    gc.freeze()  # what is there stays; a collection then looks at little
    for sessions in plan.batches:
        levels[sessions] = level(bench, sessions)
        show(sessions, levels[sessions])
    gc.unfreeze()
    setting = {
        "device": models[0].hardware,
        "target": pair[0].name,
        "draft": pair[1].name,
        "draft_share": round(share, 3),
        "attention": models[0].backend,
        "rate": plan.rate,
    }
    return summary(levels) | setting


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("capacity_gpu", __doc__)
    parser.add_argument("--device", help="cuda or cpu (default: cuda)")
    parser.add_argument("--shape", choices=DRAFTS, help="shape of the target (default: the greatest that fits)")
    parser.add_argument("--draft", choices=SHAPES, help="shape of the server draft")
    parser.add_argument(
        "--attention", choices=["auto", *BACKENDS], default="auto", help="auto: triton on cuda, else sdpa"
    )
    parser.add_argument("--rate", type=float, default=RATE, help="share of draft tokens accepted at each depth")
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of sessions")
    parser.add_argument("--nodes", type=int, nargs="+", help="nodes of each session's tree")
    options = parser.parse_args(argv)
    plan = replace(workload(options.size), rate=options.rate)
    if options.batches:
        plan = replace(plan, batches=tuple(options.batches))
    if options.nodes:
        plan = replace(plan, nodes=tuple(options.nodes))
    if options.size is Size.SMOKE and not torch.cuda.is_available():
        print("no CUDA device: the smoke run uses the CPU and the tiny shape")
        options.device, options.shape = options.device or "cpu", options.shape or "tiny"
    found = measure(
        device=options.device, shape=options.shape, draft=options.draft, attention=options.attention, plan=plan
    )
    if found is None:
        print("nothing was measured: no CUDA device, or none with memory enough; --device cpu --shape tiny for a trial")
    harness.finish({"gpu": found})


if __name__ == "__main__":
    main()
