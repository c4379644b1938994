"""Measure the engine on one core: a step's time, its share outside the model, and other engines on the same target.

`benchmarks.support.engine_driver.engine_step_trace` does the timing. The trees agree with the target's continuation,
generated first, with probability RATE at each depth. If two tokens of the target tie up to rounding, another batch may
take the other one; that device's continuation is then useless, and more nodes were planned than accepted.

The time of a step covers a whole turn of the loop, with the decoding of an Append per session and the encoding of its
Commit, greedy, at prefixes of about 256 tokens. The share outside is the part of that time outside
TargetModel.forward, with half of the sessions sampling and one of them with penalties; the attention's index tensors
and masks count as outside wherever they are built.

The comparison takes 16 greedy requests that arrive at once, without trees. On both sides the time includes the prompts
(none is cached before), EOS is ignored, and weights are float32. Hugging Face pads a ragged batch on the left and
generates to the longest output; tokens beyond a request's length do not count. `decode` is the part of the same runs
between the last request's first token and the first request's last one, so without prompts. Assisted generation has
one request and the same draft, dequantised to float32; it is compared with our single session without any device.

With `--vllm-python` the same requests go to vLLM too, and to the engine as it is with `compile`; all outputs must be
the engine's but for ties. The `vs_vllm` figures are tokens per second over those of the faster of vLLM compiled and
vLLM eager: `ar` is `decode` with 1, 4 and 16 requests, `prefill` reads prompts of 1,024 tokens and generates one, and
`ragged` is the whole of the ragged batch. They are the compiled engine's; `eager_vs_vllm` has those of the engine
without `compile`, which is the default.

Seconds are CPU time, of the engine's thread, of Hugging Face's or of vLLM's process, unless a figure says `wall`.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import itertools
import os
import pstats
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.exact import texts
from benchmarks.support import engine_options, hf_baseline, vllm_baseline
from benchmarks.support import old_harness as harness
from benchmarks.support.engine_driver.engine_step_trace import LIMITS, ProfiledPartTimer, TracedEngine, TracedStep
from benchmarks.support.engine_driver.scripted_trees import TreeDevice, TreeTally
from benchmarks.support.hf_baseline import (
    Answer,
    GenerateRequest,
    HuggingFaceBaseline,
    TimedOutput,
    Workload,
    among,
    over_best,
)
from benchmarks.support.old_harness import Criterion, Pair, spread
from benchmarks.support.reference import TIE
from benchmarks.support.vllm_baseline import VllmBaseline
from cloud_verifier.engine.torch_backend.executor import compile_if_faster
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Finish
from outrider.core.sampling import SamplingParams

RATE = 0.8
TOKENS_PER_STEP = 12
"""Tokens generated first by plain steps for every timed step: the longest path of a tree and one more."""
WARM = 2
"""Steps after the prompts that are not timed."""
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
PENALISED = replace(SAMPLED, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
VS_HF = {"ar_b16_vs_best_hf": 0.9, "ar_ragged_vs_best_hf": 1.2}
"""Wanted of the figures over Hugging Face."""
VS_VLLM = 0.95
"""Wanted of every figure over vLLM."""
COMPILED = "engine compiled"
"""Name of the configuration with `compile`."""
OUTSIDE = {"0": 0.08, "8": 0.05}
"""Wanted share of a step of all sessions outside the forward pass, by nodes."""


@dataclass(frozen=True)
class EngineSize:
    """Set how much is measured."""

    rounds: int
    count: int
    """Steps timed in each round."""
    peer_rounds: int
    """Rounds in which all engines are compared."""
    output: int
    """Tokens that the compared engines generate for each request."""
    sessions: tuple[int, ...] = (1, 4, 16)
    nodes: tuple[int, ...] = (0, 1, 4, 8, 16)
    prompt: int = 232
    """Prompt tokens; the output of a timed session takes its prefix to about 256 in the middle."""
    longest: int = 512
    """Tokens of the longest prompt of those that arrive together."""
    vllm: tuple[str, ...] = tuple(vllm_baseline.OPTIONS)
    """How vLLM runs; to compile the target takes it about a minute."""


FULL = EngineSize(rounds=7, count=8, peer_rounds=4, output=128)
QUICK = EngineSize(rounds=1, count=2, peer_rounds=1, output=32, sessions=(1, 16), nodes=(0, 8, 16))
SMOKE = EngineSize(
    rounds=1,
    count=1,
    peer_rounds=1,
    output=8,
    sessions=(1, 2),
    nodes=(0, 1, 8),
    prompt=24,
    longest=48,
    vllm=(vllm_baseline.EAGER,),
)


@dataclass(frozen=True)
class Case:
    """Describe a session that is timed."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    truth: tuple[int, ...] = ()
    """The target's continuation of the prompt."""

    def device(
        self, max_tokens: int, nodes: int = 0, rate: float = 0.0, vocabulary: int = 0, seed: int = 0
    ) -> TreeDevice:
        session = DeviceSession(self.prompt, sampling=self.sampling, max_tokens=max_tokens, ignore_eos=True)
        return TreeDevice(session, self.truth, nodes, rate, vocabulary, Random(seed))


