"""Compare who speculates for one core's verifier: its own sources, vLLM's, or devices, on the same requests.

`plain` is the engine without sources, `sources, N` the engine with all that a verifier can have of its own: n-grams,
token recycling, heads, and the shipped draft with chains of N, each of which pauses where it does not pay. In `devices`
the nodes come from a device for each session, which drafts with the shipped draft and n-grams before every step, at no
distance; its time is not counted. With `--vllm-python` the same requests go to vLLM, with its own scheduler and
sampler, repaired where they fail on CPUs (REPAIRED): `vllm` and `vllm eager` generate plainly, `vllm ngram, N` looks N
tokens up in the prompt, `vllm draft, N` has the shipped draft, dequantised to float32, propose N, and `vllm suffix`
continues what it has seen, where the environment has arctic-inference for that. Every arm is alone on the core in its
turn, in float32, without a prefix cache. Before each turn it forgets all texts and serves a few other prompts, so that
no source has seen a text before it is measured.

Requests are held-out prompts and prompts that ask to quote, whose greedy outputs do not repeat themselves. They arrive
one at a time, 4 at once and 16 at once; EOS is ignored. Outputs of ours must be those of `plain`, and greedy ones of
vLLM too, but for ties; at temperature 0.8 vLLM draws other texts, and the share of texts that repeat themselves is told
for each arm. A figure is the median of rounds: tokens per second of the process's CPU time while all requests of a
group generate, without their prompts.

`gain` is the best speculating arm of each side over its plain one, and below 1 where none pays; `over_vllm` is our best
co-located arm over vLLM's best, and `devices_over` the devices over the best of all others, ours and vLLM's, plain ones
included. The best is chosen on the other rounds than the one in which it is scored; the median of rounds stands before
the least and the greatest.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.support import engine_options, harness, vllm_baseline
from benchmarks.support.harness import Criterion, Pair, rotated, spread
from benchmarks.support.hf_baseline import (
    GenerateRequest,
    HuggingFaceBaseline,
    TimedOutput,
    draft_from_gguf,
    gaps,
    total,
)
from benchmarks.support.reference import TIE
from benchmarks.support.server_replay import grow
from benchmarks.support.texts import repetitive
from benchmarks.support.vllm_baseline import VllmBaseline
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Failed
from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.head_models import load_heads
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.server_draft.sources import sources_of
from cloud_verifier.engine.torch_backend.executor import TorchExecutor, compile_if_faster, profile
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.sources.llama import LlamaSource
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Append, Commit, Directive, SessionLimits
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT
from outrider.llama import ChainContext, LlamaModel, TreeContext

PLAIN, SOURCES, DEVICES = "plain", "sources", "devices"
VLLM, VLLM_EAGER, SUFFIX = "vllm", "vllm eager", "vllm suffix"
ALONE = (PLAIN, VLLM, VLLM_EAGER)
"""Arms without speculation."""
SETTINGS = {"greedy": 0.0, "T=0.8": 0.8}
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Tokens before a position that vLLM's n-grams look up: the least, and the most."""
REPAIR = "benchmarks.support.vllm_cpu_repair"
REPAIRED = {"worker_cls": f"{REPAIR}.CPUWorker", "max_num_batched_tokens": 8_192}
"""Arguments of EngineArgs, without which vLLM 0.32 for CPUs accepts hardly any sampled draft token, and ends where a
request with a seed is read in two parts."""
LIMITS = SessionLimits()
LATENCY = DecodeLatency(((1, 1e-3), (8, 2e-3)))
"""Seconds of a decode for which devices plan."""

Rounds = Mapping[str, Sequence[TimedOutput]]
"""Arm -> what it answered in each round."""


