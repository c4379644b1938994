"""Run Hugging Face `generate` on the same target, batched, with either cache, and compare benchmarks.engine with it.

Greedy, float32, EOS ignored. A ragged batch is padded on the left and generates to its longest output; only the tokens
that were asked for count. Assisted generation takes the draft of the pair; transformers reads a GGUF itself only with
`accelerate` installed, so its few tensors are dequantised here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.support.old_harness import rotated, spread

T = TypeVar("T")

PAD = 0
"""Padding id; the mask hides it, so any id will do."""
STATIC_STEP = 64
"""A static cache's length is a multiple of this."""
TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's tensors in a GGUF -> in transformers."""


@dataclass(frozen=True)
class GenerateRequest:
    prompt: tuple[int, ...]
    tokens: int
    """Number of tokens to generate."""


@dataclass(frozen=True)
class TimedOutput:
    """Hold the outputs of one configuration for some requests, and their times."""

    outputs: tuple[tuple[int, ...], ...]
    """Tokens of each output, as many as were requested."""
    seconds: float
    """Time with prompts included."""
    decode_tokens: int
    decode_seconds: float
    """Tokens generated, and seconds, while all requests were generating."""
    wall_seconds: float = 0.0
    decode_wall_seconds: float = 0.0
    """The same by the wall clock; 0 if not measured."""
    session_steps: int = 0
    """Steps that brought tokens, counted for each request; 0 if not counted."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        """Return the useful tokens per second."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Return the tokens per second between the last first token and the first last one; 0 without such a time."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def by_wall(self) -> TimedOutput:
        """Return the same with times by the wall clock."""
        return replace(self, seconds=self.wall_seconds, decode_seconds=self.decode_wall_seconds)


def total(parts: Sequence[TimedOutput]) -> TimedOutput:
    """Sum up requests that were answered one after another."""
    return TimedOutput(
        outputs=tuple(output for part in parts for output in part.outputs),
        seconds=sum(part.seconds for part in parts),
        decode_tokens=sum(part.decode_tokens for part in parts),
        decode_seconds=sum(part.decode_seconds for part in parts),
        wall_seconds=sum(part.wall_seconds for part in parts),
        decode_wall_seconds=sum(part.decode_wall_seconds for part in parts),
        session_steps=sum(part.session_steps for part in parts),
    )


