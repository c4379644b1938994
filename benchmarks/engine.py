"""Measure the engine in one process: a step's time and its share outside the model, and other engines beside it.

The engine verifies trees of scripted devices: 0 to 16 draft tokens for each of 1 to 16 sessions behind prompts of 232
tokens, half of the sessions sampling at temperature 0.8. A step includes reading the devices' messages and writing the
commits. `outside_ms` is the part of a step that is not the model's forward pass, and
`outside_ms_per_session_step` the same divided by the sessions. The last row has a random target of 64 hidden units and
151,936 tokens, whose step is hardly anything but choosing tokens. Times are medians of CPU time, on a GPU of wall time.

`beside` compares tokens per second without drafts, prompts included, by wall time: Outrider's engine, Hugging Face's
`generate`, and with `--vllm-python PATH` vLLM in that interpreter, each with one and with 16 requests that arrive at
once. All compute in the same `--dtype`, on a CPU with one thread. `--device cuda` runs all of them on a GPU.

`simulated` is the engine over a simulated GPU whose forward pass takes 15 ms, with 4 draft tokens for each session: the
share of the time in which the GPU idles, with all sessions in each step and with two cohorts where the engine finds
them faster.

Caveat: sampling, grammars and penalties cost more than the greedy half of these sessions.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.support import harness, vllm_alone
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.simulated_gpu import idle_share
from benchmarks.support.stepped_engine import GREEDY, ScriptedDevice, SteppedEngine
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.launcher import HUGE_PAGES
from outrider.core.sampling import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
PROMPT = 232
SIMULATED_S = 15e-3
WARM = 2
"""Steps with all sessions in them that are not counted."""


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    sessions: tuple[int, ...] = (1, 4, 16)
    nodes: tuple[int, ...] = (0, 4, 8, 16)
    rounds: int = 5
    steps: int = 12
    """Steps that are timed in each round."""
    output: int = 128
    """Tokens of each request that other engines answer, too."""
    crowds: tuple[int, ...] = (16, 64, 256)
    """Sessions over the simulated GPU, each of `output` tokens."""


QUICK = Setting(sessions=(1, 16), nodes=(0, 8), rounds=1, steps=4, output=32, crowds=(16, 64))


def row(engine: SteppedEngine, name: str, cases: Sequence[ScriptedDevice], nodes: int, s: Setting) -> dict[str, Any]:
    """Measure steps of these sessions, and return the row of the table."""
    steps = []
    for _ in range(s.rounds):
        served = engine.serve([replace(case, nodes=nodes) for case in cases], most=WARM + s.steps)
        steps += [step for step in served if step.full == len(cases)][WARM:]
    outside = [step.seconds - step.model_s for step in steps]
    found = {
        "target": name,
        "sessions": len(cases),
        "draft_tokens": nodes,
        "step_ms": rounded(1e3 * statistics.median(step.seconds for step in steps)),
        "outside_ms": rounded(1e3 * statistics.median(outside)),
        "outside_ms_per_session_step": rounded(1e3 * statistics.median(outside) / len(cases), 4),
        "outside_share": rounded(sum(outside) / sum(step.seconds for step in steps), 3),
    }
    say(found)
    return found


def continued(engine: SteppedEngine, prompts: Sequence[Sequence[int]], s: Setting) -> list[ScriptedDevice]:
    """Return a session for each prompt, half of them sampling, that knows how its text goes on."""
    length = 6 * (WARM + s.steps + 8)  # a step of RATE commits five tokens at most in the mean
    cases = [ScriptedDevice(ids, length, SAMPLED if i % 2 else GREEDY) for i, ids in enumerate(prompts)]
    engine.serve(cases)
    return [replace(case, tokens=3 * length, truth=tuple(case.session.received)) for case in cases]


def of_a_large_vocabulary(device: str) -> TargetModel:
    """Return a random target that consists of little more than its output layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=151_936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    return TargetModel(module, name="151,936 tokens")