@dataclass(frozen=True)
class CoLocatedSize:
    """Set how much is measured."""

    requests: int = 16
    alone: int = 8
    """Requests of those that also come one at a time."""
    groups: tuple[int, ...] = (1, 4, 16)
    """Requests at once."""
    tokens: int = 96
    rounds: int = 4
    lessons: int = 8
    """Prompts for tuning that every arm serves before each turn."""
    depths: tuple[int, ...] = (4, 16)
    """Longest chains of our verifier's draft."""
    ngram: tuple[int, ...] = (4, 8)
    draft: tuple[int, ...] = (1, 2, 4, 8)
    """Tokens that vLLM proposes in a step."""
    compiled: bool = True
    """Whether both engines compile the target, which takes vLLM about a minute for each arm."""


FULL = CoLocatedSize()
QUICK = CoLocatedSize(
    requests=4,
    alone=2,
    groups=(1, 4),
    tokens=48,
    rounds=1,
    lessons=4,
    depths=(4,),
    ngram=(4,),
    draft=(4,),
    compiled=False,
)
SMOKE = replace(QUICK, requests=2, alone=1, groups=(1, 2), tokens=8, lessons=2)


class Device:
    """Act as the device of a session. drafter: of its nodes; None if it drafts nothing."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams, drafter: Drafter | None) -> None:
        self.session = DeviceSession(request.prompt, sampling=sampling, max_tokens=request.tokens, ignore_eos=True)
        self._drafter = drafter
        self._ids: dict[int, int | None] = {ROOT: ROOT}
        if drafter is not None:
            task = DraftTask(request.prompt, sampling=sampling, max_tokens=request.tokens)
            drafter.begin(task, SpeculationPlan.of(Directive(), LIMITS))

    def on_commit(self, commit: Commit) -> None:
        delivery = self.session.on_commit(commit)
        if self._drafter is not None and delivery is not None:
            self._drafter.advance(delivery.tokens)

    def appends(self) -> Iterator[Append]:
        """Draft until nothing more is worth it, and yield what is to be sent."""
        if self.session.finished:
            return
        if self._drafter is not None:
            grow(self._drafter, self.session, self._ids)
        while (append := self.session.poll(resting=True)) is not None:
            yield append


class EngineArm:
    """Answer requests with an engine that has sources of its own, or with devices that draft."""

    def __init__(
        self,
        model: TargetModel,
        sources: Callable[[], Sequence[ServerSource]] = tuple,
        drafters: Callable[[], Sequence[Drafter]] = tuple,
    ) -> None:
        """Take a target, and functions that make sources and devices' drafters which have seen no text."""
        self._model = model
        self._sources = sources
        self._new_drafters = drafters
        self._config = EngineConfig(prefix_cache=False)
        self._cost = profile(model, self._config.token_budget)
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Begin with a new engine, sources and drafters; what steps cost stays known."""
        executor = TorchExecutor(self._model, self._config, self._cost)
        self._engine = Engine(executor, self._config, overlay=Overlay(self._sources()))
        self._drafters = self._new_drafters()
        gc.collect()
        gc.freeze()  # as the engine process does when it has loaded the target

    def batch(self, requests: Sequence[GenerateRequest], temperature: float) -> TimedOutput:
        """Return the outputs and their times. Raises the error with which the engine ends a session."""
        devices: dict[str, Device] = {}
        for number, request in enumerate(requests):
            sampling = SamplingParams(temperature=temperature, seed=number)
            drafter = self._drafters[number] if self._drafters else None
            devices[f"request-{next(self._numbers)}"] = Device(request, sampling, drafter)
        numbers = {name: number for number, name in enumerate(devices)}
        steps: list[dict[str, Any]] = []
        clock = _Clock()
        for name, device in devices.items():
            self._engine.start(name, device.session.attach(1, LIMITS), LIMITS, Directive())
        while not all(device.session.finished for device in devices.values()):
            commits = list(self._step())
            cpu, wall = clock.lap()
            steps.append({"cpu": cpu, "wall": wall, "tokens": {numbers[name]: c.tokens for name, c in commits}})
            for name, commit in commits:
                devices[name].on_commit(commit)
            appends = [(name, append) for name, device in devices.items() for append in device.appends()]
            clock.lap()  # what devices do is no work of the verifier
            for name, append in appends:
                self._engine.append(name, append)
        for name in devices:
            self._engine.stop(name)
        return vllm_baseline.timed_output(requests, steps)

    def _step(self) -> Iterator[tuple[str, Commit]]:
        for event in self._engine.step():
            match event:
                case Committed(name, commit):
                    yield name, commit
                case Failed(error=error):
                    raise error


Arm = EngineArm | VllmBaseline


class _Clock:
    """Tell the CPU time of this process, and the wall time, since they were last asked for."""

    def __init__(self) -> None:
        self._since = time.process_time(), time.perf_counter()

    def lap(self) -> tuple[float, float]:
        before, self._since = self._since, (time.process_time(), time.perf_counter())
        return self._since[0] - before[0], self._since[1] - before[1]


def our_arms(pair: Pair, size: CoLocatedSize, stack: contextlib.ExitStack) -> dict[str, EngineArm]:
    """Return the arms of our engine. stack: frees what they hold."""
    alone = _target(pair, size, states=False)
    model = _target(pair, size, states=pair.heads is not None)
    heads = None
    if pair.heads is not None:
        heads = load_heads(pair.heads, f"sha256:{model.weights_hash}", int(model.config.hidden_size))
    draft = stack.enter_context(LlamaModel.load(pair.draft, threads=1))
    most = max(max(size.groups), size.lessons)
    contexts = [stack.enter_context(TreeContext(draft, n_ctx=draft.n_ctx_train)) for _ in range(most)]

    def drafter(context: TreeContext) -> Drafter:
        model_source = LlamaSource(context, shared_vocabulary=context.vocab_size)
        first = CalibratedSource(model_source, Calibrator(), Calibrator(), LATENCY)
        second = CalibratedSource(NgramSource(), Calibrator(), Calibrator())
        return Drafter([first, second])

    def sources(depth: int, chains: ChainContext) -> list[ServerSource]:
        own = [] if heads is None else [HeadsSource(heads, model, vocabulary=model.vocab_size)]
        gguf = LlamaServerDraft(chains, depth=depth, vocabulary=model.vocab_size)
        return [*sources_of(["ngram", "recycling"]), *own, gguf]

    found = {PLAIN: EngineArm(alone)}
    for depth in size.depths:
        chains = ChainContext(draft, length=draft.n_ctx_train, count=most, threads=1)
        stack.enter_context(chains)
        found[f"{SOURCES}, {depth}"] = EngineArm(model, partial(sources, depth, chains))
    found[DEVICES] = EngineArm(alone, drafters=lambda: [drafter(context) for context in contexts])
    return found


def _target(pair: Pair, size: CoLocatedSize, *, states: bool) -> TargetModel:
    """Load the target. states: whether it keeps those that heads read."""
    model = TargetModel.load(pair.target, dtype="float32", threads=1)
    if states:
        model.keep_states()
    if size.compiled:
        print(compile_if_faster(model), flush=True)
    check_numerics(model)
    return model


@contextlib.contextmanager
def vllm_arms(
    python: Path, pair: Pair, size: CoLocatedSize, core: int
) -> Iterator[tuple[dict[str, VllmBaseline], str]]:
    """Run vLLM's arms, each in a process of its own on the same core; yield them, and what vLLM's version is.

    Raises Unavailable if one does not start, but for suffixes, which need a further package.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, contextlib.ExitStack() as stack:
        draft_from_gguf(pair.draft).save_pretrained(scratch)
        methods: dict[str, dict[str, Any]] = {VLLM: {}, VLLM_EAGER: {}}
        for count in size.ngram:
            methods[f"vllm ngram, {count}"] = {"method": "ngram", "num_speculative_tokens": count, **LOOK_UP}
        for count in size.draft:
            drafting = {"method": "draft_model", "model": scratch, "num_speculative_tokens": count}
            methods[f"vllm draft, {count}"] = drafting
        methods[SUFFIX] = {"method": "suffix"}
        arms: dict[str, VllmBaseline] = {}
        version = ""
        for name, method in methods.items():
            options: dict[str, Any] = dict(REPAIRED)
            if method:
                options |= {"speculative_config": method, "async_scheduling": False}
            if not size.compiled or name == VLLM_EAGER:
                options["enforce_eager"] = True
            try:
                running = vllm_baseline.running(python, pair.target, core, {name: options})
                worker = stack.enter_context(running)[name]
            except Unavailable as error:
                if name != SUFFIX:
                    raise
                print(f"{SUFFIX}: left out, since it does not start: {error}", flush=True)
                continue
            arms[name], version = worker, worker.version
        yield arms, version


