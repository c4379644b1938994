"""Generate with Hugging Face transformers, or run bare forwards, in a process of its own: a JsonWorker of
benchmarks.latency.

{"generate": [ids], "max_tokens": n, "temperature": t}  -> {"seconds": s, "tokens": n}
{"forward": [ids], "steps": n}                          -> {"seconds": s}, of n one-token forwards after ids
{"own_forward": n}                                      -> {"seconds": s}, of n of the engine's own, behind 256 tokens
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from cloud_verifier.engine.torch_backend.executor import timed_steps
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics


@torch.inference_mode()
def generate(model: Any, ids: list[int], max_tokens: int, temperature: float) -> dict[str, float]:
    prompt = torch.tensor([ids])
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    began = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        top_k=None,
        top_p=None,
        **({"temperature": None} | sampling),
    )
    return {"seconds": time.perf_counter() - began, "tokens": out.shape[1] - len(ids)}


@torch.inference_mode()
def forward(model: Any, ids: list[int], steps: int) -> dict[str, float]:
    cache = DynamicCache()
    model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = torch.tensor([[ids[-1]]])
    began = time.perf_counter()
    for _ in range(steps):
        model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True).eval()
    own = TargetModel.load(Path(sys.argv[1]), dtype="float32", threads=1)
    check_numerics(own)
    step = timed_steps(own, 1, time.perf_counter)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "generate" in request:
            answer = generate(model, request["generate"], request["max_tokens"], request["temperature"])
        elif "own_forward" in request:
            answer = {"seconds": sum(step([1]) for _ in range(request["own_forward"]))}
        else:
            answer = forward(model, request["forward"], request["steps"])
        print(json.dumps({"id": request["id"]} | answer), flush=True)


if __name__ == "__main__":
    main()
