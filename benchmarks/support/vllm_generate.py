"""Generate with vLLM as it is, in the interpreter that has it, for benchmarks.engine. It imports nothing of Outrider.

It reads {"model", "dtype", "batches": [[[ids], ...], ...], "tokens"} from stdin, and writes the seconds of each batch,
whose requests arrive at once, as the last line of stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {  # vllm reads them when it is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

KV_BYTES = 2 << 30
"""Memory for keys and values, enough for all requests at once, beside the other engines."""


def main() -> None:
    from vllm import LLM, SamplingParams, __version__

    asked = json.load(sys.stdin)
    engine = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
    )
    params = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    seconds = []
    for batch in asked["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        engine.generate(prompts, params, use_tqdm=False)  # compiles what the batch needs
        begun = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    print(json.dumps({"version": __version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
