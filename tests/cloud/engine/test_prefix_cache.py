"""Test the prefix cache against a naive model: a dictionary from token paths to slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloud_verifier.engine.torch_backend.prefix_cache import PrefixCache, PrefixLease

SLOTS = 48
Path = tuple[str, tuple[int, ...]]
"""A salt and the tokens."""

salts = st.sampled_from(["a", "b"])
tokens = st.lists(st.integers(0, 2), max_size=12)
"""So few different tokens that paths meet and part."""


@dataclass
class Holder:
    """Stand in for a session: a table of slots that begins with a lease."""

    salt: str
    tokens: list[int]
    slots: np.ndarray
    lease: PrefixLease


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.free = list(range(SLOTS))
        self.known: dict[Path, int] = {}
        """The naive model: every path that is cached -> the slot of its last token."""
        self.holders: list[Holder] = []

    def path(self, salt: str, tokens: list[int]) -> list[Path]:
        return [(salt, tuple(tokens[: i + 1])) for i in range(len(tokens))]

    def held(self) -> set[Path]:
        return {path for one in self.holders for path in self.path(one.salt, one.tokens[: len(one.lease.slots)])}

    @rule(salt=salts, tokens=tokens)
    def begins(self, salt: str, tokens: list[int]) -> None:
        lease = self.cache.acquire(salt, tokens)
        expected = [self.known[p] for p in itertools.takewhile(self.known.__contains__, self.path(salt, tokens))]
        assert lease.slots.tolist() == expected
        self.holders.append(Holder(salt, tokens[: len(lease.slots)], lease.slots, lease))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=tokens)
    def computes(self, data: st.DataObject, more: list[int]) -> None:
        one = data.draw(st.sampled_from(self.holders))
        short = len(more) - len(self.free)
        if short > 0:
            self.evicts(short)
        more = more[: len(self.free)]
        taken = [self.free.pop() for _ in more]
        one.tokens = one.tokens + more
        one.slots = np.concatenate([one.slots, np.asarray(taken, dtype=np.int32)])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def shares(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.holders))
        before = one.slots.tolist()
        given, lease = before[len(one.lease.slots) :], one.lease
        one.lease, doubles = self.cache.publish(lease, one.salt, one.tokens, one.slots)
        expected = []
        for path, slot in zip(self.path(one.salt, one.tokens), before, strict=True):
            expected.append(self.known.setdefault(path, slot))
        assert one.lease.slots.tolist() == expected
        assert doubles.tolist() == [slot for slot in given if slot not in expected]
        self.free += doubles.tolist()
        one.slots = one.lease.slots

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        one = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        others = self.held()
        mine = set(self.path(one.salt, one.tokens[: len(one.lease.slots)]))
        assert self.cache.held_only_by(one.lease) == len(mine - others)
        self.free += one.slots[len(one.lease.slots) :].tolist()
        self.cache.release(one.lease)

    @rule(count=st.integers(0, 8))
    def evicts(self, count: int) -> None:
        loose = set(self.known) - self.held()
        slots = self.cache.evict(count).tolist()
        assert len(slots) == min(count, len(loose))
        gone = [path for path, slot in self.known.items() if slot in slots]
        assert set(gone) <= loose
        for path in gone:
            del self.known[path]
        assert all(parent in self.known for path in self.known for parent in self.path(path[0], list(path[1])))
        self.free += slots

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        private = [slot for one in self.holders for slot in one.slots[len(one.lease.slots) :].tolist()]
        assert sorted([*self.free, *private, *self.known.values()]) == list(range(SLOTS))

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        held = self.held()
        assert self.cache.leased == len(held)
        assert self.cache.cached == len(self.known) - len(held)


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=40)


def filled(*paths: list[int]) -> PrefixCache:
    """Return a cache in which each path, longest unused first, was computed; slots are numbered in this order."""
    cache, slots = PrefixCache(), itertools.count()
    for path in paths:
        lease = cache.acquire("a", path)
        new = np.asarray([next(slots) for _ in path[len(lease.slots) :]], dtype=np.int32)
        lease, _ = cache.publish(lease, "a", path, np.concatenate([lease.slots, new]))
        cache.release(lease)
    return cache


def slots_of(cache: PrefixCache, path: list[int], salt: str = "a") -> list[int]:
    lease = cache.acquire(salt, path)
    cache.release(lease)
    return lease.slots.tolist()


def test_the_longest_unused_goes_first_and_its_end_before_its_beginning() -> None:
    cache = filled([1, 2, 3], [4, 5], [1, 2, 6])
    assert slots_of(cache, [4, 5]) == [3, 4]  # and now it is the latest
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(2).tolist() == [5, 1]
    assert slots_of(cache, [1, 2, 3]) == [0]
    assert sorted(cache.evict(99).tolist()) == [0, 3, 4]
    assert cache.evict(1).tolist() == []
    assert not cache._top.children  # not even the salt is remembered
