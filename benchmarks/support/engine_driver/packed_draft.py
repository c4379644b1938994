"""Run a draft model beside the target: chains for all sessions at once, one packed forward for each depth.

What co-located speculation costs, with nothing of the verifier's own way left out that would make it cheaper: keys and
values stay from step to step, accepted tokens are not read again, and the host waits for the device once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cloud_verifier.engine.batch import PackedBatch, Segment
from cloud_verifier.engine.kv_pool import KVPool, SlotTable
from cloud_verifier.engine.model import TargetModel

READ_ROWS = 4_096
"""Of one forward; prompts that come at once are read in several."""


@dataclass(frozen=True)
class DraftRequest:
    """A session that wants draft tokens."""

    name: str
    known: Sequence[int]
    """Prompt and output; at least one token."""
    chain: Sequence[int]
    """What it shall be taken to have drafted."""


@dataclass
class _Held:
    """A session's sequence as the draft has it."""

    table: SlotTable = field(default_factory=SlotTable)
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0
    """Of them known to be the session's."""


class PackedDraft:
    """One draft model and its own pool. `forwards` and `rows` count what it computed."""

    def __init__(self, model: TargetModel, slots: int) -> None:
        self._model = model
        self._pool = KVPool(model.layers, slots, dtype=model.torch_dtype, device=model.device)
        self._held: dict[str, _Held] = {}
        self.forwards = 0
        self.rows = 0

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        """A session starts, or starts again; of what is held under this name its prompt stays."""
        held = self._held.setdefault(name, _Held())
        keep = len(prompt) if held.tokens[: len(prompt)] == list(prompt) else 0
        self._truncate(held, keep)
        held.agreed = keep

    def propose(self, wishes: Sequence[DraftRequest]) -> list[int]:
        """Draft as many tokens for each as its chain has, one forward per depth; the tokens found, depth by depth.

        They are computed and brought to the host as proposals would be. What is fed for the next depth, and so stays in
        the cache should it be accepted, are the chain's: random weights agree with nothing.
        """
        found = [self._feed([(self._held[wish.name], self._unread(wish)) for wish in wishes])] if wishes else []
        for depth in range(1, max((len(wish.chain) for wish in wishes), default=0)):
            deeper = [wish for wish in wishes if len(wish.chain) > depth]
            found.append(self._feed([(self._held[wish.name], wish.chain[depth - 1 : depth]) for wish in deeper]))
        return torch.cat(found).tolist() if found else []

    def _unread(self, wish: DraftRequest) -> Sequence[int]:
        """Keep of what was drafted what came true; the known tokens after it, at least the last one."""
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
        """int64 `[n]`, on the device: the best token after each."""
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
