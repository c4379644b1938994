"""The target's own text, with its distribution at every generated position: what the drafts learn from.

Each part is one safetensors file of rows of equal length: ``tokens [rows, prompt + n]``, and for the n
generated positions the 64 likeliest ids and their log-probabilities (temperature 1), and ``counted``, which
is false after the end of a text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from models.recipe import tokenizer
from models.recipe.decoder import Decoder
from models.recipe.settings import ASSISTANT, SPECIAL_TOKENS, DistilPlan, Job
from models.recipe.target import load_model
from models.recipe.windows import Tokens, load_documents, load_tokens

TOP = 64
END_ID = SPECIAL_TOKENS.index("<|end|>")
ASSISTANT_ID = SPECIAL_TOKENS.index(ASSISTANT)
# Batches out of every 14, by kind of prompt: what the demo is used for, code first.
PROMPT_SHARES = {"code": 5, "math": 4, "chat_code": 3, "chat_math": 2}
_CODE_LENGTHS = (8, 16, 32, 64, 128)
_LONGEST_PROMPT = 320


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length and kind; all rows begin alike, with the end of an earlier text if need be."""

    kind: str
    ids: NDArray[np.int64]


def build(job: Job) -> None:
    """Write parts until the plan's tokens are there or its time is up."""
    folder, plan = job.stage("generate"), job.scale.distil
    model = load_model(job.stage("target") / "model", torch.bfloat16).to(job.device)
    done = sorted(folder.glob("part-*.json"))
    total = sum(json.loads(path.read_text())["tokens"] for path in done)
    seconds = sum(json.loads(path.read_text())["seconds"] for path in done)
    prompts = draw_prompts(job, plan)
    for number, group in enumerate(prompts):
        if total >= plan.tokens or seconds >= plan.generate_minutes * 60:
            break
        if number < len(done):
            continue
        began = time.monotonic()
        temperature = plan.temperatures[number % len(plan.temperatures)]
        tokens = write_part(model, group, plan, temperature, folder / f"part-{number:05d}", job.seed + number)
        passed = time.monotonic() - began
        total, seconds = total + tokens, seconds + passed
        (folder / f"part-{number:05d}.json").write_text(
            json.dumps({"kind": group.kind, "tokens": tokens, "seconds": passed, "temperature": temperature})
        )
        left = min((plan.tokens - total) * seconds / total, plan.generate_minutes * 60 - seconds)
        print(
            f"part {number:4d}  {group.kind:9s}  {tokens / passed:6.0f} tokens/s  {total / 1e3:.0f}k tokens  "
            f"{max(0.0, left) / 60:.1f} min left",
            flush=True,
        )
    (folder / "done.json").write_text(json.dumps({"tokens": total, "seconds": seconds}))


def draw_prompts(job: Job, plan: DistilPlan) -> Iterator[Prompts]:
    """Yield batches of training prompts for ever: a pure function of the job's seed."""
    sources = {kind: _source(job, kind, plan) for kind in PROMPT_SHARES}
    while True:
        for turn in range(max(PROMPT_SHARES.values())):
            for kind, share in PROMPT_SHARES.items():
                if turn < share:
                    yield Prompts(kind, next(sources[kind]))


