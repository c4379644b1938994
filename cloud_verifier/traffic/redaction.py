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


def hidden_in(passage: Passage, redact: Redact) -> NDArray[np.bool_]:
    """Which positions of its prompt and its tokens, `[p + n]`, must not be recorded. Asked about both at once: what is
    to be hidden may begin in one and end in the other. Raises whatever the hook does, and ValueError for a mask that is
    none."""
    tokens = np.concatenate([passage.prompt, passage.tokens])
    mask = np.asarray(redact(tokens, passage.traffic_class, passage.tenant))
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise ValueError(f"the mask is {mask.dtype} {mask.shape}, must be bool {tokens.shape}")
    return mask