def continued(bench: TracedEngine, cases: Sequence[Case], tokens: int) -> list[Case]:
    """Return the cases with the target's continuations, generated by plain steps."""
    devices = [case.device(tokens) for case in cases]
    bench.serve(devices)
    return [replace(c, truth=tuple(d.session.received)) for c, d in zip(cases, devices, strict=True)]


def steps(
    bench: TracedEngine, cases: Sequence[Case], nodes: int, count: int, seed: int, tally: TreeTally, rate: float = RATE
) -> list[TracedStep]:
    """Time `count` steps in which every session has its plain row and `nodes` nodes."""
    room = len(cases[0].truth) + LIMITS.depth
    devices = [case.device(room, nodes, rate, bench.model.vocab_size, 1_000 * seed + i) for i, case in enumerate(cases)]

    def full(turns: Sequence[TracedStep]) -> list[TracedStep]:
        return [t for t in turns if len(t.commits) == len(cases) and all(c.evaluated == nodes for c in t.commits)]

    found = full(bench.serve(devices, nodes=nodes, enough=lambda turns: len(full(turns)) >= WARM + count))
    if len(found) < WARM + count:
        raise RuntimeError(f"{len(found)} steps of {len(cases)} sessions with {nodes} nodes, must be {WARM + count}")
    for device in devices:
        tally.add(device.tally)
    return found[WARM:]


def autoregression(bench: TracedEngine, requests: Sequence[GenerateRequest], salt: str) -> TimedOutput:
    """Generate for all requests at once, without trees, and time it."""
    devices = [Case(request.prompt).device(request.tokens) for request in requests]
    turns = bench.serve(devices, salt=salt)
    began = sum(c.start == 0 for t in turns for c in t.commits)
    waiting, decoding = began, []
    for turn in turns:
        if waiting == 0:
            decoding.append(turn)
        waiting -= sum(c.start == 0 for c in turn.commits)
        if any(c.finish is not Finish.NONE for c in turn.commits):
            break
    return TimedOutput(
        outputs=tuple(tuple(device.session.received) for device in devices),
        seconds=sum(turn.seconds for turn in turns),
        decode_tokens=sum(len(c.tokens) for t in decoding for c in t.commits),
        decode_seconds=sum(turn.seconds for turn in decoding),
        wall_seconds=sum(turn.wall_seconds for turn in turns),
        decode_wall_seconds=sum(turn.wall_seconds for turn in decoding),
    )


Steps = dict[tuple[int, int], list[list[TracedStep]]]
"""(sessions, nodes) -> the timed steps of each round"""


def ms(rounds: Sequence[Sequence[TracedStep]]) -> list[float]:
    """Return the median milliseconds of a step, for each round."""
    return [1e3 * statistics.median(turn.seconds for turn in turns) for turns in rounds]


def outside(rounds: Sequence[Sequence[TracedStep]]) -> list[float]:
    """Return the median share of a step that is spent outside the forward pass, for each round."""
    return [statistics.median(turn.outside for turn in turns) for turns in rounds]


def interleaved(
    bench: TracedEngine,
    cases: Sequence[Case],
    configurations: Sequence[tuple[int, int]],
    rounds: int,
    count: int,
    tally: TreeTally,
) -> Steps:
    """Measure every configuration once a round; another one comes first each time."""
    found: Steps = {configuration: [] for configuration in configurations}
    for number in range(rounds):
        for sessions, nodes in harness.rotated(configurations, number):
            found[sessions, nodes].append(steps(bench, cases[:sessions], nodes, count, number, tally))
    return found


def report_steps(found: Steps, size: EngineSize) -> None:
    print("\nms per step, greedy: sessions down, nodes per session beside the plain row across")
    print("      " + "".join(f"{nodes:<26}" for nodes in size.nodes))
    for sessions in size.sessions:
        print(
            f"{sessions:>4}  " + "".join(f"{spread(ms(found[sessions, nodes])):<26}" for nodes in size.nodes),
            flush=True,
        )


