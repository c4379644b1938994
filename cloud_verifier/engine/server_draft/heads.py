"""Propose tokens with heads on the target's last hidden states (head_models.py), for all sessions in one batch.

The states come with every step, so that heads read nothing: a session's first proposals follow its first commit.
Children are chosen with the session's noise like a device's (outrider.core.proposals), and the tree is grown best-first
by their measured acceptance, one level after the other for all sessions together.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cloud_verifier.engine.nodes import ProposedTree
from cloud_verifier.engine.server_draft.base import (
    CHILDREN,
    ProposalRequest,
    ServerSource,
    grow,
    kind_of,
    level_pays,
    without_early_ends,
)
from cloud_verifier.engine.server_draft.head_models import HEAD_WIDTH, EagleHead, Heads, MedusaHeads
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.proposals import Proposal, propose
from outrider.core.tree import ROOT

MAX_SESSIONS = 64
BEAM = 4
"""Nodes of a level, of each session, that have children."""


class TargetLayers(Protocol):
    """Gives the target's own first and last layer, which its heads share."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[n, H]` of ids `[n]`."""

    def output(self, states: Tensor) -> Tensor:
        """Return the logits `[n, V]` of states `[n, H]`."""


@dataclass
class _Memory:
    """Holds what is kept of a session: the last states that the target gave, and the tokens that followed them."""

    length: int
    """Known tokens of the session when it was last observed."""
    states: Tensor
    """`[n, H]`: new ones, which are not among the keys yet."""
    tokens: list[int]
    """Those that followed them."""
    keys: Tensor
    """`[m, heads, HEAD_WIDTH]`, of the EAGLE layer, the newest last."""
    values: Tensor


