"""The tree decoder: a committed sequence, and above it a tree of draft nodes that llama.cpp has evaluated."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

from outrider.core.errors import BadRequest, InternalError, Overloaded
from outrider.llama import nodes
from outrider.llama.adapter import LoraAdapter
from outrider.llama.batch import Batch
from outrider.llama.context import MAX_SEQUENCES, LlamaContext, Logits, parameters
from outrider.llama.library import library
from outrider.llama.model import LlamaModel
from outrider.llama.nodes import TIP, Node
from outrider.llama.sequences import Sequences


class TreeFull(Overloaded):
    """No KV cells or sequence ids for these nodes; nothing was changed. Commit or drop the tree first."""


class ContextFull(BadRequest):
    """A committed sequence that does not fit into the context; nothing was changed."""


class TreeContext(LlamaContext):
    """One llama.cpp context, owned by the thread that made it. Use as a context manager.

    llama.cpp aborts the process on bad ids, positions and counts, so all of them are checked here first.
    Every node needs a KV cell (n_ctx in all, with the committed tokens) and every leaf a sequence id (max_sequences).
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int,
        max_sequences: int = 64,
        batch: int = 512,
        threads: int | None = None,
        kv_type: Literal["f16", "f32"] = "f16",
    ) -> None:
        """n_ctx: tokens, committed and draft. batch: tokens per prefill chunk. Raises BadRequest, ModelRefused."""
        _within("n_ctx", n_ctx, 1, model.n_ctx_train)
        _within("max_sequences", max_sequences, 1, MAX_SEQUENCES)
        _within("batch", batch, max_sequences, 1 << 16)
        threads = model.threads if threads is None else threads
        _within("threads", threads, 1, os.cpu_count() or 1)
        if kv_type not in ("f16", "f32"):
            raise BadRequest.bound("kv_type", kv_type, "f16 or f32")
        params = parameters(cells=n_ctx, sequences=max_sequences, batch=batch, threads=threads)
        params.kv_unified = True  # branches share their ancestors' cells
        params.type_k = params.type_v = library().GGML_TYPE_F32 if kv_type == "f32" else library().GGML_TYPE_F16
        super().__init__(model, params)
        self._owner = threading.get_ident()
        self._n_ctx = n_ctx
        self._chunk = batch
        self._sequences = Sequences(self._lib.llama_get_memory(self._context), max_sequences)
        self._batch = Batch(batch)
        self._tokens: list[int] = []
        self._nodes: dict[int, Node] = {}  # in order of their making, so parents first; TIP included
        self._next = 1

    # --- what it holds

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._tokens)

    @property
    def tree_size(self) -> int:
        """Draft nodes held above the committed tokens."""
        return max(0, len(self._nodes) - 1)

    @property
    def room(self) -> int:
        """Tokens or nodes that still fit."""
        return self._n_ctx - self.length - self.tree_size

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    # --- what it does

    def reset(self, tokens: Sequence[int]) -> Logits:
        """Make `tokens` the committed sequence and return the logits `[V]` after the last one; the tree is dropped.

        What it shares with the sequence held is not evaluated again, but for the last token.
        Raises BadRequest (empty, id outside the vocabulary) or ContextFull before anything changes.
        """
        self._check_owner()
        if len(tokens) == 0:
            raise BadRequest.bound("tokens", "empty", "at least one token (llama.cpp has no logits before the first)")
        self._check_tokens(tokens)
        self._check_fits(len(tokens))
        shared = min(_common_prefix(self._tokens, tokens), len(tokens) - 1)
        self._cut(shared)
        return self._extend(tokens[shared:])

    def decode(self, parents: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], Logits]:
        """Evaluate n new nodes in one pass: node i carries `tokens[i]` and is a child of the handle `parents[i]`.

        Parent 0 is the last committed token; other parents are handles from earlier calls, not from this one.
        Returns n new handles (never used twice) and a copy of the logits `[n, V]`.
        Raises TreeFull, or BadRequest (unknown parent, id outside the vocabulary), before anything changes.
        """
        self._check_owner()
        if len(parents) != len(tokens) or len(tokens) == 0:
            raise BadRequest.bound("tokens", f"{len(tokens)} for {len(parents)} parents", "as many, at least one")
        self._check_tokens(tokens)
        forks = nodes.forks_needed(self._nodes, parents)
        if len(tokens) > self.room:
            raise TreeFull(f"{len(tokens)} nodes need as many KV cells, {self.room} of {self._n_ctx} are free")
        if forks > self._sequences.free:
            raise TreeFull(f"{len(tokens)} nodes need {forks} sequence ids, {self._sequences.free} are free")
        new = [self._place(parent, token) for parent, token in zip(parents, tokens, strict=True)]
        self._run(self._batch.nodes(tokens, [node.position for node in new], [node.sequence for node in new]))
        handles = list(range(self._next, self._next + len(new)))
        self._next += len(new)
        self._nodes.update(zip(handles, new, strict=True))
        return handles, self._logits(len(new))

    def commit(self, path: Sequence[int], tail: Sequence[int] = ()) -> Logits | None:
        """Accept the nodes of `path` (a chain of handles from the tip down, possibly empty), then the tokens of `tail`.

        Without a tail, descendants of the path's last node survive under their handles, evaluated as they are, and
        its children are children of 0 from now on; nothing is decoded and None is returned. A tail is not in the
        tree: the whole tree is dropped, the tail is evaluated, and the logits `[V]` after its last token are returned.
        Raises BadRequest (not a chain, id outside the vocabulary), ContextFull, before anything changes.
        """
        self._check_owner()
        nodes.check_path(self._nodes, path)
        self._check_tokens(tail)
        self._check_fits(self.length + len(path) + len(tail))
        if len(path) > 0:
            self._move_tip(path)
        if len(tail) == 0:
            return None
        self._cut(self.length)
        return self._extend(tail)

    def drop_tree(self) -> None:
        """Forget all draft nodes; the committed tokens stay."""
        self._check_owner()
        self._cut(self.length)

    def clear(self) -> None:
        """Forget everything."""
        self._check_owner()
        self._forget()

    def adapt(self, adapter: LoraAdapter | None, scale: float = 1.0) -> None:
        """As for every context; all tokens and nodes are forgotten, since they were evaluated with other weights."""
        self._check_owner()
        super().adapt(adapter, scale)
        self._forget()

    # --- how: nodes and sequences

    def _place(self, parent: int, token: int) -> Node:
        """Give a new node its position and sequence: the parent's own for its first child, a fork for the others."""
        above = self._nodes[parent]
        position = above.position + 1
        sequence = self._sequences.fork(above.sequence, position) if above.continued else above.sequence
        above.continued = True
        return Node(parent, position, sequence, token)

    def _move_tip(self, path: Sequence[int]) -> None:
        """Root the tree at the path's last node and free the branches that do not descend from it.

        The new tip's sequence holds the committed tokens, the path and, if `continued`, one branch below it: it
        becomes the committed sequence as it is. Nothing is copied.
        """
        committed = self.length
        before = nodes.sequences(self._nodes)
        self._tokens.extend(self._nodes[handle].token for handle in path)
        self._nodes = nodes.rerooted(self._nodes, path[-1])
        for sequence in before - nodes.sequences(self._nodes):
            self._sequences.release(sequence, committed)

    def _cut(self, length: int) -> None:
        """Keep the first `length` committed tokens and nothing else."""
        if length == 0:
            self._forget()
            return
        tip = self._nodes[TIP]
        if self.tree_size == 0 and length == self.length:
            return
        self._sequences.truncate(tip.sequence, length, nodes.sequences(self._nodes))
        del self._tokens[length:]
        self._nodes = {TIP: Node(TIP, length - 1, tip.sequence, self._tokens[-1])}

    def _extend(self, tokens: Sequence[int]) -> Logits:
        """Evaluate `tokens` above the committed ones, where no tree is; returns the logits `[V]` after the last."""
        sequence = self._nodes[TIP].sequence if self._nodes else self._sequences.take()
        for first in range(0, len(tokens), self._chunk):
            chunk = tokens[first : first + self._chunk]
            last = first + len(chunk) == len(tokens)
            self._run(self._batch.run(chunk, self.length + first, sequence, last_wanted=last))
        self._tokens.extend(tokens)
        self._nodes = {TIP: Node(TIP, self.length - 1, sequence, self._tokens[-1])}
        row: Logits = self._logits(1)[0]
        return row

    def _forget(self) -> None:
        self._sequences.clear()
        self._tokens = []
        self._nodes = {}

    # --- how: llama.cpp

    def _run(self, batch: Any) -> None:
        code = self._lib.llama_decode(self._context, batch)
        if code != 0:
            self._forget()  # parts of the batch may be in the cache
            raise InternalError(f"llama_decode returned {code} for a checked batch; the context is empty, reset it")

    # --- how: checks

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise InternalError("a TreeContext belongs to the thread that made it; two at once would abort the process")
        if not self._context:
            raise InternalError("the TreeContext is closed")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab), None)
        if wrong is not None:
            raise BadRequest.bound("tokens", wrong, f"an id between 0 and {self._vocab - 1}")

    def _check_fits(self, length: int) -> None:
        if length > self._n_ctx:
            raise ContextFull(f"{length} tokens do not fit into a context of {self._n_ctx}", field="tokens")

    # --- its life

    def close(self) -> None:
        """Free the context, on its owner's thread. Closing twice is harmless."""
        if self._context:
            self._check_owner()
        super().close()


def _common_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(held, wanted, strict=False)):
        if a != b:
            return i
    return min(len(held), len(wanted))


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest.bound(field, value, f"between {low} and {high}")
