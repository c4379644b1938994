"""Decode speculatively across a network: devices draft, verifiers check.

`from outrider import Client` and the other names of the device's SDK import `edge_agent`, and only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_agent import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    sdk = importlib.import_module("edge_agent") if name[:1].isupper() else None  # a submodule's name is lower case
    if sdk is None or name not in sdk.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sdk, name)
