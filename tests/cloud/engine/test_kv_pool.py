"""Test that slots are taken, promised and given back; none is lost or handed out twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from outrider.core.errors import InternalError


def pool(slots: int = 32) -> KVPool:
    return KVPool([LayerShape(2, 4, 6)], slots, dtype=torch.float32)


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


def test_a_promise_beyond_what_is_left_is_not_made() -> None:
    one = pool()
    one.reserve(20)
    with pytest.raises(InternalError, match="13 KV slots were admitted, 12 are there"):
        one.reserve(13)
    assert one.unreserved == 12
    one.reserve(-20)
    assert one.unreserved == 32
