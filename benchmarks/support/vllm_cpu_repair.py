"""Repair how vLLM 0.32 for CPUs samples beside draft tokens: a worker class for its `worker_cls`.

Its kernel for CPUs spreads the temperature over the rows of a step in a copy of integers that is thrown away, so that
logits are divided by whatever was in memory, and hardly any draft token is accepted above temperature 0. Runs in the
interpreter that has vLLM.
"""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

__all__ = ["CPUWorker"]


def expand_batch_to_tokens(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return the value `[batch]` of each request for each of its draft tokens `[count]`, which end at `ends` `[batch]`.

    replace_from, replace_to: a value, and what it becomes.
    """
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return replaced.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=count)


rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
