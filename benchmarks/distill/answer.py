"""Carry what a device reports of one request as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceAnswer:
    """One finished request, or one that failed. Times are Unix seconds."""

    device: int
    kind: str
    prompt: str
    options: dict[str, Any]
    """As given to `AsyncClient.generate`: the same again gives the same tokens."""
    begun: float
    ended: float
    first: float = 0.0
    """When its first token was there."""
    tokens: list[int] = field(default_factory=list)
    guessed: int = 0
    """Of the tokens, those that the device had proposed."""
    steps: int = 0
    attaches: int = 0
    swaps_s: list[float] = field(default_factory=list)
    release: str = ""
    """Draft at the end: hex digits of its file's SHA-256."""
    refused: dict[str, int] = field(default_factory=dict)
    """Of the device so far: releases not taken, by kind."""
    error: str = ""

    @classmethod
    def of_line(cls, line: bytes) -> DeviceAnswer:
        return cls(**json.loads(line))

    @property
    def line(self) -> str:
        return json.dumps(asdict(self))
