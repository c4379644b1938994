"""Compile the kernels for GPUs that need not be there, and fail if one takes too much shared memory.

usage: python triton_compiles.py <dtype>
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cloud_verifier.engine import triton_race
from cloud_verifier.engine.torch_backend.kernels import triton_kernels
from cloud_verifier.engine.torch_backend.kernels.triton_kernels import PRECISION, launch_constants

TYPES = {"float32": "*fp32", "bfloat16": "*bf16"}
FLOATS = ("outs", "maxima", "sums", "inverses", "bests", "seconds", "tops", "slacks", "masses", "totals")
INTS = ("width", "window", "k_head", "k_row", "v_head", "v_row", "q_head", "q_row", "vocabulary")
WIDE = ("keys_of_positions", "tokens")
COUNTS = ("ids", "before", "near")
SHARED_BYTES = {80: 101_376, 90: 232_448}
"""Shared memory of a block on the smallest GPU for this capability: sm_86 and 89 run code for sm_80."""


def check(name: str, pointer: str, constants: dict[str, Any], warps: int, stages: int) -> None:
    kernel = getattr(triton_kernels, f"{name}_kernel", None) or getattr(triton_race, f"{name}_kernel")
    signature = dict.fromkeys(kernel.arg_names, pointer)
    signature |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "i32") | {"tables": "*i32"}
    signature |= dict.fromkeys(WIDE, "*i64") | dict.fromkeys(COUNTS, "*i32")
    signature |= {"scale": "fp32", "softcap": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    for capability, room in SHARED_BYTES.items():
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        if made.metadata.shared > room:
            raise SystemExit(f"{name} takes {made.metadata.shared} bytes of shared memory of {room} on {capability}")


def main(dtype: str) -> None:
    kind = TYPES[dtype]
    groups, dim = 2, 256
    cut, most_warps, stages = launch_constants(groups, dim, dim, getattr(torch, dtype))
    ways = {"CAPPED": True, "WINDOWED": True, "PRECISION": PRECISION, "WIDEN": False}
    check("attend", kind, cut | ways, most_warps, stages)
    pads = {name: cut[name] for name in ("DV", "DV_PAD")}
    check("write", kind, pads | {"DK": dim, "DK_PAD": cut["DK_PAD"]}, warps=1, stages=2)
    merging = pads | {"GROUPS": groups, "GROUPS_PAD": triton.next_power_of_2(groups), "SINKS": True}
    check("merge", kind, merging, warps=4, stages=2)
    for name in ("race", "rank"):
        check(name, kind, {"BLOCK": triton_race.BLOCK}, warps=4, stages=2)


if __name__ == "__main__":
    main(sys.argv[1])