def measure(
    arms: Mapping[str, Arm],
    requests: Sequence[GenerateRequest],
    lessons: Sequence[GenerateRequest],
    temperature: float,
    size: CoLocatedSize,
) -> dict[int, dict[str, list[TimedOutput]]]:
    """Return what each arm answered to the groups of each size, for each round."""
    found: dict[int, dict[str, list[TimedOutput]]] = {}
    for at_once in size.groups:
        some = requests[: size.alone] if at_once == 1 else requests
        groups = [some[i : i + at_once] for i in range(0, len(some), at_once)]
        found[at_once] = {name: [] for name in arms}
        for number in range(size.rounds):
            for name in rotated(list(arms), number):
                arm = arms[name]
                arm.forget()
                arm.batch(lessons, temperature)
                found[at_once][name].append(total([arm.batch(group, temperature) for group in groups]))
    return found


def figures(found: Mapping[int, Rounds], setting: str) -> dict[str, Any]:
    """Print and return the arms' figures by the number of requests at once, and how the best of them compare."""
    result: dict[str, dict[str, Any]] = {}
    for at_once, arms in found.items():
        key = str(at_once)
        print(f"\n{setting}, {at_once} at once: tokens per CPU-second, tokens per step and request", flush=True)
        for name, timed in arms.items():
            rates = [each.decode_rate for each in timed]
            per_step = sum(each.tokens for each in timed) / sum(each.session_steps for each in timed)
            outputs = [output for each in timed for output in each.outputs]
            repeating = statistics.fmean(map(repetitive, outputs))
            print(f"  {name:<16} {spread(rates):<30} {per_step:.2f}, {repeating:.0%} repeat themselves", flush=True)
            for figure, value in (
                ("tokens_per_cpu_s", round(statistics.median(rates), 1)),
                ("tokens_per_step", round(per_step, 3)),
                ("repetitive", round(repeating, 3)),
            ):
                result.setdefault(figure, {}).setdefault(key, {})[name] = value
        theirs = [name for name in arms if name.startswith(VLLM)]
        ours = [name for name in arms if name not in theirs and name != DEVICES]
        compared = {"gain": (speculating(ours), [PLAIN]), "devices_over": ([DEVICES], [*ours, *theirs])}
        if theirs:
            alone = [name for name in theirs if name in ALONE]
            compared |= {"vllm_gain": (speculating(theirs), alone), "over_vllm": (ours, theirs)}
        for figure, (above, below) in compared.items():
            result.setdefault(figure, {})[key] = over(arms, above, below)
            print(f"  {figure}: {result[figure][key]}", flush=True)
    return result


