"""Decode speculatively across a network: devices draft, verifiers check.

`from outrider import Client, AsyncClient` gives the device's SDK, which is imported only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_agent import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("edge_agent"), name)