class ForwardTimestamps(StoppingCriteria):  # type: ignore[misc]
    """Record when each forward pass had its tokens; never stop the generation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times: list[float] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(self._clock())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class HuggingFaceBaseline:
    """Run the target, and the draft if there is one, in transformers."""

    def __init__(self, target: Any, draft: Any = None, clock: Callable[[], float] = time.thread_time) -> None:
        self._target = _without_end(target)
        self._draft = None if draft is None else _without_end(draft)
        self._clock = clock

    @classmethod
    def load(cls, target: Path, draft: Path | None = None) -> HuggingFaceBaseline:
        module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
        return cls(module, None if draft is None else draft_from_gguf(draft))

    def batch(self, requests: Sequence[GenerateRequest], *, static: bool) -> TimedOutput:
        """Generate for all requests in one batch, with a StaticCache of the length needed or a DynamicCache."""
        longest = max(request.tokens for request in requests)
        width = max(len(request.prompt) for request in requests)
        config = self._target.config
        cache: Any = DynamicCache(config=config)
        if static:
            cache = StaticCache(config=config, max_cache_len=-(-(width + longest) // STATIC_STEP) * STATIC_STEP)
        return self._generate(requests, longest, past_key_values=cache)

    def assisted(self, request: GenerateRequest) -> TimedOutput:
        """Generate for one request with assisted decoding by the draft."""
        if self._draft is None:
            raise ValueError("there is no draft to assist: load one")
        return self._generate([request], request.tokens, assistant_model=self._draft)

    @torch.inference_mode()
    def gap(self, known: Sequence[int], tokens: Sequence[int]) -> float:
        """Return how far the logit of the least likely of `tokens` is below the best one, after the tokens `known`."""
        logits = self._target(input_ids=torch.tensor([known])).logits[0, -1]
        return float(logits.max() - logits[list(tokens)].min())

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerateRequest], longest: int, **options: Any) -> TimedOutput:
        ids, mask = (one.to(self._target.device) for one in padded([request.prompt for request in requests]))
        marks = ForwardTimestamps(self._clock)
        began = self._clock()
        out = self._target.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            pad_token_id=PAD,
            stopping_criteria=StoppingCriteriaList([marks]),
            **options,
        )
        seconds = self._clock() - began
        if out.shape[1] != ids.shape[1] + longest:
            raise RuntimeError(f"{out.shape[1] - ids.shape[1]} tokens were generated, must be {longest}")
        rows = out[:, ids.shape[1] :].tolist()
        shortest = min(request.tokens for request in requests)
        last = next(i for i, length in enumerate(marks.lengths) if length >= ids.shape[1] + shortest)
        return TimedOutput(
            outputs=tuple(tuple(row[: request.tokens]) for row, request in zip(rows, requests, strict=True)),
            seconds=seconds,
            decode_tokens=len(requests) * (marks.lengths[last] - marks.lengths[0]),
            decode_seconds=marks.times[last] - marks.times[0],
        )


Answer = Callable[[Sequence[GenerateRequest]], TimedOutput]
"""A function that answers all requests at once."""


@dataclass(frozen=True)
class Workload:
    """Describe requests that every configuration answers."""

    label: str
    requests: Sequence[GenerateRequest]
    together: bool = True
    """Whether they arrive at once, or one after another."""

    def answered(self, answer: Answer) -> TimedOutput:
        return answer(self.requests) if self.together else total([answer([one]) for one in self.requests])


def workloads(ids: Sequence[Sequence[int]], shape: tuple[int, int]) -> dict[str, Workload]:
    """Return the workloads by name. ids: a text for each request. shape: tokens of prompt and output if all are equal.

    The ragged outputs are at most as long; the long prompts are two texts each.
    """
    prompt, output = shape
    equal = [GenerateRequest(tuple(text[:prompt]), output) for text in ids]
    few = equal[:4]
    pairs = zip(ids[: 2 * len(few) : 2], ids[1 : 2 * len(few) : 2], strict=True)
    long = [GenerateRequest((*one, *other), 1) for one, other in pairs]
    size = f"{prompt} + {output} tokens"
    return {
        "equal": Workload(f"{len(equal)} requests of {size}", equal),
        "ragged": Workload(f"{len(ids)} ragged requests, at most {len(ids[0])} + {output} tokens", ragged(ids, output)),
        "few": Workload(f"{len(few)} requests of {size}", few),
        "single": Workload(f"{len(few)} requests of {size}, one at a time", few, together=False),
        "prompts": Workload(
            f"{len(long)} requests of {len(long[0].prompt)} + 1 tokens, one at a time", long, together=False
        ),
    }


def compared(
    engine: Answer, hf: HuggingFaceBaseline, work: Mapping[str, Workload], rounds: int, others: Mapping[str, Answer]
) -> dict[str, dict[str, list[TimedOutput]]]:
    """Print and return the results of the workloads, by their names and by configuration, for each round.

    engine: must find nothing of earlier requests in a cache. others: further configurations by name.
    """
    found = {}
    for name, load in work.items():
        arms: dict[str, Answer] = {"engine": engine, "hf dynamic": partial(hf.batch, static=False)}
        if load.together:
            arms["hf static"] = partial(hf.batch, static=True)
        if name == "single":
            arms["hf assisted"] = lambda requests: total([hf.assisted(request) for request in requests])
        found[name] = in_turn(load, {**arms, **others}, rounds)
        show(load.label, found[name])
    return found


def gaps(
    hf: HuggingFaceBaseline, requests: Sequence[GenerateRequest], ours: TimedOutput, theirs: TimedOutput
) -> list[float]:
    """Return how far apart the target's logits of both tokens are, where an output first differs from the engine's."""
    found = []
    for request, own, other in zip(requests, ours.outputs, theirs.outputs, strict=True):
        if own != other:
            at = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
            found.append(math.inf if at is None else hf.gap((*request.prompt, *own[:at]), (own[at], other[at])))
    return found


def ragged(ids: Sequence[Sequence[int]], output: int) -> list[GenerateRequest]:
    """Return prompts of 32 tokens to whole texts, and independently outputs of an eighth of `output` to all of it."""
    last = len(ids) - 1
    prompts = [round(32 + (len(text) - 32) * i / last) for i, text in enumerate(ids)]
    outputs = [max(1, round(output * (1 + 7 * i / last) / 8)) for i in range(len(ids))]
    Random(0).shuffle(outputs)
    return [GenerateRequest(tuple(text[:p]), n) for text, p, n in zip(ids, prompts, outputs, strict=True)]


def in_turn(load: Workload, arms: Mapping[str, Answer], rounds: int) -> dict[str, list[TimedOutput]]:
    """Run every configuration once per round, beginning with another one each time."""
    found: dict[str, list[TimedOutput]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in rotated(list(arms), number):
            found[name].append(load.answered(arms[name]))
    return found


def among(found: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return the engine and the configurations whose names begin with `kind`."""
    return {name: timed for name, timed in found.items() if name == "engine" or name.startswith(kind)}


