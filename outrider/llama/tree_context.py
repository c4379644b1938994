"""Decode trees: a committed sequence, and above it a tree of draft nodes that llama.cpp has evaluated."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import TOO_LONG, BadRequest, InternalError, Overloaded, between
from outrider.llama.context import MAX_SEQUENCES, KvType, LlamaContext, Logits
from outrider.llama.library import library
from outrider.llama.model import LlamaModel

TIP = 0
"""The handle of the last committed token."""
_MEASURE_S, _ROUNDS = 0.3, 5
"""Seconds that measuring a model's latency may take, beyond the first round, and its most rounds."""


class TreeFull(Overloaded):
    """No KV cells or sequence ids for these nodes; nothing was changed. Commit or drop the tree first."""


class ContextFull(BadRequest):
    """A committed sequence that does not fit into the context; nothing was changed."""


@dataclass(slots=True)
class _Node:
    """A draft node that was evaluated, or the last committed token."""

    parent: int
    """The handle of its parent; TIP's own is TIP."""
    position: int
    """Tokens before it, committed ones and ancestors."""
    sequence: int
    """The llama.cpp sequence that its cell was decoded in."""
    token: int
    continued: bool = False
    """Whether a child has taken over the sequence; the next one needs a fork."""


class TreeContext(LlamaContext):
    """A llama.cpp context that belongs to the thread that made it. Use it as a context manager.

    Every node needs a KV cell (n_ctx in all, with the committed tokens) and every leaf a sequence id (max_sequences).
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int,
        max_sequences: int = 64,
        batch: int = 512,
        kv_type: KvType = "f16",
    ) -> None:
        """Hold `n_ctx` tokens, committed or draft. batch: tokens a prefill chunk. Raises BadRequest, ModelRefused."""
        between("n_ctx", n_ctx, 1, model.n_ctx_train)
        between("max_sequences", max_sequences, 1, MAX_SEQUENCES)
        between("batch", batch, max_sequences, 1 << 16)
        super().__init__(
            model,
            cells=n_ctx,
            sequences=max_sequences,
            batch=batch,
            threads=model.threads,
            outputs=max_sequences,
            unified=True,  # branches share their ancestors' cells
            kv_type=kv_type,
        )
        self._owner = threading.get_ident()
        self.n_ctx = n_ctx
        """Tokens, committed and draft, that the context takes."""
        self._sequences = _Sequences(self._memory, max_sequences)
        self._max_rows = max_sequences
        self._tokens: list[int] = []
        self._nodes: dict[int, _Node] = {}  # by handle, in the order of decodes: parents come first; TIP included
        self._next = 1

    @property
    def length(self) -> int:
        """Return the number of tokens that are committed."""
        return len(self._tokens)

    @property
    def tree_size(self) -> int:
        """Return the number of draft nodes above the committed tokens."""
        return max(0, len(self._nodes) - 1)

    @property
    def room(self) -> int:
        """Return the number of tokens or nodes that still fit."""
        return self.n_ctx - self.length - self.tree_size

    def holds(self, handle: int) -> bool:
        """Return whether the tree has a node of this handle."""
        return handle in self._nodes

    def reset(self, tokens: Sequence[int]) -> Logits:
        """Make `tokens` the committed sequence and return the logits `[V]` after the last one; the tree is dropped.

        What it shares with the former sequence is not evaluated again, except the last token.
        Raises BadRequest (empty, id outside the vocabulary) or ContextFull before anything changes.
        """
        self._check_owner()
        if len(tokens) == 0:
            raise BadRequest.bound("tokens", "empty", "at least one token (llama.cpp has no logits before the first)")
        self._check_tokens(tokens)
        self._check_fits(len(tokens))
        self._cut(min(_common_prefix(self._tokens, tokens), len(tokens) - 1))
        return self._extend(tokens[self.length :])

    def decode(
        self,
        parents: Sequence[int],
        tokens: Sequence[int],
        handles: Sequence[int] | None = None,
        wanted: Sequence[bool] | None = None,
    ) -> tuple[list[int], Logits]:
        """Evaluate n new nodes in one pass: node i carries `tokens[i]` and is a child of the handle `parents[i]`.

        Parent 0 is the last committed token; other parents are handles from earlier calls, or of nodes that come before
        in this one, each of which may have one child in it.
        handles: the caller's own ids of the new nodes, above 0 and not in the tree; by default numbers never used.
        wanted: `[n]`, whose logits to return; by default of those without a child in this call.
        Returns the n handles and the logits `[m, V]` of the m nodes that are wanted, in their order.
        Raises TreeFull, or BadRequest (unknown parent, handle in use, token outside the vocabulary), before any change.
        """
        self._check_owner()
        if len(parents) != len(tokens) or len(tokens) == 0:
            raise BadRequest.bound("tokens", f"{len(tokens)} for {len(parents)} parents", "as many, at least one")
        self._check_tokens(tokens)
        if wanted is not None and len(wanted) != len(tokens):
            raise BadRequest.bound("wanted", f"{len(wanted)} for {len(tokens)} tokens", "as many")
        handles = range(self._next, self._next + len(tokens)) if handles is None else handles
        if len(set(handles)) != len(tokens) or min(handles) <= TIP or any(map(self.holds, handles)):
            raise BadRequest.bound("handles", list(handles), f"{len(tokens)} new ids above {TIP}")
        forks = self._forks_needed(parents, handles)
        if len(tokens) > self._chunk:
            raise TreeFull(f"{len(tokens)} nodes exceed the {self._chunk} tokens of a decode")
        if wanted is not None and sum(wanted) > self._max_rows:
            raise TreeFull(f"logits of {sum(wanted)} nodes are wanted, and a decode has those of {self._max_rows}")
        if len(tokens) > self.room:
            raise TreeFull(f"{len(tokens)} nodes need as many KV cells, {self.room} of {self.n_ctx} are free")
        if forks > self._sequences.free:
            raise TreeFull(f"{len(tokens)} nodes need {forks} sequence ids, {self._sequences.free} are free")
        new: dict[int, _Node] = {}
        for handle, parent, token in zip(handles, parents, tokens, strict=True):
            new[handle] = self._place(parent, new[parent] if parent in new else self._nodes[parent], token)
        positions, sequences = [node.position for node in new.values()], [node.sequence for node in new.values()]
        wanted = [not node.continued for node in new.values()] if wanted is None else wanted
        logits = self._decode(self._batch.fill(tokens, positions, sequences, wanted), sum(wanted))
        self._next = max(self._next, max(handles) + 1)
        self._nodes |= new
        return list(handles), logits

    def commit(self, path: Sequence[int], tail: Sequence[int] = ()) -> Logits | None:
        """Accept the nodes of `path` (a chain of handles from the tip down, possibly empty), then the tokens of `tail`.

        Without a tail, descendants of the path's last node keep their handles and logits, and its children become
        children of 0; nothing is decoded and None is returned. With a tail, which is not in the tree, the whole tree is
        dropped, the tail is evaluated, and the logits `[V]` after its last token are returned.
        Raises BadRequest (not a chain, id outside the vocabulary), ContextFull, before anything changes.
        """
        self._check_owner()
        self._check_path(path)
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
        """Forget all tokens and nodes."""
        self._check_owner()
        self._forget()

    def close(self) -> None:
        """Free the context, on its owner's thread. Closing twice is harmless."""
        if self._context:
            self._check_owner()
        super().close()

    # --- nodes and sequences

    def _place(self, parent: int, above: _Node, token: int) -> _Node:
        """Give a new node its position and sequence: the parent's own for its first child, a fork for the others."""
        position = above.position + 1
        sequence = self._sequences.fork(above.sequence, position) if above.continued else above.sequence
        above.continued = True
        return _Node(parent, position, sequence, token)

    def _forks_needed(self, parents: Sequence[int], handles: Sequence[int]) -> int:
        """Return how many new sequence ids children of these parents need. Raises BadRequest for an unknown parent."""
        first_children = set[int]()
        new = set[int]()
        for handle, parent in zip(handles, parents, strict=True):
            if parent in new and parent in first_children:  # a fork copies cells, and this node has none yet
                raise BadRequest.bound("parents", parent, "given once, since its node is new in this call")
            if parent not in new and parent not in self._nodes:
                known = "a handle of a node in the tree" if self._nodes else "preceded by reset(): nothing is committed"
                raise BadRequest.bound("parents", parent, known)
            if parent in new or not self._nodes[parent].continued:
                first_children.add(parent)
            new.add(handle)
        return len(parents) - len(first_children)

    def _move_tip(self, path: Sequence[int]) -> None:
        """Root the tree at the path's last node and free the branches that do not descend from it.

        The new tip's sequence holds the committed tokens, the path and, if `continued`, one branch below it: it
        becomes the committed sequence as it is. Nothing is copied.
        """
        committed = self.length
        before = _sequence_ids(self._nodes)
        self._tokens.extend(self._nodes[handle].token for handle in path)
        self._nodes = _rerooted(self._nodes, path[-1])
        for sequence in before - _sequence_ids(self._nodes):
            self._sequences.release(sequence, committed)

    def _cut(self, length: int) -> None:
        """Keep the first `length` committed tokens and nothing else."""
        if length == 0:
            self._forget()
            return
        tip = self._nodes[TIP]
        if self.tree_size == 0 and length == self.length:
            return
        self._sequences.truncate(tip.sequence, length, _sequence_ids(self._nodes))
        del self._tokens[length:]
        self._nodes = {TIP: _Node(TIP, length - 1, tip.sequence, self._tokens[-1])}

    def _extend(self, tokens: Sequence[int]) -> Logits:
        """Evaluate `tokens` after the committed ones, without a tree; return the logits `[V]` after the last."""
        sequence = self._nodes[TIP].sequence if self._nodes else self._sequences.take()
        for first in range(0, len(tokens), self._chunk):
            chunk = tokens[first : first + self._chunk]
            start = self.length + first
            outputs = [False] * (len(chunk) - 1) + [first + len(chunk) == len(tokens)]
            batch = self._batch.fill(chunk, range(start, start + len(chunk)), sequence, outputs)
            logits = self._decode(batch, int(outputs[-1]))
        self._tokens.extend(tokens)
        self._nodes = {TIP: _Node(TIP, self.length - 1, sequence, self._tokens[-1])}
        row: Logits = logits[0]
        return row

    def _forget(self) -> None:
        self._sequences.clear()
        self._tokens = []
        self._nodes = {}

    # --- checks

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise InternalError("a TreeContext belongs to the thread that made it; two at once would abort the process")
        if not self._context:
            raise InternalError("the TreeContext is closed")

    def _check_fits(self, length: int) -> None:
        if length > self.n_ctx:
            raise ContextFull(f"{length} tokens do not fit into a context of {self.n_ctx}", field=TOO_LONG)

    def _check_path(self, path: Sequence[int]) -> None:
        """Raise BadRequest unless `path` is a chain of handles from a child of TIP down."""
        above = TIP
        for handle in path:
            if handle == TIP or handle not in self._nodes or self._nodes[handle].parent != above:
                known = "a child of the tip (0)" if above == TIP else f"a child of {above}"
                raise BadRequest.bound("path", handle, known)
            above = handle