def report_outside(found: Steps) -> None:
    print("\nshare of a step outside the forward, half the sessions sampling; parts in ms")
    for (sessions, nodes), rounds in found.items():
        turns = [turn for turns in rounds for turn in turns]
        names = sorted({name for turn in turns for name in turn.parts})
        parts = {name: 1e3 * statistics.fmean(turn.parts.get(name, 0.0) for turn in turns) for name in names}
        print(f"  {sessions} sessions x {nodes} nodes: {spread(outside(rounds))} of {spread(ms(rounds))} ms")
        print("    " + ", ".join(f"{name} {parts[name]:.3f}" for name in sorted(parts, key=lambda n: -parts[n])))
    print(flush=True)


def profiled(model: TargetModel, cases: Sequence[Case], count: int) -> None:
    """Profile the functions in which the time outside the forward pass is spent."""
    profile = cProfile.Profile()
    bench = TracedEngine(model, parts=ProfiledPartTimer(profile))
    for number in range(4):
        steps(bench, cases, 8, count, number, TreeTally())
    for order in ("tottime", "cumtime"):
        pstats.Stats(profile).sort_stats(order).print_stats(30)


def cases(
    bench: TracedEngine, ids: Sequence[Sequence[int]], tokens: int, prompt: int = FULL.prompt
) -> tuple[list[Case], list[Case]]:
    """Return sessions with known continuations: greedy ones, and the same with the first half sampling, one penalised.

    ids: a text for each session, of whose tokens the first `prompt` are its prompt.
    """
    greedy = continued(bench, [Case(tuple(text[:prompt])) for text in ids], tokens)
    half = len(greedy) // 2
    params = [PENALISED, *[SAMPLED] * (half - 1)]
    sampled = [
        replace(case, sampling=replace(p, seed=i)) for i, (case, p) in enumerate(zip(greedy, params, strict=False))
    ]
    return greedy, continued(bench, sampled, tokens) + greedy[half:]


def compare(
    bench: TracedEngine,
    compiled: TracedEngine | None,
    hf: HuggingFaceBaseline,
    work: Mapping[str, Workload],
    rounds: int,
    vllm: Mapping[str, Answer],
) -> tuple[dict[str, Any], list[Criterion]]:
    """Run the workloads in every engine; return the figures, and what is wanted of them.

    compiled: the engine with `compile`, where it is compared.
    """
    salts = (f"run {number}" for number in itertools.count())
    others = dict(vllm)
    if compiled is not None:
        others[COMPILED] = lambda asked: autoregression(compiled, asked, next(salts))
    answers = hf_baseline.compared(lambda asked: autoregression(bench, asked, next(salts)), hf, work, rounds, others)
    result: dict[str, Any] = {
        "ar_b16_vs_best_hf": over_best(among(answers["equal"], "hf")),
        "ar_ragged_vs_best_hf": over_best(among(answers["ragged"], "hf")),
        "ar_b16_decode_vs_best_hf": over_best(among(answers["equal"], "hf"), lambda timed: timed.decode_rate),
        "ar_single_vs_hf_assisted": over_best(among(answers["single"], "hf assisted")),
    }
    criteria = [Criterion.bound(n, result[n], at_least=bound, enforced_from=None) for n, bound in VS_HF.items()]
    if vllm:
        sizes = (len(work["equal"].requests), len(work["few"].requests))
        figures = over_vllm(answers, *sizes, ours="engine" if compiled is None else COMPILED)
        result |= figures | {"eager_vs_vllm": over_vllm(answers, *sizes, ours="engine")}
        flat = {name: figures[name] for name in ("prefill_vs_vllm", "ragged_vs_vllm")}
        flat |= {f"ar_vs_vllm, {batch}": value for batch, value in figures["ar_vs_vllm"].items()}
        criteria += [Criterion.bound(n, value, at_least=VS_VLLM, enforced_from=None) for n, value in flat.items()]
        criteria.append(
            Criterion.none(
                "outputs of vLLM or of compiled layers that differ without a tie", differing(hf, work, answers)
            )
        )
    return result, criteria


def over_vllm(
    answers: Mapping[str, Mapping[str, Sequence[TimedOutput]]], most: int, few: int, *, ours: str
) -> dict[str, Any]:
    """Return tokens per second of the configuration `ours` over the better of vLLM's: of CPU time, then by the wall
    clock."""

    def ratio(name: str, *, decode: bool, wall: bool) -> float:
        def rate(timed: TimedOutput) -> float:
            timed = timed.by_wall if wall else timed
            return timed.decode_rate if decode else timed.rate

        return over_best(among(answers[name], vllm_baseline.COMPILED) | {"engine": answers[name][ours]}, rate)

    def figures(*, wall: bool) -> dict[str, Any]:
        batches = {"1": "single", str(few): "few", str(most): "equal"}
        return {
            "ar": {batch: ratio(name, decode=True, wall=wall) for batch, name in batches.items()},
            "prefill": ratio("prompts", decode=False, wall=wall),
            "ragged": ratio("ragged", decode=False, wall=wall),
        }

    by_cpu = {f"{name}_vs_vllm": value for name, value in figures(wall=False).items()}
    return by_cpu | {"wall_vs_vllm": figures(wall=True)}


