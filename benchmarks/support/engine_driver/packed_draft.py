"""Run a draft model beside the target: chains for all sessions at once, one packed forward for each depth.

It saves what the verifier's own server draft would: keys and values stay from step to step, accepted tokens are not
read again, and the host waits for the device once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, SlotTable
from cloud_verifier.engine.torch_backend.model import TargetModel

READ_ROWS = 4_096
"""Most rows of one forward pass; prompts that arrive together are read in several."""


@dataclass(frozen=True)
class DraftRequest:
    """Describe a session that wants draft tokens."""

    name: str
    known: Sequence[int]
    """Prompt and output; at least one token."""
    chain: Sequence[int]
    """Draft tokens to act as if the draft had proposed them."""


@dataclass
class _Held:
    """Hold the tokens of a session that are in the draft's cache."""

    table: SlotTable = field(default_factory=SlotTable)
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0
    """Number of its first tokens that are known to be the session's."""


class PackedDraft:
    """Run one draft model with its own pool. `forwards` and `rows` count its work."""

    def __init__(self, model: TargetModel, slots: int) -> None:
        self._model = model
        self._pool = KVPool(model.layers, slots, dtype=model.torch_dtype, device=model.device)
        self._held: dict[str, _Held] = {}
        self.forwards = 0
        self.rows = 0

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        """Begin a session, or begin it again; keep the prompt if it is in the cache under this name."""
        held = self._held.setdefault(name, _Held())
        keep = len(prompt) if held.tokens[: len(prompt)] == list(prompt) else 0
        self._truncate(held, keep)
        held.agreed = keep

    def propose(self, wishes: Sequence[DraftRequest]) -> list[int]:
        """Draft as many tokens for each as its chain has, one forward pass per depth; return them depth by depth.

        They are computed and brought to the host as proposals would be. What is fed for the next depth, and so stays in
        the cache should it be accepted, are the chain's: random weights agree with nothing.
        """
        found = [self._feed([(self._held[wish.name], self._unread(wish)) for wish in wishes])] if wishes else []
        for depth in range(1, max((len(wish.chain) for wish in wishes), default=0)):
            deeper = [wish for wish in wishes if len(wish.chain) > depth]
            found.append(self._feed([(self._held[wish.name], wish.chain[depth - 1 : depth]) for wish in deeper]))
        return torch.cat(found).tolist() if found else []

    def _unread(self, wish: DraftRequest) -> Sequence[int]:
        """Keep the drafted tokens that came true; return the known tokens after them, at least the last one."""
        held, known = self._held[wish.name], wish.known
        keep = held.agreed
        while keep < min(len(held.tokens), len(known) - 1) and held.tokens[keep] == known[keep]:
            keep += 1
        keep = min(keep, len(known) - 1)
        self._truncate(held, keep)
        held.agreed = len(known)
        return known[keep:]

    def _truncate(self, held: _Held, length: int) -> None:
        self._pool.release(held.table.truncate(length))
        del held.tokens[length:]

    def _feed(self, feeds: Sequence[tuple[_Held, Sequence[int]]]) -> torch.Tensor:
        """Feed tokens; return the best token after each feed, int64 `[n]`, on the device."""
        found: list[torch.Tensor] = []
        waiting: list[tuple[_Held, Sequence[int]]] = []
        rows = 0
        for held, tokens in feeds:
            if waiting and rows + len(tokens) > READ_ROWS:
                found.append(self._forward(waiting))
                waiting, rows = [], 0
            waiting.append((held, tokens))
            rows += len(tokens)
        return torch.cat([*found, self._forward(waiting)])

    def _forward(self, feeds: Sequence[tuple[_Held, Sequence[int]]]) -> torch.Tensor:
        segments = [self._segment(held, tokens) for held, tokens in feeds]
        batch = PackedBatch.pack(segments, self._model.device)
        logits = self._model.forward(batch, self._model.attention.plan(segments, self._pool))
        for (held, tokens), segment in zip(feeds, segments, strict=True):
            held.table.extend(segment.slots)
            held.tokens += tokens
        self.forwards += 1
        self.rows += batch.input_ids.shape[1]
        return logits.argmax(dim=-1)

    def _segment(self, held: _Held, tokens: Sequence[int]) -> Segment:
        start, rows = len(held.table), len(tokens)
        return Segment(
            tokens=np.asarray(tokens, dtype=np.int64),
            chain=rows,
            parents=np.empty(0, dtype=np.int64),
            positions=np.arange(start, start + rows, dtype=np.int64),
            prefix=held.table.slots,
            slots=self._pool.allocate(rows),
            wants_logits=True,
        )
