"""Couple the draft's proposals to the target's tokens by shared noise, so that no probability has to travel.

Position t of a session has Gumbel noise g_t[v]. The target's token is argmax(log p_t + g_t), an exact sample from p_t;
the device, which knows the key, proposes the tokens that maximise log q_t + g_t (arXiv 2408.07978). Temperature 0 is
the same rule with g = 0.

Test vectors are in tests/core/test_coupling.py and docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.core.scratch import scratch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BELOW_ONE = 1.0 - 2.0**-53
_LEAST_GUMBEL = -3.7
"""Less than g can be, whose least value belongs to u = 2^-54."""
_BLOCK = 1 << 14
"""Ids that `ids_above` hashes at once: its arrays stay in a core's second cache."""
_STEPS: NDArray[np.uint64] = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_GOLDEN)
# Arrays instead of numbers spare every operator a conversion.
_ROUNDS = [
    (np.array(bits, dtype=np.uint64), np.array(mix, dtype=np.uint64)) for bits, mix in ((30, _MIX_1), (27, _MIX_2))
]


def session_key(seed: int, prompt: Sequence[int]) -> int:
    """Return 64 bits from seed and prompt, so that equal seeds on different prompts do not correlate."""
    data = seed.to_bytes(8, "little") + np.asarray(prompt, dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"outrider.noise.1").digest(), "little")


def position_key(key: int, position: int) -> int:
    """Return the key of one position: splitmix64 (Steele, Lea, Flood 2014) of `key` at counter `position`."""
    x = (key + (position + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def position_keys(keys: ArrayLike, positions: ArrayLike) -> NDArray[np.int64]:
    """Return the keys of many positions, `[n]`: the bits of `position_key` of each key and position."""
    x = np.array(keys, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    for bits, factor in _ROUNDS:
        x = (x ^ (x >> bits)) * factor
    signed_bits: NDArray[np.int64] = (x ^ (x >> np.uint64(31))).view(np.int64)
    return signed_bits


def uniform(at: int | NDArray[np.uint64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return u in (0, 1), float64 with 53 random bits, for the tokens `ids` at position key `at`.

    at: one key, or one for each of the ids. ids: of any shape but 0-d (numpy warns of overflow on scalars).
    """
    x = ids.astype(np.uint64) * np.uint64(_GOLDEN) + (np.uint64(at) if isinstance(at, int) else at)
    for bits, factor in _ROUNDS:
        x = (x ^ (x >> bits)) * factor
    x ^= x >> np.uint64(31)
    # Rounding takes the greatest value to 1.0, whose g would be infinite.
    return (((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53).clip(max=_BELOW_ONE)


def gumbel(at: int | NDArray[np.uint64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return g = -log(-log u), float64, for the tokens `ids` at position key `at`; arguments as for `uniform`."""
    return -np.log(-np.log(uniform(at, ids)))


def ids_above(at: int, vocabulary: int, least: float) -> NDArray[np.int64]:
    """Return, ascending, every id below `vocabulary` whose g at position key `at` is at least `least`, and few more.

    It costs no logarithm: g rises with the hash, so a hash's upper 31 bits decide, and its last mixing step, which
    leaves these as they are, is left out.
    """
    if least < _LEAST_GUMBEL:
        return np.arange(vocabulary)
    bound = np.array(max(0, int(math.exp(-math.exp(-least)) * 2.0**31) - 1) << 33, dtype=np.uint64)
    hashes, shifted = scratch("hashes", _BLOCK, np.uint64), scratch("shifted", _BLOCK, np.uint64)
    above = scratch("above", vocabulary, np.bool_)
    for first in range(0, vocabulary, _BLOCK):
        size = min(_BLOCK, vocabulary - first)
        x, y = hashes[:size], shifted[:size]
        np.add(_STEPS[:size], np.uint64((at + first * _GOLDEN) & _MASK), x)
        for bits, factor in _ROUNDS:
            np.right_shift(x, bits, y)
            np.bitwise_xor(x, y, x)
            np.multiply(x, factor, x)
        np.greater_equal(x, bound, above[first : first + size])
    return np.flatnonzero(above)