def differing(
    hf: HuggingFaceBaseline,
    work: Mapping[str, Workload],
    answers: Mapping[str, Mapping[str, Sequence[TimedOutput]]],
) -> int:
    """Print where outputs of vLLM or of compiled layers leave the engine's; return how many do so without a tie."""
    wrong = 0
    for name, arms in answers.items():
        for arm in {COMPILED, *vllm_baseline.OPTIONS} & arms.keys():
            for ours, theirs in zip(arms["engine"], arms[arm], strict=True):
                for gap in hf_baseline.gaps(hf, work[name].requests, ours, theirs):
                    print(f"{arm}, {work[name].label}: another token, whose logit is {gap:.2g} below the best")
                    wrong += gap > TIE
    return wrong


def with_compile(pair: Pair) -> TracedEngine | None:
    """Return an engine with compiled layers, None if compiling does not pay here."""
    model = TargetModel.load(pair.target, dtype="float32", threads=1)
    print(compile_if_faster(model))
    if not model.compiled:
        return None
    check_numerics(model)
    return TracedEngine(model)


def main(argv: Sequence[str] | None = None) -> None:
    disable_progress_bar()
    set_verbosity_error()
    parser = harness.arguments("engine", __doc__)
    engine_options.add_python(parser, "--vllm-python")
    parser.add_argument("--profile", action="store_true", help="only show which functions a step's time goes to")
    options = parser.parse_args(argv)
    pair = Pair.in_folder(options.models)
    core = min(os.sched_getaffinity(0))
    harness.pin(core)
    model = TargetModel.load(pair.target, dtype="float32", threads=1)
    check_numerics(model)
    bench = TracedEngine(model)
    gc.collect()
    gc.freeze()  # as the engine process does when it has loaded the target
    size = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    most = max(size.sessions)
    ids = texts(pair, most * size.longest, size.longest)
    greedy, mixed = cases(bench, ids, TOKENS_PER_STEP * (WARM + size.count), size.prompt)
    if options.profile:
        profiled(model, mixed, WARM + size.count)
        return
    tally = TreeTally()
    configurations = [(sessions, nodes) for sessions in size.sessions for nodes in size.nodes]
    found = interleaved(bench, greedy, configurations, size.rounds, size.count, tally)
    report_steps(found, size)
    crowded = [(most, nodes) for nodes in size.nodes if nodes != 1]
    shared = interleaved(bench, mixed, crowded, size.rounds, size.count, tally)
    report_outside(shared)
    print(f"trees: {tally.rate:.3f} of the tries accepted, {RATE} asked for; {tally.accepted} of {tally.planned} nodes")
    tree8 = [b / a for a, b in zip(ms(found[1, 0]), ms(found[1, 8]), strict=True)]
    print(f"one session, 8 nodes over none: {spread(tree8)}")
    hf = HuggingFaceBaseline.load(pair.target, pair.draft)
    work = hf_baseline.workloads(ids, (size.prompt, size.output))
    with contextlib.ExitStack() as stack:
        vllm: dict[str, VllmBaseline] = {}
        if options.vllm_python is None:
            print("vLLM: not installed, skipped")
        else:
            asked = {name: vllm_baseline.OPTIONS[name] for name in size.vllm}
            running = vllm_baseline.running(options.vllm_python, pair.target, core, asked)
            vllm = stack.enter_context(running)
            print("vLLM:", ", ".join(sorted({engine.version for engine in vllm.values()})))
        compiled = with_compile(pair) if vllm else None
        gc.collect()
        gc.freeze()
        peers, criteria = compare(
            bench, compiled, hf, work, size.peer_rounds, {name: engine.batch for name, engine in vllm.items()}
        )
    shares = {str(nodes): round(statistics.median(outside(turns)), 4) for (_, nodes), turns in shared.items()}
    criteria += [
        Criterion.bound(f"share outside the forward, {nodes} nodes", shares[nodes], at_most=bound, enforced_from=None)
        for nodes, bound in OUTSIDE.items()
    ]
    result = {
        "overhead_share_b16": max(shares.values()),
        "tree8_over_single_b1": round(statistics.median(tree8), 3),
        "overhead_share_b16_by_nodes": shares,
        "step_ms": {f"{s}x{n}": round(statistics.median(ms(turns)), 2) for (s, n), turns in found.items()},
        "tree_rate": round(tally.rate, 3),
    }
    print()
    harness.finish(peers | result, criteria, options.size)


if __name__ == "__main__":
    main()
