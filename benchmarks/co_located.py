"""Compare speculation without devices on one core: the verifier's own sources, and vLLM's, on the same requests.

`plain` is the engine without sources, and `sources, N` the engine with all that a verifier can have of its own:
n-grams, token recycling, heads, and the shipped draft with chains of N, each of which pauses where it does not pay.
With `--vllm-python` the same requests go to vLLM, with its own scheduler and sampler: `vllm` generates plainly, `vllm
ngram, N` looks N tokens up in the prompt, `vllm draft, N` has the shipped draft, dequantised to float32, propose N, and
`vllm suffix` continues what it has seen, where the environment has arctic-inference for it. Every arm is alone on the
core in its turn, in float32, without a prefix cache. Before each turn it forgets all texts and serves a few other
prompts, so that no source has seen a text before it is measured.

Requests are held-out prompts and prompts that ask to quote, whose greedy outputs do not repeat themselves. They arrive
one at a time, 4 at once and 16 at once; EOS is ignored. Greedy outputs must be those of `plain` but for ties; at
temperature 0.8 vLLM draws other texts. A figure is the median of rounds: tokens per second of the process's CPU time
while all requests of a group generate, without their prompts. `over_vllm` is the best arm of ours over the best of
vLLM's, plain ones included, and `gain` what speculation adds to each: its best arm over its plain one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from benchmarks.support.texts import repetitive
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
from outrider.core.errors import Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, Directive, SessionLimits
from outrider.core.sampling import SamplingParams
from outrider.llama import ChainContext, LlamaModel

PLAIN, SOURCES, VLLM, SUFFIX = "plain", "sources", "vllm", "vllm suffix"
SETTINGS = {"greedy": 0.0, "T=0.8": 0.8}
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Tokens before a position that vLLM's n-grams look up: the least, and the most."""
LIMITS = SessionLimits()

Answer = Callable[[Sequence[GenerateRequest], float], TimedOutput]
"""A function that answers all requests at once, at this temperature."""


@dataclass(frozen=True)
class Arm:
    """Hold one way to answer requests. forget: makes it forget all texts; None if it remembers none for long."""

    answer: Answer
    forget: Callable[[], None] | None = None


@dataclass(frozen=True)
class CoLocatedSize:
    """Set how much is measured."""

    requests: int = 16
    alone: int = 8
    """Requests of those that also come one at a time."""
    groups: tuple[int, ...] = (1, 4, 16)
    """Requests at once."""
    tokens: int = 96
    rounds: int = 2
    lessons: int = 16
    """Prompts for tuning that every arm serves before each turn; vLLM's suffixes remember as many requests."""
    depths: tuple[int, ...] = (4, 16)
    """Longest chains of our verifier's draft."""
    ngram: tuple[int, ...] = (4, 8)
    draft: tuple[int, ...] = (2, 4)
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
SMOKE = CoLocatedSize(
    requests=2,
    alone=1,
    groups=(1, 2),
    tokens=8,
    rounds=1,
    lessons=2,
    depths=(2,),
    ngram=(2,),
    draft=(2,),
    compiled=False,
)


