"""Keep large arrays from one call to the next: with fresh memory the system's page faults take longer than the sums."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_kept = threading.local()


def scratch(name: str, length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array `[length]` of this thread, whose content is arbitrary; the next call by this name reuses it."""
    array: NDArray[Any] | None = getattr(_kept, name, None)
    if array is None or len(array) < length:
        array = np.empty(length, dtype=dtype)
        setattr(_kept, name, array)
    return array[:length]


def reaching(row: NDArray[Any], least: Any) -> NDArray[np.bool_]:
    """Return `[V]`: which elements of `row` `[V]` are at least `least`. The next call in this thread overwrites it."""
    found: NDArray[np.bool_] = scratch("reaching", len(row), np.bool_)
    np.greater_equal(row, least, out=found)
    return found
