"""What an operator's own function keeps out of the traffic log."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.traffic.passage import Passage
from outrider.core.errors import BadRequest

Redact = Callable[[NDArray[np.int32], str, str], Any]
"""(tokens `[n]`, traffic class, tenant) -> mask `[n]`, true where a token must not be recorded."""


def load(name: str) -> Redact:
    """The function that `module:function` names. Raises BadRequest."""
    module, _, function = name.partition(":")
    try:
        found: Redact = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(
            f"traffic_redact is {name!r}, which cannot be imported: {error}", field="traffic_redact"
        ) from error
    if not callable(found):
        raise BadRequest(f"traffic_redact is {name!r}, which is no function", field="traffic_redact")
    return found


class NoMask(ValueError):
    """What a hook returned is none. Its message has nothing of the text in it."""


def hidden_in(tokens: NDArray[np.int32], of: Passage, redact: Redact) -> NDArray[np.bool_]:
    """Which of the tokens must not be recorded. of: whose they are. Raises whatever the hook does, and NoMask for a
    mask that is none."""
    mask = np.asarray(redact(tokens, of.traffic_class, of.tenant))
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise NoMask(f"the mask is {mask.dtype} {mask.shape}, must be bool {tokens.shape}")
    return mask.copy()