@torch.inference_mode()
def by_hugging_face(module: Any, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the seconds in which Hugging Face's `generate` answers these requests."""
    ids = torch.tensor(prompts, device=module.device)
    begun = time.perf_counter()
    module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
    )
    return time.perf_counter() - begun


def beside(
    engine: SteppedEngine, pair: Pair, prompts: Sequence[Sequence[int]], s: Setting, vllm_python: Path | None
) -> list[dict[str, Any]]:
    """Return tokens per second of each engine, with one request and with all at once."""
    module = AutoModelForCausalLM.from_pretrained(pair.target, dtype=engine.model.torch_dtype, local_files_only=True)
    module = module.to(engine.model.device).eval()
    batches = [prompts[:1], prompts]
    found: dict[str, list[float]] = {"Outrider": [], "Hugging Face": []}
    for batch in batches:
        ours, theirs = [], []
        for _ in range(1 + s.rounds // 2):
            begun = time.perf_counter()
            engine.serve([ScriptedDevice(ids, s.output) for ids in batch], cached=False)
            ours.append(time.perf_counter() - begun)
            theirs.append(by_hugging_face(module, batch, s.output))
        found["Outrider"].append(min(ours))
        found["Hugging Face"].append(min(theirs))
    if vllm_python is not None:
        asked = {len(batch): batch for batch in batches}
        found["vLLM"] = [
            max(text.delivered_s[-1] for text in run.texts) - min(text.begun_s for text in run.texts)
            for run in vllm_alone.runs(vllm_python, pair.target, engine.model.dtype, asked, s.output)
        ]
    names = [f"tokens_per_s_{len(batch)}_at_once" for batch in batches]
    rates = {
        name: [rounded(len(batch) * s.output / each, 1) for batch, each in zip(batches, seconds, strict=True)]
        for name, seconds in found.items()
    }
    return [{"engine": name} | dict(zip(names, each, strict=True)) for name, each in rates.items()]


def simulated(s: Setting) -> list[dict[str, Any]]:
    """Return what the engine makes of a simulated GPU, with one cohort and with two where they pay."""
    found = []
    for sessions in s.crowds:
        for cohorts in (False, True):
            share = idle_share(sessions, nodes=4, step_s=SIMULATED_S, cohorts=cohorts, tokens=s.output)
            found.append(
                {"sessions": sessions, "cohorts": cohorts} | {name: rounded(value, 4) for name, value in share.items()}
            )
            say(found[-1])
    return found


def measure(options: argparse.Namespace) -> None:
    disable_progress_bar()
    pair = Pair.of(options)
    s = QUICK if options.quick else Setting()
    if options.device == "cpu":
        os.sched_setaffinity(0, {harness.cores()[0]})
    most = max(s.sessions)
    text = harness.running_text(options, pair, most * PROMPT)
    prompts = [text[i * PROMPT :][:PROMPT] for i in range(most)]
    engine = SteppedEngine(TargetModel.load(pair.target, device=options.device, dtype=options.dtype, threads=1), most)
    gc.collect()
    gc.freeze()  # as the engine's process does when it has loaded the target
    cases = continued(engine, prompts, s)
    rows = [row(engine, "given", cases[:sessions], nodes, s) for sessions in s.sessions for nodes in s.nodes]
    large = SteppedEngine(of_a_large_vocabulary(options.device), most)
    rows.append(row(large, large.model.name, continued(large, prompts, s), 8, s))
    compared = beside(engine, pair, prompts, s, options.vllm_python)
    crowded = next(one for one in rows if (one["sessions"], one["draft_tokens"]) == (most, 8))
    harness.finish(
        options,
        f"Target in {engine.model.dtype} on {options.device}, prompts of {PROMPT} and outputs of {s.output} tokens.",
        rows,
        beside=compared,
        simulated=simulated(s),
        outside_ms_per_session_step=crowded["outside_ms_per_session_step"],
    )


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("engine", __doc__)
    harness.add_target_options(parser)
    harness.add_vllm_option(parser)
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    if not HUGE_PAGES.keys() <= os.environ.keys():  # the engine's process begins with them
        os.execve(sys.executable, sys.orig_argv, HUGE_PAGES | os.environ)
    main()
