"""Train heads on the target's own hidden states: the target reads the text, and its heads predict what comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cloud_verifier.distill.training.losses import OutputColumns, sums_of_texts
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.engine.server_draft.head_models import EagleHead, Heads, HeadsShape, load_heads, new_heads
from cloud_verifier.engine.weights import hash_of

UNROLLED = 3
"""Predictions in a row that an EAGLE head is trained on, each from the one before."""
STATES_BYTES = 2 << 30
"""Most memory for hidden states that are kept for the next epoch."""
DECAY = 0.8
"""Weight of each further prediction, as a share of the one before: it counts only where that one was right."""


class HeadsStudent(nn.Module):
    """Heads beside their frozen target. Like `Student`, it compares predictions with the target's distributions.

    target: identity of the target, "sha256:<hex>".
    """

    accepts_loss_kwargs = True

    def __init__(self, module: Any, heads: Heads, target: str) -> None:
        super().__init__()
        self.module = module.eval().requires_grad_(False)
        self.heads = heads
        self.target = target
        self._states: dict[bytes, Tensor] = {}
        """By the tokens that were read, the states from the first label's own on, on the CPU."""
        self._bytes = 0

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.module.eval()
        return self

    def forward(
        self, input_ids: Tensor, labels: Tensor, top_ids: Tensor, top_log_probs: Tensor, tail: Tensor
    ) -> Tensor:
        """Return each text's sums of labelled positions, KL and overlap, `[b, 3]`. The arguments are `collate`'s.

        KL and overlap are means over the predictions of a position, with decayed weights. Positions that nothing
        predicts do not count.
        """
        labelled = labels >= 0
        target = top_ids[labelled], top_log_probs[labelled], tail[labelled]
        columns = OutputColumns(self.module.get_output_embeddings(), target, sampled=self.training)
        numbers = torch.where(labelled, labelled.flatten().cumsum(0).view_as(labels) - 1, -1)
        first = int(labelled.any(0).long().argmax())  # heads see states from the first label's on
        states, ids, numbers = self.read(input_ids, numbers)[:, first:], input_ids[:, first:], numbers[:, first:]
        sums = torch.zeros(3, len(target[0]), device=states.device)
        for level, (predicted, offset, behind) in enumerate(self.predictions(states, ids, numbers, UNROLLED)):
            width = numbers.shape[1]
            at, known = numbers[:, behind + offset :], numbers[:, : width - behind - offset]
            valid = (at >= 0) & (known >= 0)
            number = at[valid]
            kl, overlap = columns.divergence(predicted[:, behind : width - offset][valid], number)
            sums = sums.index_add(1, number, DECAY**level * torch.stack((torch.ones_like(kl), kl, overlap)))
        return sums_of_texts(labelled, sums / torch.where(sums[0] > 0, sums[0], 1.0))

    @torch.no_grad()
    def read(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the target's states `[b, L, H]` at the labels `[b, L]` that are at least 0; others mean nothing."""
        spans = [(int(row.nonzero()[0]), int(row.nonzero()[-1]) + 1) for row in labels >= 0]
        keys = [row[:end].numpy().tobytes() for row, (_, end) in zip(ids.cpu(), spans, strict=True)]
        found = {number: self._states[key] for number, key in enumerate(keys) if key in self._states}
        if missing := [number for number in range(len(keys)) if number not in found]:
            computed = self.module.base_model(input_ids=ids[missing], use_cache=False).last_hidden_state.float()
            for row, number in zip(computed, missing, strict=True):
                first, end = spans[number]
                found[number] = row[first:end].clone()
                if self._bytes < STATES_BYTES:
                    self._states[keys[number]] = found[number].cpu()
                    self._bytes += found[number].nbytes
        states = torch.zeros(*ids.shape, found[0].shape[1], device=ids.device)
        for number, (first, end) in enumerate(spans):
            states[number, first:end] = found[number].to(ids.device)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits `[n, V]` of states `[n, H]` by the target's output layer."""
        layer = self.module.get_output_embeddings()
        logits: Tensor = layer(states.to(layer.weight.dtype)).float()
        return logits

    def predictions(self, states: Tensor, ids: Tensor, labels: Tensor, rounds: int) -> list[tuple[Tensor, int, int]]:
        """Return predicted states `[b, L, H]`, the nearest tokens' first, each with its `offset` and how far `behind`.

        states: the target's, `[b, L, H]`, of the tokens `ids` `[b, L]`, where `labels` are at least 0. rounds: of an
        EAGLE head. A prediction at column c is of the token after column c + offset; all that it knows of the target
        are states up to column c - behind.
        """
        if isinstance(self.heads, EagleHead):
            return self._unrolled(self.heads, states, ids, labels, rounds)
        batch, width, hidden = states.shape
        predicted = self.heads(states.reshape(-1, hidden)).view(-1, batch, width, hidden)
        return [(one, number, 0) for number, one in enumerate(predicted, start=1)]

    def _unrolled(
        self, heads: EagleHead, states: Tensor, ids: Tensor, labels: Tensor, rounds: int
    ) -> list[tuple[Tensor, int, int]]:
        """Return the EAGLE head's predictions, one for each round.

        In the first round every state is the target's own. In the next, the newest one of each position is the head's
        own prediction, and so on, as when it drafts (EAGLE-3, arXiv 2503.01840).
        """
        width = ids.shape[1]
        nexts = torch.cat((ids[:, 1:], ids[:, -1:]), dim=1)  # the last column's is never used
        embeddings = self.module.get_input_embeddings()(nexts).float()
        columns = torch.arange(width, device=ids.device)
        behind = columns[:, None] - columns
        known = (labels >= 0)[:, None]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        predictions: list[tuple[Tensor, int, int]] = []
        for step in range(min(rounds, heads.shape.depth)):
            x, queries, new_keys, new_values = heads.entries(states, embeddings)
            keys.append(new_keys)
            values.append(new_values)
            # Of the target's own states the last `step` ones are not known; instead, each round before gives one.
            own = torch.where(behind >= step, behind, -1)
            later = [torch.where(behind == step - number, step - number, -1) for number in range(1, step + 1)]
            distance = torch.cat([own, *later], dim=1)[None]
            seen = known.repeat(1, 1, step + 1) | (distance == 0)
            attended = heads.attend(queries, torch.cat(keys, 1), torch.cat(values, 1), distance, seen)
            predicted = heads.finish(x, attended)
            predictions.append((predicted, 1, step))
            states = torch.cat((states[:, :1], predicted[:, :-1]), dim=1)
        return predictions


def load_heads_student(plan: TrainingPlan) -> HeadsStudent:
    """Load the plan's target, and the heads to train: those of its base, or new ones if that is the target's folder.

    Raises ModelRefused, OSError and ValueError.
    """
    module, target = load_target(plan.tokenizer)
    hidden = check_states(module)
    if plan.base.is_file():
        heads = load_heads(plan.base, target, hidden)
    else:
        heads = new_heads(HeadsShape(hidden=hidden, **(plan.heads or {})), plan.seed)
    return HeadsStudent(module, heads, target)


def load_target(folder: Path) -> tuple[Any, str]:
    """Return a target's module in float32, and its identity, "sha256:<hex>". Raises ModelRefused and OSError."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module.set_attn_implementation("sdpa")
    return module, f"sha256:{hash_of(folder)}"


@torch.no_grad()
def check_states(module: Any) -> int:
    """Return H, the size of the hidden states that the output layer reads. Raises ValueError if those are not the last
    layer's, normalised: then the heads would not see what the verifier gives them."""
    seen: list[Tensor] = []
    hook = module.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.arange(4)[None]
    try:
        module(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    states = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if seen[0].shape != states.shape or not torch.allclose(seen[0], states, rtol=1e-3, atol=1e-4):
        raise ValueError(f"{type(module).__name__} changes its hidden states before the output layer: no heads for it")
    return int(states.shape[-1])