@torch.inference_mode()
def continue_prompts(
    model: Qwen3ForCausalLM, prompts: NDArray[np.int64], count: int, temperature: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``tokens [rows, prompt + n]`` and the top ids and log-probs ``[rows, n, TOP]``, n <= count.

    Stops early once seven rows out of eight have come to an end.
    """
    rows, length = prompts.shape
    decoder = Decoder(model, rows, length + count)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(prompts).to(model.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=model.device)
    step, tops = tokens, []
    for _ in range(count):
        log_probs = decoder.forward(step).log_softmax(-1)
        tops.append(log_probs.topk(TOP))
        step = choose(log_probs, temperature, generator)
        tokens = torch.cat([tokens, step], dim=1)
        ended |= step[:, 0] == END_ID
        if ended.sum() * 8 >= rows * 7:
            break
    ids = torch.stack([top.indices for top in tops], dim=1)
    return tokens, ids, torch.stack([top.values for top in tops], dim=1)


def choose(log_probs: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return one token per row ``[rows, 1]``: the likeliest at temperature 0, else sampled."""
    if temperature == 0:
        return log_probs.argmax(-1, keepdim=True)
    # Inverse of the distribution function: one random number per row instead of one per token of the vocabulary.
    mass = (log_probs / temperature).exp_().cumsum(-1)
    point = torch.rand(len(mass), 1, generator=generator).to(mass.device) * mass[:, -1:]
    return torch.searchsorted(mass, point).clamp_max(mass.shape[1] - 1)


def write_part(
    model: Qwen3ForCausalLM, prompts: Prompts, plan: DistilPlan, temperature: float, path: Path, seed: int
) -> int:
    """Generate one part and write it to ``path`` (suffix added); return how many tokens count."""
    tokens, ids, log_probs = continue_prompts(model, prompts.ids, plan.continuation, temperature, seed)
    written = tokens[:, prompts.ids.shape[1] :]
    ends = (written == END_ID).int()
    counted = (ends.cumsum(1) - ends) == 0  # up to and including the first end
    save_file(
        {
            "tokens": tokens.cpu().numpy().astype(np.uint16),
            "top_ids": ids.cpu().numpy().astype(np.uint16),
            "top_log_probs": log_probs.cpu().numpy().astype(np.float16),
            "counted": counted.cpu().numpy(),
        },
        path.with_suffix(".safetensors"),
    )
    return int(counted.sum())


def _source(job: Job, kind: str, plan: DistilPlan) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng([job.seed, sorted(PROMPT_SHARES).index(kind)])
    folder = job.stage("tokens")
    if kind == "code":
        return _code_batches(load_tokens(folder, kind, "train"), plan.batch, job, rng)
    documents = load_documents(folder, kind, "train")
    marker = _marker(job, kind)
    heads = [head for document in documents if (head := _head(document, marker)) is not None]
    return _sorted_batches(heads, plan.batch, rng)


def _code_batches(stream: Tokens, rows: int, job: Job, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Batches of code that begin at the beginning of a line."""
    vocabulary = tokenizer.load(job)
    is_newline = np.array([vocabulary.decode([i]).endswith("\n") for i in range(vocabulary.get_vocab_size())])
    starts = np.flatnonzero(is_newline[stream]) + 1
    while True:
        length = int(rng.choice(_CODE_LENGTHS))
        chosen = rng.choice(starts[starts < len(stream) - length], rows, replace=False)
        yield np.stack([stream[start : start + length] for start in chosen]).astype(np.int64)


def _sorted_batches(heads: list[Tokens], rows: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Batches of prompts of about equal length, the shorter ones behind the end of an earlier text."""
    while True:
        shuffled = [heads[index] for index in rng.permutation(len(heads))]
        shuffled.sort(key=len)
        groups = [shuffled[start : start + rows] for start in range(0, len(shuffled) - rows + 1, rows)]
        for index in rng.permutation(len(groups)):
            longest = len(groups[index][-1])
            batch = np.full((rows, longest), END_ID, np.int64)
            for row, head in zip(batch, groups[index], strict=True):
                row[longest - len(head) :] = head
            yield batch


def _marker(job: Job, kind: str) -> list[int]:
    """Return the tokens after which an answer begins."""
    if kind != "math":
        return [ASSISTANT_ID]
    ids: list[int] = tokenizer.load(job).encode("Answer:", add_special_tokens=False).ids
    return ids


def _head(document: Tokens, marker: list[int]) -> Tokens | None:
    """Return a document up to and including its first ``marker``, if there is one and it comes early."""
    for place in np.flatnonzero(document[:_LONGEST_PROMPT] == marker[0]):
        end = place + len(marker)
        if document[place:end].tolist() == marker:
            return document[:end]
    return None
