"""Cut a target down to a draft that can be trained: fewer layers, and a narrower residual stream.

The residual stream is projected on the leading directions of its covariance, as in SliceGPT (arXiv 2401.15024), and the
weights of the norms go into the matrices behind them. Of the layers only some are kept, with all of their heads.
Embeddings lose their mean: the output's softmax does not see it, and without it they bear quantization in blocks.

    python -m models.recipe.start --target DIR --dataset DIR --out DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cloud_verifier.distill.data.texts import TRAIN, Text, load_texts

WIDTH, LAYERS = 288, (0, 1, 28, 29)
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
    """Write the draft to start from."""
    parser = argparse.ArgumentParser(prog="python -m models.recipe.start", description=__doc__.partition("\n")[0])
    for name, text in (("target", "its folder"), ("dataset", "folder of a dataset"), ("out", "folder to write")):
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    options = parser.parse_args()
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    sliced(target, load_texts(options.dataset / TRAIN), WIDTH, LAYERS).save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.target).save_pretrained(options.out)


if __name__ == "__main__":
    main()