@dataclass
class _Node:
    """A node that is proposed, or the root of a tree."""

    number: int
    """Of the tree's session among those that are drafted for."""
    path: tuple[int, ...] = ()
    probability: float = 1.0
    """Of its path."""
    kind: int = 0
    ends: bool = False
    state: Tensor | None = None
    """`[H]`: the state that its parent's entry predicts."""
    entries: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of the nodes above it."""


class HeadsSource(ServerSource):
    """Proposes with heads of either kind."""

    name = "heads"
    wants_hidden = True

    def __init__(self, heads: Heads, target: TargetLayers, *, vocabulary: int) -> None:
        """Propose ids below `vocabulary` alone. heads: on the device of the target, in its dtype."""
        super().__init__()
        self._heads = heads
        self._target = target
        self._vocabulary = vocabulary
        self._memories: dict[str, _Memory] = {}
        self._level_s = MovingAverage()
        """Seconds of one level, which all sessions share."""
        self._window = heads.shape.window if isinstance(heads, EagleHead) else 1

    def observe(self, session: EngineSession, states: Tensor) -> None:
        memory = self._memories.get(session.session_id)
        if memory is None or memory.length != len(session.tokens) - len(states):  # a step was not seen
            none = states.new_zeros(0, self._heads.shape.width // HEAD_WIDTH, HEAD_WIDTH)
            memory = self._memories[session.session_id] = _Memory(0, states[:0], [], none, none)
        memory.length = len(session.tokens)
        memory.states = torch.cat((memory.states, states))[-self._window :]
        memory.tokens = [*memory.tokens, *session.tokens[-len(states) :]][-self._window :]

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        known = [one for one in requests if self._is_current(one.session) and one.nodes > 0][:MAX_SESSIONS]
        if not known:
            return {}
        if isinstance(self._heads, MedusaHeads):
            return self._ahead(known, self._heads)
        return self._drafted(known, self._heads)

    def release(self, session_id: str) -> None:
        self._memories.pop(session_id, None)

    def _is_current(self, session: EngineSession) -> bool:
        memory = self._memories.get(session.session_id)
        return memory is not None and memory.length == len(session.tokens)

    def _children(self, session: EngineSession, logits: Tensor, path: Sequence[int]) -> list[Proposal]:
        """Return the proposals after `path`, the best first. logits: `[V]`, float32, on the CPU."""
        sampler, position = session.sampler, session.protocol.position + len(path)
        row = without_early_ends(logits[: self._vocabulary].numpy(), session, position)
        return propose(row, sampler.params, sampler.key, position, sampler.counts, path, CHILDREN)

    # Medusa

    def _ahead(self, requests: Sequence[ProposalRequest], heads: MedusaHeads) -> dict[str, ProposedTree]:
        """Return trees in which the nodes of a level have the same children, since a head knows no path."""
        states = torch.stack([self._memories[one.session.session_id].states[-1] for one in requests])
        predicted = heads(states)
        logits = self._target.output(predicted.flatten(0, 1)).float().cpu().view(*predicted.shape[:2], -1)

        return {
            one.session.session_id: grow(one, partial(self._children_ahead, one.session, logits[:, number]))
            for number, one in enumerate(requests)
        }

    def _children_ahead(self, session: EngineSession, logits: Tensor, path: Sequence[int]) -> list[Proposal]:
        """Return the proposals after `path` by the head of its level. logits: `[K, V]`."""
        return self._children(session, logits[len(path)], path) if len(path) < len(logits) else []

    # EAGLE

    def _drafted(self, requests: Sequence[ProposalRequest], heads: EagleHead) -> dict[str, ProposedTree]:
        """Return trees that are drafted level by level, from the head's own predictions."""
        inputs, queries, keys, values, seen = self._catch_up(requests, heads)
        trees: list[list[_Node]] = [[] for _ in requests]
        level = [_Node(number) for number in range(len(requests))]
        distance = torch.arange(keys.shape[1] - 1, -1, -1, device=keys.device)[None, None]
        attended = heads.attend(queries[:, None], keys, values, distance, seen[:, None])[:, 0]
        reached = float(len(requests))
        for depth in range(1, heads.shape.depth + 1):
            begun = time.perf_counter()
            predicted = heads.finish(inputs, attended)
            logits = self._target.output(predicted).float().cpu()
            for row, node in enumerate(level):
                trees[node.number] += self._grown(requests[node.number], node, logits[row], predicted[row])
            level = _best(trees, requests, depth) if depth < heads.shape.depth else []
            before, reached = reached, _reached(level)
            if not level or not level_pays(self._level_s.value, reached, before, requests[0].token_s):
                break
            states = torch.stack([node.state for node in level if node.state is not None])
            embedded = self._embedded([node.path[-1] for node in level])
            inputs, queries, own_keys, own_values = heads.entries(states, embedded)
            for node, key, value in zip(level, own_keys, own_values, strict=True):
                node.entries = [*node.entries, (key, value)]
            among = torch.tensor([node.number for node in level], device=keys.device)
            above_keys = torch.stack([torch.stack([key for key, _ in node.entries]) for node in level])
            above_values = torch.stack([torch.stack([value for _, value in node.entries]) for node in level])
            own = torch.arange(depth - 1, -1, -1, device=keys.device)[None, None]
            attended = heads.attend(
                queries[:, None],
                torch.cat((keys[among], above_keys), dim=1),
                torch.cat((values[among], above_values), dim=1),
                torch.cat((distance + depth, own), dim=2),
                torch.cat((seen[among], seen.new_ones(len(level), depth)), dim=1)[:, None],
            )[:, 0]
            self._level_s.add(time.perf_counter() - begun)
        return {one.session.session_id: _tree(one, nodes) for one, nodes in zip(requests, trees, strict=True)}

    def _catch_up(
        self, requests: Sequence[ProposalRequest], heads: EagleHead
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Add the sessions' new states to their keys and values.

        Returns the layer's input `[n, D]` and query of each one's last entry, and keys and values of the last entries
        `[n, m, heads, HEAD_WIDTH]` with, `[n, m]`, which of them there are.
        """
        memories = [self._memories[one.session.session_id] for one in requests]
        counts = [len(memory.tokens) for memory in memories]
        embeddings = self._embedded([token for memory in memories for token in memory.tokens])
        x, queries, keys, values = heads.entries(torch.cat([memory.states for memory in memories]), embeddings)
        for memory, new_keys, new_values in zip(
            memories, torch.split(keys, counts), torch.split(values, counts), strict=True
        ):
            # The last entry stays new, since a proposal may be asked for again before the next commit.
            memory.keys = torch.cat((memory.keys, new_keys[:-1]))[-self._window :]
            memory.values = torch.cat((memory.values, new_values[:-1]))[-self._window :]
            memory.states, memory.tokens = memory.states[-1:], memory.tokens[-1:]
        last = torch.tensor(counts, device=x.device).cumsum(0) - 1
        length = max(len(memory.keys) for memory in memories) + 1
        shape = (len(memories), length, *keys.shape[1:])
        all_keys, all_values = keys.new_zeros(shape), values.new_zeros(shape)
        seen = torch.zeros(shape[:2], dtype=torch.bool, device=x.device)
        for number, memory in enumerate(memories):
            begin = length - 1 - len(memory.keys)
            all_keys[number, begin:-1], all_values[number, begin:-1] = memory.keys, memory.values
            seen[number, begin:] = True
        all_keys[:, -1], all_values[:, -1] = keys[last], values[last]
        return x[last], queries[last], all_keys, all_values, seen

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        device = next(self._heads.parameters()).device
        return self._target.embed(torch.tensor(tokens, dtype=torch.int64, device=device))

    def _grown(self, request: ProposalRequest, node: _Node, logits: Tensor, predicted: Tensor) -> list[_Node]:
        """Return the children of a node that pay."""
        session = request.session
        if len(node.path) + 1 >= session.left:
            return []  # the step's own token is the last one
        children = []
        for order, proposal in enumerate(self._children(session, logits, node.path)):
            kind = kind_of(proposal.margin)
            probability = node.probability * request.acceptance.estimate(kind, order)
            if probability >= request.floor:
                ends = session.protocol.ends(proposal.token, session.protocol.position + len(node.path))
                path = (*node.path, proposal.token)
                children.append(_Node(node.number, path, probability, kind, ends, predicted, node.entries))
        return children


def _best(trees: Sequence[Sequence[_Node]], requests: Sequence[ProposalRequest], depth: int) -> list[_Node]:
    """Return the most probable nodes of the trees' last level, at most BEAM of each. None is below a node that has no
    place among the best of its tree: it would have none either."""
    found: list[_Node] = []
    for one, tree in zip(requests, trees, strict=True):
        best = heapq.nlargest(one.nodes, (node.probability for node in tree)) if len(tree) > one.nodes else [0.0]
        last = (n for n in tree if len(n.path) == depth and not n.ends and n.probability >= best[-1])
        found += heapq.nlargest(BEAM, last, key=lambda node: node.probability)
    return found


def _reached(level: Sequence[_Node]) -> float:
    """Return the expected number of sessions whose target reaches these nodes of a level."""
    by_session: defaultdict[int, float] = defaultdict(float)
    for node in level:
        by_session[node.number] += node.probability
    return sum(min(1.0, probability) for probability in by_session.values())


def _tree(request: ProposalRequest, nodes: Sequence[_Node]) -> ProposedTree:
    """Return the tree of the most probable nodes, as many as are of use. nodes: parents before children."""
    tree = ProposedTree(request.session.protocol.position)
    ids: dict[tuple[int, ...], int] = {(): ROOT}
    for node in sorted(nodes, key=lambda one: -one.probability)[: request.nodes]:  # a stable sort: parents stay before
        ids[node.path] = tree.propose(ids[node.path[:-1]], node.path[-1], node.kind)
    return tree