class EngineArm:
    """Answer requests with an engine that has sources of its own."""

    def __init__(self, model: TargetModel, sources: Callable[[], Sequence[ServerSource]]) -> None:
        """Take a target and a function that makes sources which have seen no text."""
        self._model = model
        self._sources = sources
        self._config = EngineConfig(prefix_cache=False)
        self._cost = profile(model, self._config.token_budget)
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Begin with a new engine and new sources; what steps cost stays known."""
        executor = TorchExecutor(self._model, self._config, self._cost)
        self._engine = Engine(executor, self._config, overlay=Overlay(self._sources()))

    def answer(self, requests: Sequence[GenerateRequest], temperature: float) -> TimedOutput:
        """Return the outputs and their times. Raises the error with which the engine ends a session."""
        devices = {
            f"request-{next(self._numbers)}": DeviceSession(
                request.prompt,
                sampling=SamplingParams(temperature=temperature, seed=number),
                max_tokens=request.tokens,
                ignore_eos=True,
            )
            for number, request in enumerate(requests)
        }
        clock = _Clock()
        steps: list[dict[str, Any]] = []
        index = {name: number for number, name in enumerate(devices)}
        for name, device in devices.items():
            self._engine.start(name, device.attach(1, LIMITS), LIMITS, Directive())
        while not all(device.finished for device in devices.values()):
            commits = list(self._step())
            cpu, wall = clock.lap()
            steps.append({"cpu": cpu, "wall": wall, "tokens": {index[name]: c.tokens for name, c in commits}})
            appends = []
            for name, commit in commits:
                devices[name].on_commit(commit)
                if (append := devices[name].poll(resting=True)) is not None:
                    appends.append((name, append))
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


class _Clock:
    """Tell the CPU time of this process, and the wall time, since they were last asked for."""

    def __init__(self) -> None:
        self._since = time.process_time(), time.perf_counter()

    def lap(self) -> tuple[float, float]:
        before, self._since = self._since, (time.process_time(), time.perf_counter())
        return self._since[0] - before[0], self._since[1] - before[1]


def our_arms(pair: Pair, size: CoLocatedSize, stack: contextlib.ExitStack) -> dict[str, Arm]:
    """Return the arms of our engine. stack: frees what they hold."""
    plain = EngineArm(_target(pair, size, states=False), list)
    arms = {PLAIN: Arm(plain.answer, plain.forget)}
    model = _target(pair, size, states=pair.heads is not None)
    heads = None
    if pair.heads is not None:
        heads = load_heads(pair.heads, f"sha256:{model.weights_hash}", int(model.config.hidden_size))
    draft = stack.enter_context(LlamaModel.load(pair.draft, threads=1))
    for depth in size.depths:
        chains = ChainContext(draft, length=draft.n_ctx_train, count=max(size.groups), threads=1)
        stack.enter_context(chains)

        def sources(depth: int = depth, chains: ChainContext = chains) -> list[ServerSource]:
            own = [] if heads is None else [HeadsSource(heads, model, vocabulary=model.vocab_size)]
            gguf = LlamaServerDraft(chains, depth=depth, vocabulary=model.vocab_size)
            return [*sources_of(["ngram", "recycling"]), *own, gguf]

        arm = EngineArm(model, sources)
        arms[f"{SOURCES}, {depth}"] = Arm(arm.answer, arm.forget)
    return arms


def _target(pair: Pair, size: CoLocatedSize, *, states: bool) -> TargetModel:
    model = TargetModel.load(pair.target, dtype="float32", threads=1)
    if states:
        model.keep_states()
    if size.compiled:
        print(compile_if_faster(model), flush=True)
    check_numerics(model)
    return model


@contextlib.contextmanager
def vllm_arms(python: Path, pair: Pair, size: CoLocatedSize, core: int) -> Iterator[dict[str, Arm]]:
    """Run vLLM's arms, each in a process of its own on the same core. Raises Unavailable if one does not start."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, contextlib.ExitStack() as stack:
        draft_from_gguf(pair.draft).save_pretrained(scratch)
        methods: dict[str, dict[str, Any]] = {VLLM: {}}
        for count in size.ngram:
            methods[f"vllm ngram, {count}"] = {"method": "ngram", "num_speculative_tokens": count, **LOOK_UP}
        for count in size.draft:
            methods[f"vllm draft, {count}"] = {
                "method": "draft_model",
                "model": scratch,
                "num_speculative_tokens": count,
            }
        methods[SUFFIX] = {"method": "suffix", "suffix_decoding_max_cached_requests": size.lessons}
        arms: dict[str, Arm] = {}
        for name, method in methods.items():
            options: dict[str, Any] = {"speculative_config": method, "async_scheduling": False} if method else {}
            if not size.compiled:
                options["enforce_eager"] = True
            try:
                running = vllm_baseline.running(python, pair.target, core, {name: options})
                arms[name] = Arm(stack.enter_context(running)[name].batch)
            except Unavailable as error:
                if name != SUFFIX:
                    raise
                print(f"{SUFFIX}: left out, since it does not start: {error}", flush=True)
        yield arms


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
                if arm.forget is not None:
                    arm.forget()
                arm.answer(lessons, temperature)
                found[at_once][name].append(total([arm.answer(group, temperature) for group in groups]))
    return found