def speculating(arms: Sequence[str]) -> list[str]:
    return [name for name in arms if name not in ALONE]


def over(arms: Rounds, above: Sequence[str], below: Sequence[str]) -> list[float]:
    """Return the best arm of some over the best of others, in each round: the median, the least and the greatest.

    The best of several is the one with the greatest median of all other rounds, or of the only round.
    """
    count = len(arms[above[0]])

    def best(names: Sequence[str], scored: int) -> float:
        others = [number for number in range(count) if number != scored] or [scored]
        chosen = max(names, key=lambda name: statistics.median(arms[name][n].decode_rate for n in others))
        return arms[chosen][scored].decode_rate

    ratios = [best(above, number) / best(below, number) for number in range(count)]
    return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]


def differing(hf: HuggingFaceBaseline, requests: Sequence[GenerateRequest], found: Mapping[int, Rounds]) -> int:
    """Print where greedy outputs leave those of `plain`; return how many do so without a tie."""
    wrong = 0
    for at_once, arms in found.items():
        for name, rounds in arms.items():
            for ours, theirs in zip(arms[PLAIN], rounds, strict=True):
                for gap in gaps(hf, requests[: len(ours.outputs)], ours, theirs):
                    print(f"{name}, {at_once} at once: another token, whose logit is {gap:.2g} below the best")
                    wrong += gap > TIE
    return wrong


