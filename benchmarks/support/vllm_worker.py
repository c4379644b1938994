"""Generate with vLLM as it is, without anything of Outrider: a JsonWorker of benchmarks.engine and co_located.

Needs vLLM, torch and the standard library, and runs in the interpreter of an environment that has vLLM.

{"prompts": [[ids], ...], "tokens": [n, ...], "temperature": t}
    -> {"steps": [{"cpu": s, "wall": s, "tokens": {index: [ids]}}, ...]}
{"forget": true} -> {}, when suffix decoding has forgotten all outputs

All requests arrive at once. A step's tokens are those of the requests of that index. `cpu` is of the whole process; the
requests' own handling counts as part of the first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {  # vllm reads them when it is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on the core that it was given
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

KV_BYTES = 1 << 30
"""Memory for keys and values; enough for every request of the benchmark at once, so that nothing is preempted."""
WARM_UP = (1, 4, 16)
"""Sizes of the batches that are generated before the worker is ready, so that nothing is compiled later."""


class PlainVllm:
    """Run a target with vLLM's own scheduler and sampler, in float32, without the cost of a prefix cache."""

    def __init__(self, folder: str, **options: Any) -> None:
        """Load the target. options: further arguments of vLLM's EngineArgs; all others are vLLM's defaults."""
        settings = EngineArgs(
            model=folder,
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=KV_BYTES,
            **options,
        ).create_engine_config()
        self._core = EngineCore(settings, Executor.get_class(settings), log_stats=False)
        self._requests = 0

    def generate(self, prompts: list[list[int]], tokens: list[int], temperature: float) -> list[dict[str, Any]]:
        """Answer all prompts at once, each with so many tokens; return what every step took and generated."""
        cpu, wall = time.process_time(), time.perf_counter()
        left = dict(self._add(prompts, tokens, temperature))
        steps = []
        while left:
            outputs, executed = self._core.step()
            self._core.post_step(executed)
            found = {}
            for output in [output for client in outputs.values() for output in client.outputs]:
                found[left[output.request_id]] = output.new_token_ids
                if output.finished:
                    del left[output.request_id]
            now_cpu, now_wall = time.process_time(), time.perf_counter()
            steps.append({"cpu": now_cpu - cpu, "wall": now_wall - wall, "tokens": found})
            cpu, wall = now_cpu, now_wall
        return steps

    def forget(self) -> None:
        """Empty the outputs that suffix decoding remembers, the only ones that outlive their request."""
        self._core.model_executor.collective_rpc(_forget_outputs)

    def _add(self, prompts: list[list[int]], tokens: list[int], temperature: float) -> list[tuple[str, int]]:
        """Hand the requests to vLLM; return the id of each with its index."""
        added = []
        for index, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
            self._requests += 1
            params = SamplingParams(
                temperature=temperature, seed=index, max_tokens=count, ignore_eos=True, detokenize=False
            )
            self._core.add_request(Request(str(self._requests), prompt, params, None))
            added.append((str(self._requests), index))
        return added


def _forget_outputs(worker: Any) -> None:
    """Run in vLLM's worker."""
    runner = getattr(worker, "worker", worker).model_runner
    cache = getattr(getattr(runner, "drafter", None), "suffix_cache", None)
    if cache is not None:
        for request in list(cache.cached_requests):
            cache.evict_cached_response(request)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its libraries print where answers are expected
    engine = PlainVllm(sys.argv[1], **json.loads(sys.argv[2]))
    for requests in WARM_UP:
        engine.generate([[token] * 64 for token in range(requests)], [4] * requests, 0.0)
    print(json.dumps({"ready": True, "version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("forget"):
            engine.forget()
            print(json.dumps({"id": request["id"]}), file=answers, flush=True)
            continue
        steps = engine.generate(request["prompts"], request["tokens"], request["temperature"])
        print(json.dumps({"id": request["id"], "steps": steps}), file=answers, flush=True)


if __name__ == "__main__":
    main()
