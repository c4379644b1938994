"""Values on the command line, held against their bounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from coordinator.records import MAX_LEVELS, MAX_PER_LEVEL
from outrider.testing.network_proxy import MAX_RTT_MS


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def levels(text: str) -> int:
    if not 0 <= (number := int(text)) <= MAX_LEVELS:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_LEVELS}, got {text}")
    return number


def per_level(text: str) -> float:
    if not 1.0 <= (value := float(text)) <= MAX_PER_LEVEL:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_PER_LEVEL:.0f}, got {text}")
    return value


def milliseconds(text: str) -> float:
    if not 0.0 <= (value := float(text)) <= MAX_RTT_MS:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_RTT_MS:.0f}, got {text}")
    return value


def seconds(text: str) -> float:
    if not 0.1 <= (value := float(text)) <= 3_600.0:
        raise argparse.ArgumentTypeError(f"must be from 0.1 to 3600 seconds, got {text}")
    return value


def at_most(most: int) -> Callable[[str], int]:
    """Of a number from 1 on."""

    def number(text: str) -> int:
        if not 1 <= (value := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, got {text}")
        return value

    return number
