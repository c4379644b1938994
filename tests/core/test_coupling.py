"""Test the noise: published vectors, the same bits in numpy and plain integers, and no visible structure."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from scipy import stats

from outrider.core.coupling import gumbel, position_key, position_keys, session_key, uniform

MASK = 2**64 - 1
PROMPT = (1, 2, 3)

# (seed, prompt, position, token) -> u, as Python's float.hex writes it. docs/protocol.md publishes the same table.
VECTORS = [
    (0, (), 0, 0, "0x1.7d8503cc6cb08p-1"),
    (0, (), 0, 1, "0x1.2bc373fa0baecp-1"),
    (0, (), 1, 0, "0x1.9195f3846e8cap-1"),
    (1, (), 0, 0, "0x1.4d58365eda7b1p-2"),
    (0, (0,), 0, 0, "0x1.66191984cc1c0p-8"),
    (42, (1, 2, 3), 0, 0, "0x1.90dd6b3caad8ap-1"),
    (42, (1, 2, 3), 0, 31999, "0x1.40288c569bf28p-1"),
    (42, (1, 2, 3), 131071, 151935, "0x1.0a37bc659f408p-1"),
    (9223372036854775808, (50256,), 17, 7, "0x1.952c224617bc0p-8"),
    (18446744073709551615, (0, 4294967295), 1000, 128000, "0x1.e7877ccf2d642p-1"),
]


def mix(x: int) -> int:
    """Compute the finaliser of splitmix64 with Python's unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_key(seed: int, prompt: tuple[int, ...]) -> int:
    data = seed.to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in prompt)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"outrider.noise.1").digest(), "little")


def plain_u(seed: int, prompt: tuple[int, ...], position: int, token: int) -> float:
    at = mix((plain_key(seed, prompt) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    bits = mix((at + token * 0x9E3779B97F4A7C15) & MASK) >> 11
    return min((2 * bits + 1) / 2**54, 1 - 2**-53)  # int / int rounds correctly


def key_at(seed: int, prompt: tuple[int, ...], position: int) -> int:
    return position_key(session_key(seed, prompt), position)


def row(seed: int, position: int, vocabulary: int = 4_096, prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    return uniform(key_at(seed, prompt, position), np.arange(vocabulary, dtype=np.int64))


@pytest.mark.parametrize(("seed", "prompt", "position", "token", "u"), VECTORS)
def test_the_published_vectors_hold(seed: int, prompt: tuple[int, ...], position: int, token: int, u: str) -> None:
    expected = float.fromhex(u)
    assert plain_u(seed, prompt, position, token) == expected
    at = key_at(seed, prompt, position)
    assert uniform(at, np.array([token], dtype=np.int64))[0] == expected
    assert gumbel(at, np.array([token], dtype=np.int64))[0] == pytest.approx(-math.log(-math.log(expected)), abs=1e-12)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (2**63, 100_000), (MASK, 3)])
def test_numpy_and_plain_integers_give_the_same_bits(seed: int, position: int) -> None:
    at = key_at(seed, PROMPT, position)
    ids = np.arange(151_936, dtype=np.int64)
    by_numpy = uniform(at, ids)
    assert by_numpy.dtype == np.float64
    assert all(by_numpy[token] == plain_u(seed, PROMPT, position, token) for token in range(0, 151_936, 997))


def test_u_is_uniform_over_tokens_positions_seeds_and_prompts() -> None:
    some = np.array([7], dtype=np.int64)
    samples = {
        "tokens": row(1, 0, 40_000),
        "positions": np.array([uniform(key_at(2, PROMPT, t), some)[0] for t in range(8_000)]),
        "seeds": np.array([uniform(key_at(s, PROMPT, 0), some)[0] for s in range(8_000)]),
        "prompts": np.array([uniform(key_at(3, (p,), 0), some)[0] for p in range(8_000)]),
    }
    for name, sample in samples.items():
        assert stats.kstest(sample, "uniform").pvalue > 1e-3, name


def test_g_has_the_gumbel_distribution() -> None:
    g = gumbel(key_at(8, PROMPT, 2), np.arange(40_000, dtype=np.int64))
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-3


def test_neighbours_of_every_kind_are_uncorrelated() -> None:
    size = 40_000
    here = row(1, 0, size)
    others = {
        "the next position": row(1, 1, size),
        "the next seed": row(2, 0, size),
        "the same seed on another prompt": row(1, 0, size, prompt=(1, 2, 4)),
        "the same seed on a longer prompt": row(1, 0, size, prompt=(1, 2, 3, 0)),
        "the next token": np.roll(here, 1),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(here, other)[0, 1]) < 4 / math.sqrt(size), name
        assert not np.any(here == other), name


def test_many_positions_have_the_keys_of_each() -> None:
    keys, positions = [0, 1, 2**63 + 5, 2**64 - 1], [0, 7, 100_000, 2**31]
    expected = [position_key(key, position) for key, position in zip(keys, positions, strict=True)]
    assert position_keys(keys, positions).view(np.uint64).tolist() == expected
    ids = np.arange(4)
    together = uniform(position_keys(keys, positions).view(np.uint64), ids)
    assert together.tolist() == [uniform(at, ids[i : i + 1])[0] for i, at in enumerate(expected)]
