"""Generate with vLLM as it is, in the interpreter that has it, for benchmarks. It imports nothing of Outrider.

It reads {"model", "dtype", "speculative", "temperature", "tokens", "runs": [[users, [[ids], ...]], ...]} from stdin:
`speculative` is vLLM's `speculative_config` or null, and in a run each user has the next prompt as soon as an answer
ends. The last line of stdout has a list for each run: its texts, each as [user, begun_s, tokens, [when each came]].
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM reads when it is imported."""
KV_BYTES = 2 << 30
"""Memory for keys and values, enough for all requests at once, beside the other engines."""


def main() -> None:
    os.environ |= VARIABLES
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = json.load(sys.stdin)
    engine = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
        max_num_seqs=max(users for users, _ in asked["runs"]),
        max_model_len=2048,
        speculative_config=asked["speculative"],
    ).llm_engine
    params = SamplingParams(
        temperature=asked["temperature"],
        seed=0,
        max_tokens=asked["tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

    def run(users: int, prompts: list[list[int]]) -> list[Any]:
        texts: list[Any] = []
        waiting = list(prompts)

        def begin(user: int) -> None:
            if waiting:
                engine.add_request(str(len(texts)), {"prompt_token_ids": waiting.pop(0)}, params)
                texts.append([user, time.monotonic(), [], []])

        for user in range(users):
            begin(user)
        while engine.has_unfinished_requests():
            for output in engine.step():
                text, new = texts[int(output.request_id)], list(output.outputs[0].token_ids)
                text[2] += new
                text[3] += [time.monotonic()] * len(new)
                if output.finished:
                    begin(text[0])
        return texts

    for users, prompts in asked["runs"]:
        run(users, prompts[:users])  # compiles what so many rows need
    print(json.dumps([run(users, prompts) for users, prompts in asked["runs"]]))


if __name__ == "__main__":
    main()