def measure_widths(context: TreeContext, widths: Sequence[int]) -> dict[int, float]:
    """Return the median seconds of one decode of W new nodes, for every width W; the context is left as it was.

    Widths take turns, so that a busy moment spoils none of them alone. No new round begins after _MEASURE_S except the
    first, so that a large model is measured once. The cost of attention grows with the tokens held: measure after
    prefill to include it. Raises BadRequest if there is a tree, TreeFull if a width does not fit.
    """
    if context.tree_size:
        raise BadRequest.bound("context", f"holding {context.tree_size} nodes", "without a tree (commit or drop it)")
    empty = context.length == 0
    if empty:
        context.reset([0])
    samples: dict[int, list[float]] = {width: [] for width in widths}
    try:
        _decode_once(context, max(widths))  # the first decode of a context pays for its buffers
        deadline = time.perf_counter() + _MEASURE_S
        for round_ in range(_ROUNDS):
            if round_ and time.perf_counter() >= deadline:
                break
            for width in samples:
                samples[width].append(_decode_once(context, width))
    finally:
        if empty:
            context.clear()
    return {width: statistics.median(seconds) for width, seconds in samples.items()}


def _decode_once(context: TreeContext, width: int) -> float:
    """Return the seconds of one decode of `width` children of the tip."""
    tokens = [i % context.vocab_size for i in range(width)]
    begin = time.perf_counter()
    context.decode([TIP] * width, tokens)
    seconds = time.perf_counter() - begin
    context.drop_tree()
    return seconds