def unlike_plain(found: Mapping[int, Rounds]) -> int:
    """Return how many outputs of our engine's arms, of one sampling, are not those of `plain`."""
    return sum(
        own != other
        for arms in found.values()
        for name, rounds in arms.items()
        if not name.startswith(VLLM)
        for ours, theirs in zip(arms[PLAIN], rounds, strict=True)
        for own, other in zip(ours.outputs, theirs.outputs, strict=True)
    )


def chosen(pair: Pair, plain: EngineArm, size: CoLocatedSize) -> list[GenerateRequest]:
    """Return requests whose greedy outputs do not repeat themselves. Raises Unavailable if there are too few."""
    held_out, quoting = (pair.encode(harness.prompts(split)).values() for split in ("heldout", "quoting"))
    mixed = [ids for both in itertools.zip_longest(held_out, quoting) for ids in both if ids is not None]
    requests = [GenerateRequest(tuple(ids), size.tokens) for ids in mixed]
    good: list[GenerateRequest] = []
    at_once = max(size.groups)
    for begin in range(0, len(requests), at_once):
        some = requests[begin : begin + at_once]
        outputs = plain.batch(some, 0.0).outputs
        good += [request for request, output in zip(some, outputs, strict=True) if not repetitive(output)]
        if len(good) >= size.requests:
            print(f"{len(good)} of {begin + len(some)} greedy outputs do not repeat themselves", flush=True)
            return good[: size.requests]
    raise Unavailable(f"only {len(good)} greedy outputs do not repeat themselves; {size.requests} are needed")


def main(argv: Sequence[str] | None = None) -> None:
    disable_progress_bar()
    set_verbosity_error()
    parser = harness.arguments("co_located", __doc__)
    engine_options.add_python(parser, "--vllm-python")
    options = parser.parse_args(argv)
    pair, size = Pair.in_folder(options.models), options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    core = min(os.sched_getaffinity(0))
    harness.pin(core)
    result: dict[str, Any] = {"vllm": None}
    with contextlib.ExitStack() as stack:
        ours = our_arms(pair, size, stack)
        requests = chosen(pair, ours[PLAIN], size)
        arms: dict[str, Arm] = {**ours}
        if options.vllm_python is None:
            print("vLLM: not installed, skipped")
        else:
            theirs, result["vllm"] = stack.enter_context(vllm_arms(options.vllm_python, pair, size, core))
            arms |= theirs
        lessons = pair.encode(harness.prompts("tuning", size.lessons))
        taught = [GenerateRequest(tuple(ids), size.tokens) for ids in lessons.values()]
        for arm, temperature in itertools.product(arms.values(), SETTINGS.values()):
            arm.batch(taught, temperature)  # whatever is slow at first
        wrong = unlike = 0
        for setting, temperature in SETTINGS.items():
            found = measure(arms, requests, taught, temperature, size)
            result[setting] = figures(found, setting)
            if temperature:
                unlike = unlike_plain(found)
            else:
                wrong = differing(HuggingFaceBaseline.load(pair.target), requests, found)
    criteria = [
        Criterion.none("greedy outputs that differ without a tie", wrong),
        Criterion.none("sampled outputs of our engine that are not those without speculation", unlike),
    ]
    harness.finish(result, criteria, options.size)


if __name__ == "__main__":
    main()
