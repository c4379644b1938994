"""Encode the answer to a device's request as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceAnswer:
    """Hold one finished or failed request. Times are Unix seconds."""

    device: int
    kind: str
    prompt: str
    options: dict[str, Any]
    """The options given to `AsyncClient.generate`; the same options give the same tokens again."""
    begun: float
    ended: float
    first: float = 0.0
    """When its first token arrived."""
    tokens: list[int] = field(default_factory=list)
    guessed: int = 0
    """Number of its tokens that the device had proposed."""
    steps: int = 0
    attaches: int = 0
    swaps_s: list[float] = field(default_factory=list)
    release: str = ""
    """Draft at the end of the request: hex digits of its file's SHA-256."""
    refused: dict[str, int] = field(default_factory=dict)
    """Releases that the device has refused so far, by kind of refusal."""
    error: str = ""

    @classmethod
    def of_line(cls, line: bytes) -> DeviceAnswer:
        return cls(**json.loads(line))

    @property
    def line(self) -> str:
        return json.dumps(asdict(self))
