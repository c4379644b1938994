"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import platform

# mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LARGE_BYTES = 128 * 1024
"""A block from this size on is mapped by itself, and goes back to the system when it is freed. It is glibc's own first
value; left alone, glibc raises it for good to the largest block that was ever freed, up to 32 MB."""
ARENAS = 2
"""Heaps that all threads share. By default gRPC's dozen threads fill up to eight for each core, and each heap keeps
what some message needed once."""


def give_back_what_is_freed() -> bool:
    """Have this process's memory shrink again after a message of a megabyte; to be called before there are threads.

    Whether it could be done: with another C library than glibc nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    chosen = ((_M_ARENA_MAX, ARENAS), (_M_MMAP_THRESHOLD, LARGE_BYTES), (_M_TRIM_THRESHOLD, LARGE_BYTES))
    results = [mallopt(name, value) for name, value in chosen]
    return all(results)
