"""Test the tree decoder: every row of logits equals a fresh linear decode, and no caller can abort the process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.core.errors import BadRequest, InternalError
from outrider.llama import LlamaModel, TreeContext, TreeFull
from outrider.llama.context import Logits

TOLERANCE = 1e-4


def assert_linear(linear: TreeContext, tokens: Sequence[int], row: Logits) -> None:
    """Check that `row` equals a fresh, plain decode of `tokens`."""
    linear.clear()
    np.testing.assert_allclose(row, linear.reset(list(tokens)), rtol=0, atol=TOLERANCE)


# --- one behaviour at a time


# --- limits


def test_a_tree_without_free_sequence_ids_is_full_and_unchanged(context: TreeContext, linear: TreeContext) -> None:
    context.reset([1, 2, 3])
    handles, _ = context.decode([0] * 16, list(range(16)))
    with pytest.raises(TreeFull, match="sequence ids"):
        context.decode([handles[0], 0], [30, 31])
    assert context.tree_size == 16
    _, rows = context.decode([handles[0], handles[15]], [30, 31])  # first children need none
    assert_linear(linear, [1, 2, 3, 15, 31], rows[1])
    context.commit([handles[3]])
    assert len(context.decode([0] * 16, list(range(16)))[0]) == 16  # all but the committed one are free again


REFUSED: dict[str, Callable[[TreeContext], object]] = {
    "an empty prompt": lambda c: c.reset([]),
    "a prompt with an id beyond the vocabulary": lambda c: c.reset([1, 100_000]),
    "a prompt with a negative id": lambda c: c.reset([-1]),
    "a node with an id beyond the vocabulary": lambda c: c.decode([0], [100_000]),
    "a node with a negative id": lambda c: c.decode([0], [-1]),
    "an unknown parent": lambda c: c.decode([77], [1]),
    "a negative parent": lambda c: c.decode([-1], [1]),
    "no nodes": lambda c: c.decode([], []),
    "more tokens than parents": lambda c: c.decode([0], [1, 2]),
    "a handle in use": lambda c: c.decode([0], [1], [3]),
    "the tip's handle": lambda c: c.decode([0], [1], [0]),
    "a handle for two nodes": lambda c: c.decode([0, 0], [1, 2], [9, 9]),
    "more handles than nodes": lambda c: c.decode([0], [1], [8, 9]),
    "a parent that comes after its child": lambda c: c.decode([9, 0], [1, 2], [8, 9]),
    "two children of a node that is new": lambda c: c.decode([0, 8, 8], [1, 2, 3], [8, 9, 10]),
    "a path that starts below the tip": lambda c: c.commit([3]),
    "a path that is not a chain": lambda c: c.commit([1, 2]),
    "a path with an unknown handle": lambda c: c.commit([1, 77]),
    "a path through the tip": lambda c: c.commit([0]),
    "a path with the tip in it": lambda c: c.commit([1, 0]),
    "a path that repeats a node": lambda c: c.commit([1, 1]),
    "a tail with an id beyond the vocabulary": lambda c: c.commit([1], [100_000]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_abort_on_is_a_bad_request_that_changes_nothing(
    name: str, context: TreeContext, linear: TreeContext
) -> None:
    context.reset([1, 2, 3])
    context.decode([0, 0], [10, 11])  # handles 1, 2
    context.decode([1], [20])  # handle 3
    with pytest.raises(BadRequest):
        REFUSED[name](context)
    assert (context.length, context.tree_size) == (3, 3)
    _, rows = context.decode([3, 2], [30, 31])
    assert_linear(linear, [1, 2, 3, 10, 20, 30], rows[0])
    assert_linear(linear, [1, 2, 3, 11, 31], rows[1])


@pytest.mark.parametrize(
    "bounds",
    [
        {"n_ctx": 0},
        {"n_ctx": 513},
        {"n_ctx": 64, "max_sequences": 257, "batch": 512},
        {"n_ctx": 64, "max_sequences": 0},
        {"n_ctx": 64, "max_sequences": 64, "batch": 63},
    ],
)
def test_a_context_out_of_bounds_is_refused(model: LlamaModel, bounds: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        TreeContext(model, **bounds)  # type: ignore[arg-type]


def _elsewhere(call: Callable[[], object]) -> list[Exception]:
    """Return what `call` raises on another thread."""
    raised = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_another_thread_is_refused_until_it_adopts_the_context(context: TreeContext) -> None:
    context.reset([1, 2, 3])
    calls: list[Callable[[], object]] = [
        lambda: context.reset([1]),
        lambda: context.decode([0], [1]),
        lambda: context.commit([]),
        context.drop_tree,
        context.clear,
        context.close,
    ]
    for call in calls:
        [error] = _elsewhere(call)
        assert isinstance(error, InternalError) and "thread" in str(error)
    assert context.length == 3


# --- random steps against a model of the tree that knows nothing of sequences


class RandomSteps:
    """Drive a context at random, knowing of each handle only the tokens that lead to it."""

    def __init__(self, context: TreeContext, linear: TreeContext, seed: int) -> None:
        self.context, self.linear, self.random = context, linear, random.Random(seed)
        self.committed: list[int] = []
        self.paths: dict[int, tuple[int, ...]] = {0: ()}  # handle -> handles from the tip down to it
        self.tokens: dict[int, int] = {}
        self.full = 0
        self.reset()

    def text(self, path: Sequence[int]) -> list[int]:
        return self.committed + [self.tokens[handle] for handle in path]

    def reset(self) -> None:
        kept = self.committed[: self.random.randrange(len(self.committed) + 1)]
        tokens = kept + self.some_tokens(self.random.randrange(1, 10))
        tokens = tokens[-100:]
        row = self.context.reset(tokens)
        self.committed, self.paths = tokens, {0: ()}
        assert_linear(self.linear, tokens, row)

    def some_tokens(self, n: int) -> list[int]:
        return [self.random.randrange(self.context.vocab_size) for _ in range(n)]

    def decode(self) -> None:
        n = self.random.randrange(1, 7)
        parents = self.random.choices(list(self.paths), k=n)
        tokens = self.some_tokens(n)
        before = self.context.tree_size
        first = max(self.tokens, default=0) + self.random.randrange(1, 4)
        own = self.random.choice([None, self.random.sample(range(first, first + n), n)])
        if own is not None:
            for i in range(1, n):  # some nodes go on where the last one ends
                parents[i] = own[i - 1] if self.random.random() < 0.4 else parents[i]
        try:
            handles, rows = self.context.decode(parents, tokens, own)
        except TreeFull:
            self.full += 1
            assert self.context.tree_size == before
            return
        assert own is None or handles == own
        for handle, parent, token in zip(handles, parents, tokens, strict=True):
            assert self.context.holds(handle) and handle > 0 and handle not in self.tokens
            self.tokens[handle] = token
            self.paths[handle] = (*self.paths[parent], handle)
        last = [handle for handle in handles if handle not in parents]
        assert len(rows) == len(last)
        checked = self.random.randrange(len(last))
        assert_linear(self.linear, self.text(self.paths[last[checked]]), rows[checked])

    def commit(self) -> None:
        path = self.random.choice(list(self.paths.values()))
        tail = self.some_tokens(self.random.choice([0, 0, 0, 1, 1, 2]))
        if len(self.committed) + len(path) + len(tail) > self.context.n_ctx:
            return self.reset()
        row = self.context.commit(path, tail)
        self.committed = self.text(path) + tail
        survivors = {handle: p[len(path) :] for handle, p in self.paths.items() if p[: len(path)] == path}
        self.paths = {0: ()}
        if tail:
            assert row is not None
            return assert_linear(self.linear, self.committed, row)
        assert row is None
        self.paths |= {handle: p for handle, p in survivors.items() if p}
        return None

    def drop(self) -> None:
        self.context.drop_tree()
        self.paths = {0: ()}

    def step(self) -> None:
        actions = [self.decode, self.commit, self.drop, self.reset]
        self.random.choices(actions, weights=[60, 30, 2, 2])[0]()
        assert self.context.length == len(self.committed)
        assert self.context.tree_size == len(self.paths) - 1


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_decodes_and_commits_gives_the_logits_of_a_linear_decode(
    seed: int, context: TreeContext, linear: TreeContext
) -> None:
    steps = RandomSteps(context, linear, seed)
    for _ in range(150):
        steps.step()
    assert len(steps.tokens) > 150


def test_decodes_and_commits_at_the_limits_of_cells_and_sequences_stay_exact(
    model: LlamaModel, linear: TreeContext
) -> None:
    with TreeContext(model, n_ctx=40, max_sequences=5, batch=8, kv_type="f32") as context:
        steps = RandomSteps(context, linear, 99)
        steps.reset = lambda: None  # type: ignore[method-assign]
        for _ in range(400):
            if steps.context.room < 4:
                steps.committed, steps.paths = [7], {0: ()}
                context.reset([7])
            steps.step()
        assert steps.full > 20
