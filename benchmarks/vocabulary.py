"""Measure what a vocabulary of 151,936 tokens costs: the target's token in a step, and proposals on the device.

`walk_ms` is the CPU time of choosing the target's token from one row of logits, on one core: `Sampler.choose` for
greedy sampling, temperature 0.8, with top-p 0.95 on peaked and on flat logits, and with top-k 50 and top-p 0.95. Beside
each figure stands that of the reference, which computes probability and noise of every token and chooses the same one;
a token that differs fails the run. Flat logits are normal with deviation 1: top-p 0.95 leaves two thirds of them.
Peaked ones have deviation 2.5 and a few raised tokens: top-p 0.95 leaves ten. Every row is another one, so that it
comes from memory as a step's does.

`outside_share` is the walk's share of a step, by CPU time: 16 sessions with 8 nodes each, half of them greedy and half
at temperature 0.8 with top-p 0.95, on a random target whose hidden size of 64 leaves hardly anything but the output
layer. With the reference instead it is printed beside.

`propose_ms` is the CPU time of one node's proposals from flat logits. They are an approximation, since beyond the 256
most likely tokens only those of the first 32,768 ids are looked for: the share of the target's tokens that the first
proposal hits is printed beside the share of exact ones, which take the noise of every token, for a draft whose logits
are the target's with an error of deviation 0.5.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.engine import GREEDY, SAMPLED, TOKENS_PER_STEP, WARM, Case, continued, steps
from benchmarks.support import old_harness as harness
from benchmarks.support.engine_driver.engine_step_trace import TracedEngine
from benchmarks.support.engine_driver.scripted_trees import TreeTally
from benchmarks.support.old_harness import Criterion, Size
from cloud_verifier.engine import sampling
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.coupling import position_key
from outrider.core.processors import TokenCounts
from outrider.core.proposals import propose
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import reference_token

VOCABULARY = 151_936
WALK_MS = 0.5
"""Most milliseconds of a token that are wanted."""
PROPOSE_MS = 0.3
SESSIONS, NODES = 16, 8

Logits = NDArray[np.float32]


def flat(rng: np.random.Generator) -> Logits:
    """Return logits `[V]` among which none stands out."""
    return rng.standard_normal(VOCABULARY).astype(np.float32)


def peaked(rng: np.random.Generator) -> Logits:
    """Return logits `[V]` whose most likely token has about half of the probability at temperature 0.8."""
    row = 2.5 * rng.standard_normal(VOCABULARY)
    row[rng.integers(0, VOCABULARY, 40)] += np.linspace(4.0, 13.0, 40)
    return row.astype(np.float32)


CASES: dict[str, tuple[SamplingParams, Callable[[np.random.Generator], Logits]]] = {
    "greedy": (GREEDY, flat),
    "t": (SamplingParams(temperature=0.8), flat),
    "top_p_peaked": (SAMPLED, peaked),
    "top_p_flat": (SAMPLED, flat),
    "top_k": (replace(SAMPLED, top_k=50), flat),
}


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of CPU time that a call takes in this thread."""
    begun = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - begun)


def walk(name: str, rows: int, rng: np.random.Generator) -> tuple[float, float, int]:
    """Return median milliseconds a token, those of the reference, and the number of tokens that differ."""
    params, logits = CASES[name]
    sampler = sampling.Sampler(params, (1, 2, 3))
    drawn = [torch.from_numpy(logits(rng)) for _ in range(rows)]
    chosen: list[int] = []
    by_reference: list[int] = []

    def reference(position: int) -> None:
        if params.greedy:
            by_reference.append(sampler.choose(drawn[position], position, ()))
        else:
            at = position_key(sampler.key, position)
            by_reference.append(reference_token(drawn[position].numpy(), params, at))

    def choose(position: int) -> None:
        chosen.append(sampler.choose(drawn[position], position, ()))

    quick = [cpu_ms(partial(choose, at)) for at in range(rows)]
    slow = [cpu_ms(partial(reference, at)) for at in range(rows)]
    differing = sum(one != other for one, other in zip(chosen, by_reference, strict=True))
    return statistics.median(quick), statistics.median(slow), differing


