"""Cut a target down to a draft that can be trained: fewer layers, and a narrower residual stream.

The residual stream is projected on the leading directions of its covariance, as in SliceGPT (arXiv 2401.15024), and the
weights of the norms go into the matrices behind them. Of the layers only some are kept, with all of their heads.
Embeddings lose their mean: the output's softmax does not see it, and without it they bear quantization in blocks.

    python -m models.recipe.start --target DIR --run DIR --traffic DIR
    python -m models.recipe.start --target DIR --run DIR --quantized FILE.gguf

The first form also plans the training of heads on the target, in `heads/` of the run. The second form plans a short
training in `finetuned/`: the embeddings of the exported file stay as they were quantized, and the other weights learn
to make up for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cloud_verifier.distill.dataset import DatasetPlan, build
from cloud_verifier.distill.run_folder import DATASET
from cloud_verifier.distill.texts import TRAIN, Text, load_texts
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.engine.weights import hash_of
from cloud_verifier.traffic.log import TrafficLog

WIDTH, LAYERS = 288, (0, 1, 28, 29)
DATA: dict[str, Any] = {
    "tokens": 5_000_000,
    "heldout_tokens": 50_000,
    "heldout_share": 0.03,
    "validation_share": 0.03,
    "top": 16,
}
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-3,
    "train_embeddings": True,
    "weight_decay": 0.01,
    "base_share": 0.0,
    "warmup_steps": 60,
    "decay_share": 0.7,
    "batch_tokens": 2_048,
    "micro_tokens": 4_096,
    "measure_steps": 150,
}
FINE_TUNING = TRAINING | {"learning_rate": 4e-4, "train_embeddings": False, "weight_decay": 0.0}
HEADS = TRAINING | {
    "heads": {"kind": "eagle", "width": 512},
    "minutes": 85.0,
    "micro_tokens": 1_024,  # a forward pass has logits of the target and of six positions ahead: 5 GB of memory
    "measure_steps": 100,
}
READ = 24
"""Texts whose hidden states give the covariance."""


@torch.no_grad()
def sliced(target: LlamaForCausalLM, texts: Sequence[Text], width: int, layers: Sequence[int]) -> LlamaForCausalLM:
    """Return a Llama of `width` and as many layers as chosen, in float32. texts: what the target writes."""
    config = target.config
    seen = torch.bincount(
        torch.cat([torch.from_numpy(one.tokens).long() for one in texts]), minlength=config.vocab_size
    )
    frequency = seen / seen.sum()
    embeddings = target.model.embed_tokens.weight
    embeddings = embeddings - frequency @ embeddings
    outputs = embeddings * target.model.norm.weight
    weight = frequency.clamp_min(1e-6).sqrt()[:, None]
    spread = [embeddings * weight, outputs * weight, outputs * weight]
    read: list[list[Tensor]] = [[] for _ in layers]
    for text in texts[:READ]:
        states = target(torch.from_numpy(text.tokens).long()[None], output_hidden_states=True).hidden_states
        for mine, number in zip(read, layers, strict=True):
            mine.append(states[number][0] / states[number][0].norm(dim=1, keepdim=True))
    spread += [torch.cat(mine) for mine in read]
    covariance = sum((one.double().T @ one.double()) / one.double().square().sum() for one in spread)
    basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :width].float()
    scale = (config.hidden_size / width) ** 0.5  # a norm divides by the mean square over fewer dimensions
    draft = LlamaForCausalLM(
        LlamaConfig(**{**config.to_dict(), "hidden_size": width, "num_hidden_layers": len(layers), "dtype": "float32"})
    )
    draft.model.embed_tokens.weight.copy_(embeddings @ basis)
    for new, number in zip(draft.model.layers, layers, strict=True):
        old = target.model.layers[number]
        for norm, matrices in ((old.input_layernorm, "qkv"), (old.post_attention_layernorm, ("gate", "up"))):
            for name in matrices:
                one, into = (layer.self_attn if name in "qkv" else layer.mlp for layer in (old, new))
                read_from = getattr(one, f"{name}_proj").weight * norm.weight
                getattr(into, f"{name}_proj").weight.copy_(read_from @ basis * scale)
        new.self_attn.o_proj.weight.copy_(basis.T @ old.self_attn.o_proj.weight)
        new.mlp.down_proj.weight.copy_(basis.T @ old.mlp.down_proj.weight)
    tied = embeddings @ basis  # the output layer is the embeddings: its norm's weight is a least-squares fit
    draft.model.norm.weight.copy_(((outputs @ basis) * tied).sum(0) / tied.square().sum(0) * scale)
    return draft


def main() -> None:
    """Write a run's folder: its dataset, the draft to start from, and its plan."""
    parser = argparse.ArgumentParser(prog="python -m models.recipe.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="its folder")
    parser.add_argument("--run", type=Path, required=True, help="folder to write, for `outrider-distill train`")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--traffic", help="the traffic log")
    given.add_argument("--quantized", type=Path, help="the file that the run's first training led to")
    parser.add_argument("--minutes", type=float, default=95.0, help="of training [default: %(default)s]")
    options = parser.parse_args()
    run: Path = options.run
    folders = {"tokenizer": options.target, "dataset": run / DATASET}
    if options.quantized:
        TrainingPlan(base=options.quantized, **folders, minutes=options.minutes, **FINE_TUNING).write(run / "finetuned")
        return
    plan = DatasetPlan(weights_hash=f"sha256:{hash_of(options.target)}", **DATA)
    card = build(TrafficLog(options.traffic), run / DATASET, plan, time.time())
    print(f"{card.train_tokens} tokens to learn from, held-out sessions {card.heldout_sessions}")
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    draft = sliced(target, load_texts(run / DATASET / TRAIN), WIDTH, LAYERS)
    draft.save_pretrained(run / "start")
    AutoTokenizer.from_pretrained(options.target).save_pretrained(run / "start")
    TrainingPlan(base=run / "start", **folders, minutes=options.minutes, **TRAINING).write(run)
    TrainingPlan(base=options.target, **folders, **HEADS).write(run / "heads")


if __name__ == "__main__":
    main()
