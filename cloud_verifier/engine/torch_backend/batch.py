"""Pack one step's rows: every session's segment one after another in a single sequence of ids, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.torch_backend.kv_pool import Slots

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Segment:
    """Holds one session's n rows of one step: a chain of known tokens, then nodes of its tree.

    The chain begins after the tokens whose keys and values are computed. The nodes are below its last row.
    """

    tokens: Ints
    """`[n]`: chain, then nodes."""
    chain: int
    """Number of the rows that are the chain; at least 1."""
    parents: Ints
    """`[n - chain]`: the row of each node's parent in this segment, at least `chain - 1` and smaller than its own."""
    positions: Ints
    """`[n]`: positions in the sequence, the prompt included."""
    prefix: Slots
    """`[start]`: slots of the positions before the chain."""
    slots: Slots
    """`[n]`: slots for the rows' keys and values."""
    wants_logits: bool
    """Whether the chain reaches the last known token: then its last row and every node need logits."""
    scored: range = range(0)
    """Rows of the chain, its last known token's excepted, that need logits besides: they score tokens of a prompt."""

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def start(self) -> int:
        """Return the position of the first row, which is the number of keys before it."""
        return len(self.prefix)

    def visible(self, begin: int = 0, end: int | None = None) -> NDArray[np.bool_]:
        """Return `[end - begin, end]`: which of the rows before `end` each row from `begin` on sees.

        That is itself, its ancestors, and the chain up to it. begin: a row of the chain. By default all rows, `[n, n]`.
        """
        end = self.rows if end is None else end
        chain = min(self.chain, end)
        seen = np.zeros((end - begin, end), dtype=np.bool_)
        if chain > begin:
            seen[: chain - begin, :chain] = np.tri(chain - begin, chain, begin, dtype=np.bool_)
        for row, parent in enumerate(self.parents[: end - chain].tolist(), start=chain):
            seen[row - begin] = seen[parent - begin]
            seen[row - begin, row] = True
        return seen


@dataclass(frozen=True)
class PackedBatch:
    """Holds a step's segments as tensors for the model: T rows, and logits for R of them.

    input_ids, position_ids: int64 `[1, T]`. logit_rows: int64 `[R]`, the rows out of T whose logits are needed.
    logit_starts: for each segment an index among the R: that of its chain's end, which its nodes follow. The rows that
    score its prompt come just before.
    """

    segments: tuple[Segment, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    logit_starts: tuple[int, ...]

    @classmethod
    def pack(cls, segments: Sequence[Segment], device: torch.device | str = "cpu") -> PackedBatch:
        """Concatenate the segments and copy the tensors to the device."""
        wanted: list[int] = []
        starts: list[int] = []
        offset = 0
        for segment in segments:
            wanted += (offset + row for row in segment.scored)
            starts.append(len(wanted))
            if segment.wants_logits:
                wanted += range(offset + segment.chain - 1, offset + segment.rows)
            offset += segment.rows
        return cls(
            tuple(segments),
            _tensor([segment.tokens for segment in segments], device)[None],
            _tensor([segment.positions for segment in segments], device)[None],
            _tensor([np.array(wanted, dtype=np.int64)], device),
            tuple(starts),
        )


def _tensor(parts: Sequence[Ints], device: torch.device | str) -> torch.Tensor:
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    copied = torch.from_numpy(joined)
    if torch.device(device).type != "cuda":
        return copied.to(device)
    return copied.pin_memory().to(device, non_blocking=True)  # else the host would wait for the forward pass before
