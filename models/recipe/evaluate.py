"""Everything the model card says in numbers, measured on what no model was trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from cloud_verifier.distill.gguf.eval_gguf import CHAIN, steps
from models.recipe import card, corpus, parity, prompts, tokenizer
from models.recipe.decoder import Decoder
from models.recipe.export import DRAFTS
from models.recipe.generate import END_ID, choose
from models.recipe.ngram import KneserNey
from models.recipe.settings import ALL_KINDS, SPECIAL_TOKENS, Job
from models.recipe.target import load_model
from models.recipe.windows import load_documents, load_tokens
from outrider.llama.model import LlamaModel
from outrider.llama.tree_context import TreeContext

CLASSES = {"code": ("code",), "arithmetic": ("math",), "chat": ("chat_code", "chat_math")}
TEXT_TOKENS = 96
TEMPERATURE = 0.8
_WINDOW, _STRIDE = 1024, 512
_PROBES = 20_000

LogProbs = Callable[[NDArray[np.int64]], NDArray[np.float64]]
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """Holds what the target wrote after a prompt, and its logits at every token written."""

    prompt: prompts.Prompt
    prompt_ids: list[int]
    written: list[int]
    logits: Logits


def build(job: Job) -> None:
    """Write ``evaluate/results.json`` and the model card ``evaluate/README.md``."""
    folder = job.stage("evaluate")
    target = load_model(job.stage("target") / "model").to(job.device)
    vocabulary = tokenizer.load(job)
    results: dict[str, Any] = {"bits_per_byte": bits_per_byte(job, target)}
    greedy = write_samples(target, vocabulary, 0.0, job.seed)
    sampled = write_samples(target, vocabulary, TEMPERATURE, job.seed)
    results["acceptance"] = {
        stage: acceptance(job.stage("export") / name, greedy, sampled) for stage, name in DRAFTS.items()
    }
    texts = parity.probe_texts([item.text for item in corpus.load(job) if item.split == "heldout"], _PROBES, job.seed)
    results["tokenizer"] = {
        "probes": len(texts),
        "mismatches": parity.count_mismatches(job.stage("export") / DRAFTS["draft"], vocabulary, texts),
    }
    results["repetitive"] = sum(is_repetitive(sample.written) for sample in greedy) / len(greedy)
    results |= {"text_tokens": TEXT_TOKENS, "chain": CHAIN, "temperature": TEMPERATURE}
    results["samples"] = [_shown(sample, vocabulary, "greedy") for sample in greedy[:6]]
    results["samples"] += [_shown(sample, vocabulary, f"temperature {TEMPERATURE}") for sample in sampled[6:12]]
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (folder / "README.md").write_text(card.render(job, results), encoding="utf-8")
    (folder / "done.json").write_text("{}", encoding="utf-8")


def bits_per_byte(job: Job, target: Qwen3ForCausalLM) -> dict[str, dict[str, float]]:
    """Return held-out bits per byte by model and class of text."""
    tokens = job.stage("tokens")
    stream = np.concatenate([load_tokens(tokens, kind, "train") for kind in ALL_KINDS])
    models: dict[str, LogProbs] = {"5-gram": KneserNey(stream).log_probs, "target": _scorer(target)}
    for stage in DRAFTS:
        models[stage] = _scorer(load_model(job.stage(stage) / "model").to(job.device))
    sizes = _heldout_bytes(job)
    results: dict[str, dict[str, float]] = {}
    for name, log_probs in models.items():
        results[name] = {}
        for label, kinds in CLASSES.items():
            documents = [item for kind in kinds for item in load_documents(tokens, kind, "heldout")]
            nats = -sum(float(log_probs(np.insert(item.astype(np.int64), 0, END_ID)).sum()) for item in documents)
            results[name][label] = nats / math.log(2) / sum(sizes[kind] for kind in kinds)
        print(f"bits per byte, {name}: {results[name]}", flush=True)
    return results


@torch.inference_mode()
def write_samples(target: Qwen3ForCausalLM, vocabulary: Tokenizer, temperature: float, seed: int) -> list[Sample]:
    """Let the target continue every held-out prompt, one at a time as a verifier would."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for prompt in prompts.load("heldout"):
        ids = prompt.ids(vocabulary)
        decoder = Decoder(target, 1, len(ids) + TEXT_TOKENS)
        step = torch.tensor([ids], device=target.device)
        written: list[int] = []
        rows: list[Logits] = []
        while len(written) < TEXT_TOKENS and written[-1:] != [END_ID]:
            row = decoder.forward(step)
            step = choose(row.log_softmax(-1), temperature, generator)
            written.append(int(step))
            rows.append(row[0].cpu().numpy())
        samples.append(Sample(prompt, ids, written, np.stack(rows)))
    return samples


