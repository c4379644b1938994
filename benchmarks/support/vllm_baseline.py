"""Run vLLM on the same target, as it is, in its own interpreter: a baseline of benchmarks.engine and co_located.

Float32, EOS ignored, one thread on this process's core; `vllm_worker` says how vLLM is set up. It runs
compiled, as it does by default, and once more without compiling, so that the engine is compared with the faster one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.hf_baseline import GenerateRequest, TimedOutput
from benchmarks.support.proc import JsonWorker
from cloud_verifier.engine_process.launcher import preloaded_libraries

COMPILED, EAGER = "vllm", "vllm eager"
OPTIONS: dict[str, dict[str, Any]] = {COMPILED: {}, EAGER: {"enforce_eager": True}}
"""Name of a configuration -> arguments of vLLM's EngineArgs."""


class VllmBaseline:
    """Run the target in vLLM, in a worker process."""

    def __init__(self, worker: JsonWorker, runner: asyncio.Runner) -> None:
        """Take a worker of `vllm_worker` and the event loop in which it was started."""
        self._worker = worker
        self._runner = runner

    @property
    def version(self) -> str:
        return str(self._worker.ready["version"])

    def batch(self, requests: Sequence[GenerateRequest], temperature: float = 0.0) -> TimedOutput:
        """Generate for all requests, which arrive at once."""
        prompts, tokens = [r.prompt for r in requests], [r.tokens for r in requests]
        answer = self._runner.run(self._worker.ask(prompts=prompts, tokens=tokens, temperature=temperature))
        return timed_output(requests, answer["steps"])

    def forget(self) -> None:
        """Forget the texts of all requests, where its speculation remembers them."""
        self._runner.run(self._worker.ask(forget=True))


@contextlib.contextmanager
def running(
    python: Path, target: Path, core: int, configurations: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, VllmBaseline]]:
    """Run vLLM in these configurations on one core. configurations: by name, as in OPTIONS. Raises Unavailable if vLLM
    does not start."""
    python = python.absolute()
    environment = {"LD_PRELOAD": preloaded_libraries(python), "PYTHONPATH": ""}
    with asyncio.Runner() as runner:
        workers: dict[str, JsonWorker] = {}
        try:
            for name, options in configurations.items():
                started = JsonWorker.start(
                    "benchmarks.support.vllm_worker",
                    str(target.absolute()),
                    json.dumps(options),
                    cores=[core],
                    python=python,
                    environment=environment,
                )
                workers[name] = runner.run(started)
            yield {name: VllmBaseline(worker, runner) for name, worker in workers.items()}
        finally:
            for worker in workers.values():
                runner.run(worker.kill())


def timed_output(requests: Sequence[GenerateRequest], steps: Sequence[Mapping[str, Any]]) -> TimedOutput:
    """Sum up a worker's steps. Decoding is what comes after the last first token, up to the first request's end."""
    outputs: list[list[int]] = [[] for _ in requests]
    decoding: list[Mapping[str, Any]] = []
    for step in steps:
        if all(outputs) and all(len(got) < asked.tokens for got, asked in zip(outputs, requests, strict=True)):
            decoding.append(step)
        for index, tokens in step["tokens"].items():
            outputs[int(index)] += tokens
    return TimedOutput(
        outputs=tuple(map(tuple, outputs)),
        seconds=sum(step["cpu"] for step in steps),
        decode_tokens=sum(len(tokens) for step in decoding for tokens in step["tokens"].values()),
        decode_seconds=sum(step["cpu"] for step in decoding),
        wall_seconds=sum(step["wall"] for step in steps),
        decode_wall_seconds=sum(step["wall"] for step in decoding),
        session_steps=sum(bool(tokens) for step in steps for tokens in step["tokens"].values()),
    )
