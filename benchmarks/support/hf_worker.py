"""Generate with Hugging Face transformers in a process of its own: a JsonWorker of benchmarks.latency.

{"generate": [ids], "max_tokens": n, "temperature": t}  -> {"seconds": s, "tokens": n}
{"forward": [ids], "steps": n}                          -> {"seconds": s}, of n one-token forwards after ids
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar, set_verbosity_error


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
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "generate" in request:
            answer = generate(model, request["generate"], request["max_tokens"], request["temperature"])
        else:
            answer = forward(model, request["forward"], request["steps"])
        print(json.dumps({"id": request["id"]} | answer), flush=True)


if __name__ == "__main__":
    main()