def over_best(
    found: Mapping[str, Sequence[TimedOutput]], rate: Callable[[TimedOutput], float] = lambda timed: timed.rate
) -> float:
    """Return the engine's rate over the best of the others in the same round; the median of rounds."""
    others = [timed for name, timed in found.items() if name != "engine"]
    ratios = [rate(ours) / max(map(rate, theirs)) for ours, *theirs in zip(found["engine"], *others, strict=True)]
    return round(statistics.median(ratios), 3)


def show(label: str, found: Mapping[str, Sequence[TimedOutput]]) -> None:
    print(f"\n{label}: tokens/s with the prompts, decode alone, and outputs that are the engine's")
    for name, timed in found.items():
        same = statistics.fmean(a == b for a, b in zip(found["engine"][0].outputs, timed[0].outputs, strict=True))
        decode = spread([t.decode_rate for t in timed]) if timed[0].decode_tokens else "-"
        print(f"  {name:<12} {spread([t.rate for t in timed]):<30} {decode:<30} {same:.0%}", flush=True)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, int64 `[B, longest]`, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _without_end(module: Any) -> Any:
    """Return the model without end tokens, in `generate` and for an assistant."""
    module.generation_config.eos_token_id = None
    return module.eval()


def draft_from_gguf(path: Path) -> Any:
    """Load a Qwen3 draft from a GGUF into transformers, in float32. Raises ValueError for another architecture."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "qwen3":
        raise ValueError(f"{path.name} is of architecture {architecture}, must be qwen3")
    fields = {name.partition(".")[2]: f.contents() for name, f in reader.fields.items() if name.startswith("qwen3.")}
    weights = {
        _name(t.name): torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), dtype=np.float32))
        for t in reader.tensors
    }
    module = Qwen3ForCausalLM(_config(fields, tied="lm_head.weight" not in weights))
    missing, unknown = module.load_state_dict(weights, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path.name} does not fill a Qwen3: missing {missing}, unknown {unknown}")
    module.tie_weights()
    return module


def _config(fields: Mapping[str, Any], *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields["attention.head_count_kv"],
        head_dim=fields["attention.key_length"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
        tie_word_embeddings=tied,
    )


def _name(tensor: str) -> str:
    """Translate a tensor's name, such as `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    first, *rest = tensor.split(".")
    if first in top:
        return ".".join([top[first], *rest])
    layer, kind, suffix = rest
    return f"model.layers.{layer}.{TENSORS[kind]}.{suffix}"