def random_target() -> TargetModel:
    """Return a random target that consists of little more than its output layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    model = TargetModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), name="random")
    check_numerics(model)
    return model


def shares(model: TargetModel, count: int, rounds: int) -> tuple[float, float]:
    """Return the walk's median share of a step, and with the reference in its place."""
    bench, rng = TracedEngine(model), np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, VOCABULARY, 32).tolist()) for _ in range(SESSIONS)]
    cases = [Case(prompt, SAMPLED if i % 2 else GREEDY) for i, prompt in enumerate(prompts)]
    cases = continued(bench, cases, TOKENS_PER_STEP * (WARM + count))
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for reference in harness.rotated((False, True), number):
            own = sampling.sampled_token  # type: ignore[attr-defined]
            with patch.object(sampling, "sampled_token", reference_token if reference else own):
                timed = steps(bench, cases, NODES, count, number, TreeTally())
            found[reference] += [step.parts["verify"] / step.seconds for step in timed]
    return statistics.median(found[False]), statistics.median(found[True])


def proposing(rows: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return median milliseconds of one node's proposals from flat logits, and of exact ones."""
    params = CASES["t"][0]
    drawn = list(enumerate(flat(rng) for _ in range(rows)))
    quick = [cpu_ms(partial(propose, row, params, 5, at, TokenCounts(), (), 4)) for at, row in drawn]
    slow = [cpu_ms(partial(exact_proposal, row, params, 5, at)) for at, row in drawn]
    return statistics.median(quick), statistics.median(slow)


def exact_proposal(row: Logits, params: SamplingParams, key: int, position: int) -> int:
    """Return the token that a target with these logits would take."""
    return reference_token(row, params, position_key(key, position))


def hits(logits: Callable[[np.random.Generator], Logits], rows: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the shares of the target's tokens that the first proposal hits, and that the first exact one does."""
    params, key = CASES["t"][0], 5
    quick = exact = 0
    for position in range(rows):
        row = logits(rng)
        token = exact_proposal(row, params, key, position)
        draft = row + np.float32(0.5) * flat(rng)
        quick += propose(draft, params, key, position, TokenCounts(), (), 1)[0].token == token
        exact += exact_proposal(draft, params, key, position) == token
    return quick / rows, exact / rows


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("vocabulary", __doc__).parse_args(argv)
    size: Size = options.size
    rows, count, rounds = size.pick(smoke=(3, 1, 1), quick=(20, 2, 1), full=(200, 8, 6))
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    walk_ms, reference_ms, differing, accepted = {}, {}, 0, {}
    print(f"ms of CPU time a token, V = {VOCABULARY}: now, and the reference")
    for name in CASES:
        now, before, wrong = walk(name, rows, rng)
        walk_ms[name], reference_ms[name] = round(now, 3), round(before, 3)
        differing += wrong
        print(f"  {name:14}{now:8.3f}{before:8.3f}", flush=True)
    propose_ms, exact_ms = proposing(rows, rng)
    print(f"ms of CPU time of a node's proposals: {propose_ms:.3f}, exact ones {exact_ms:.3f}")
    for name, logits in (("peaked", peaked), ("flat", flat)):
        quick, exact = hits(logits, rows, rng)
        accepted[name] = {"now": round(quick, 3), "exact": round(exact, 3)}
        print(f"  first proposal accepted on {name} logits: {quick:.3f}, exact ones {exact:.3f}", flush=True)
    outside, before = shares(random_target(), count, rounds)
    print(f"share of a step in the walk, {SESSIONS} sessions x {NODES} nodes: {outside:.3f}, by reference {before:.3f}")
    slowest = max(walk_ms.values())
    criteria = [
        Criterion.none("tokens that are not the reference's", differing),
        Criterion.bound("slowest walk, ms", slowest, at_most=WALK_MS, enforced_from=None),
        Criterion.bound("proposals, ms", propose_ms, at_most=PROPOSE_MS, enforced_from=None),
    ]
    result = {
        "walk_ms": walk_ms,
        "reference_ms": reference_ms,
        "outside_share": round(outside, 4),
        "reference_outside_share": round(before, 4),
        "propose_ms": round(propose_ms, 3),
        "exact_propose_ms": round(exact_ms, 3),
        "first_proposal_accepted": accepted,
    }
    harness.finish(result, criteria, size)


if __name__ == "__main__":
    main()
