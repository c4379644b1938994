"""Load and ask the operator's own function that keeps tokens out of the traffic log."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest

Redact = Callable[[NDArray[np.int32], str, str], Any]
"""(tokens `[n]`, traffic class, tenant) -> mask `[n]`, true where a token must not be recorded."""


def load(name: str) -> Redact:
    """Return the function that `module:function` names. Raises BadRequest."""
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


def redaction_mask(redact: Redact, tokens: NDArray[np.int32], traffic_class: str, tenant: str) -> NDArray[np.bool_]:
    """Return which tokens must not be recorded, `[n]`.

    Raises ValueError if the hook raises or returns no mask, with a message that repeats nothing of the text.
    """
    try:
        mask = np.asarray(redact(tokens, traffic_class, tenant))
    except Exception as error:
        raise ValueError(type(error).__name__) from None
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise ValueError(f"the mask is {mask.dtype} {mask.shape}, must be bool {tokens.shape}")
    return mask.copy()