def acceptance(gguf: Path, greedy: Sequence[Sample], sampled: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Measure the quantised file itself, by class of prompt.

    ``greedy``: share of positions of the target's greedy text where the draft's first choice is the target's.
    ``tokens_per_step``: tokens per target step on that text, with a chain of ``CHAIN`` draft tokens in every step.
    ``sampled``: mean of ``sum min(p, q)`` over the target's text at ``TEMPERATURE``, both at that temperature.
    """
    results: dict[str, dict[str, float]] = {}
    with LlamaModel.load(gguf) as model, TreeContext(model, n_ctx=1024) as context:
        for label in (*CLASSES, "all"):
            agreed, overlaps = [], []
            for sample in greedy:
                if label in ("all", sample.prompt.kind):
                    agreed.append(_draft_logits(context, sample).argmax(1) == np.array(sample.written))
            for sample in sampled:
                if label in ("all", sample.prompt.kind):
                    p, q = _softmax(sample.logits), _softmax(_draft_logits(context, sample))
                    overlaps.append(np.minimum(p, q).sum(1))
            results[label] = {
                "greedy": float(np.concatenate(agreed).mean()),
                "tokens_per_step": sum(map(len, agreed))
                / sum(steps((~row).astype(np.int8), CHAIN, 1) for row in agreed),
                "sampled": float(np.concatenate(overlaps).mean()),
            }
    print(f"acceptance, {gguf.name}: {results}", flush=True)
    return results


def is_repetitive(tokens: Sequence[int], share: float = 0.3) -> bool:
    """Tell whether more than ``share`` of a text's 4-grams occurred in it before."""
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > share


def _draft_logits(context: TreeContext, sample: Sample) -> Logits:
    """Return the draft's logits at every token of the sample, fed with the target's text."""
    rows = [context.reset(sample.prompt_ids)]
    parent = 0
    for token in sample.written[:-1]:
        (parent,), logits = context.decode([parent], [token])
        rows.append(logits[0])
    return np.stack(rows)


def _softmax(logits: Logits) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / TEMPERATURE
    weights = np.exp(scaled - scaled.max(1, keepdims=True))
    normalised: NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
    return normalised


def _scorer(model: Qwen3ForCausalLM) -> LogProbs:
    """Score long documents in overlapping windows: every token sees at least half a window before it."""

    @torch.inference_mode()
    def log_probs(ids: NDArray[np.int64]) -> NDArray[np.float64]:
        scores: list[NDArray[np.float64]] = []
        done = 1  # the first token is given
        while done < len(ids):
            start = max(0, done - _STRIDE) if done > 1 else 0
            window = torch.from_numpy(ids[start : start + _WINDOW])[None].to(model.device)
            rows = model(input_ids=window[:, :-1]).logits[0, done - start - 1 :].log_softmax(-1)
            right = window[0, done - start :, None]
            scores.append(rows.gather(1, right)[:, 0].double().cpu().numpy())
            done = start + window.shape[1]
        return np.concatenate(scores)

    return log_probs


def _heldout_bytes(job: Job) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in corpus.load(job):
        if item.split == "heldout":
            text = item.text
            for special in SPECIAL_TOKENS:
                text = text.replace(special, "")
            sizes[item.kind] = sizes.get(item.kind, 0) + len(text.encode())
    return sizes


def _shown(sample: Sample, vocabulary: Tokenizer, how: str) -> dict[str, str]:
    written = vocabulary.decode(sample.written, skip_special_tokens=True)
    return {"kind": sample.prompt.kind, "how": how, "prompt": sample.prompt.text, "text": written}