def figures(found: Mapping[int, Mapping[str, Sequence[TimedOutput]]], setting: str) -> dict[str, Any]:
    """Print and return the rates of the arms by the number of requests at once, and ours over vLLM's."""
    rates: dict[str, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    over: dict[str, float] = {}
    gain: dict[str, dict[str, float]] = {}
    for at_once, arms in found.items():
        print(f"\n{setting}, {at_once} at once: tokens per CPU-second, tokens per step and request", flush=True)
        for name, timed in arms.items():
            rate = [each.decode_rate for each in timed]
            rates.setdefault(str(at_once), {})[name] = round(statistics.median(rate), 1)
            per_step = sum(each.tokens for each in timed) / sum(each.session_steps for each in timed)
            steps.setdefault(str(at_once), {})[name] = round(per_step, 3)
            print(f"  {name:<16} {spread(rate):<30} {per_step:.2f}", flush=True)
        theirs = {name: rate for name, rate in rates[str(at_once)].items() if name.startswith(VLLM)}
        ours = {name: rate for name, rate in rates[str(at_once)].items() if name not in theirs}
        gain[str(at_once)] = {SOURCES: round(max(ours.values()) / ours[PLAIN], 3)}
        if theirs:
            gain[str(at_once)][VLLM] = round(max(theirs.values()) / theirs[VLLM], 3)
            over[str(at_once)] = round(max(ours.values()) / max(theirs.values()), 3)
    return {"tokens_per_cpu_s": rates, "tokens_per_step": steps, "gain": gain, "over_vllm": over or None}


def differing(
    hf: HuggingFaceBaseline,
    requests: Sequence[GenerateRequest],
    found: Mapping[int, Mapping[str, Sequence[TimedOutput]]],
) -> int:
    """Print where greedy outputs leave those of `plain`; return how many do so without a tie."""
    wrong = 0
    for at_once, arms in found.items():
        for name, rounds in arms.items():
            for ours, theirs in zip(arms[PLAIN], rounds, strict=True):
                for gap in gaps(hf, requests[: len(ours.outputs)], ours, theirs):
                    print(f"{name}, {at_once} at once: another token, whose logit is {gap:.2g} below the best")
                    wrong += gap > TIE
    return wrong


def chosen(pair: Pair, plain: Answer, size: CoLocatedSize) -> list[GenerateRequest]:
    """Return requests whose greedy outputs do not repeat themselves. Raises Unavailable if there are too few."""
    held_out, quoting = (pair.encode(harness.prompts(split)).values() for split in ("heldout", "quoting"))
    mixed = [ids for both in itertools.zip_longest(held_out, quoting) for ids in both if ids is not None]
    requests = [GenerateRequest(tuple(ids), size.tokens) for ids in mixed]
    good: list[GenerateRequest] = []
    at_once = max(size.groups)
    for begin in range(0, len(requests), at_once):
        some = requests[begin : begin + at_once]
        outputs = plain(some, 0.0).outputs
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
    with contextlib.ExitStack() as stack:
        arms = our_arms(pair, size, stack)
        requests = chosen(pair, arms[PLAIN].answer, size)
        if options.vllm_python is None:
            print("vLLM: not installed, skipped")
        else:
            arms |= stack.enter_context(vllm_arms(options.vllm_python, pair, size, core))
        lessons = pair.encode(harness.prompts("tuning", size.lessons))
        taught = [GenerateRequest(tuple(ids), size.tokens) for ids in lessons.values()]
        for arm, temperature in itertools.product(arms.values(), SETTINGS.values()):
            arm.answer(taught, temperature)  # whatever is slow at first
        result: dict[str, Any] = {}
        wrong = 0
        for setting, temperature in SETTINGS.items():
            found = measure(arms, requests, taught, temperature, size)
            result[setting] = figures(found, setting)
            if not temperature:
                wrong = differing(HuggingFaceBaseline.load(pair.target), requests, found)
    criteria = [Criterion.none("greedy outputs that differ without a tie", wrong)]
    harness.finish(result, criteria, options.size)


if __name__ == "__main__":
    main()
