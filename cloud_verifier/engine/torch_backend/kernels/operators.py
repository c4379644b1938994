"""Define operators of which torch.compile knows the shape of the result and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("outrider", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., torch.Tensor], empty: Callable[..., torch.Tensor]) -> Any:
    """Define an operator and return it.

    schema: `name(type argument, ...) -> Tensor`, as torch.library has it. run: computes the result, which must be
    contiguous. empty: returns a tensor of the result's shape and dtype.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"outrider::{name}", empty, lib=_library)
    return getattr(torch.ops.outrider, name)