class _Sequences:
    """Assigns the sequence ids 0 .. count-1 of a context with a unified KV cache to branches of the tree.

    Every branch of the tree is a llama.cpp sequence, and attention sees the cells of its own sequence only, so a new
    branch must first be given its whole past. Copying the prefix for each branch would cost time in proportion to the
    prompt. But a committed token never changes: a sequence that is freed keeps its committed cells, and a later fork
    copies only what was committed or drafted since.
    """

    def __init__(self, memory: Any, count: int) -> None:
        self._memory = memory
        self._count = count
        self._lib = library()
        self.clear()

    @property
    def free(self) -> int:
        return len(self._free)

    def clear(self) -> None:
        """Forget everything; every id is free."""
        self._lib.llama_memory_clear(self._memory, False)
        self._free = list(range(self._count - 1, -1, -1))
        self._held = [0] * self._count

    def take(self) -> int:
        """Return an id for the committed sequence of an empty context."""
        return self._free.pop()

    def fork(self, source: int, end: int) -> int:
        """Return a new branch with the past of `source` before position `end`, without its later nodes."""
        branch = self._free.pop()
        self._lib.llama_memory_seq_cp(self._memory, source, branch, self._held[branch], end)
        return branch

    def release(self, sequence: int, committed: int) -> None:
        """Drop a branch above the `committed` positions that it shares with the committed sequence."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, committed, -1)
        self._held[sequence] = committed
        self._free.append(sequence)

    def truncate(self, trunk: int, length: int, branches: set[int]) -> None:
        """Drop every cell from position `length` on, and with it all branches; `trunk` stays taken."""
        self._lib.llama_memory_seq_rm(self._memory, -1, length, -1)  # -1: of any sequence, in one pass
        # A branch lives above the committed tokens, so it holds all of them, and is now cut where the trunk is.
        self._held = [min(held, length) for held in self._held]
        for branch in branches - {trunk}:
            self._held[branch] = length
            self._free.append(branch)


def _sequence_ids(nodes: Mapping[int, _Node]) -> set[int]:
    return {node.sequence for node in nodes.values()}


def _rerooted(nodes: Mapping[int, _Node], tip: int) -> dict[int, _Node]:
    """Return `tip` as the new TIP and its descendants; its children become children of TIP."""
    kept = {TIP: nodes[tip]}
    for handle, node in nodes.items():
        if handle in (TIP, tip):
            continue
        if node.parent == tip:
            node.parent = TIP
            kept[handle] = node
        elif node.parent != TIP and node.parent in kept:
            kept[handle] = node
    return kept


def _common_prefix(former: Sequence[int], tokens: Sequence[int]) -> int:
    pairs = enumerate(zip(former, tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(former), len(tokens)))
