"""Test that slots are taken, promised and given back; none is lost or handed out twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape, SlotTable
from outrider.core.errors import InternalError


def pool(slots: int = 32) -> KVPool:
    return KVPool([LayerShape(2, 4, 6)], slots, dtype=torch.float32)


def test_keys_and_values_have_the_shapes_of_their_layer() -> None:
    one = pool()
    assert one.keys[0].shape == (32, 2, 4)
    assert one.values[0].shape == (32, 2, 6)


def test_no_slot_is_ever_held_twice() -> None:
    one, rng = pool(), random.Random(1)
    held: list[np.ndarray] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            one.release(held.pop(rng.randrange(len(held))))
        elif (count := rng.randrange(6)) <= one.slots - one.used:
            held.append(one.allocate(count))
        everything = np.concatenate([np.empty(0, np.int32), *held])
        assert len(set(everything.tolist())) == len(everything) == one.used


def test_what_was_freed_last_is_taken_first_in_order() -> None:
    one = pool()
    first = one.allocate(4)
    assert first.tolist() == [0, 1, 2, 3]
    one.release(first[1:])
    assert one.allocate(3).tolist() == [1, 2, 3]


def test_a_promise_beyond_what_is_left_is_not_made() -> None:
    one = pool()
    one.reserve(20)
    with pytest.raises(InternalError, match="13 KV slots were admitted, 12 are there"):
        one.reserve(13)
    assert one.unreserved == 12
    one.reserve(-20)
    assert one.unreserved == 32


def test_taking_or_returning_too_much_is_a_defect_that_is_named() -> None:
    one = pool(4)
    with pytest.raises(InternalError, match="5 KV slots"):
        one.allocate(5)
    with pytest.raises(InternalError, match="were released"):
        one.release(np.array([1], dtype=np.int32))


def test_a_table_grows_and_keeps_its_order() -> None:
    table = SlotTable(2)
    for start in range(0, 30, 3):
        table.extend(np.arange(start, start + 3, dtype=np.int32))
    assert table.slots.tolist() == list(range(30))
    assert table.truncate(27).tolist() == [27, 28, 29]
    assert table.truncate(90).tolist() == []
    assert len(table) == 27
