"""Compile the kernels for GPUs that need not be there, and print how much shared memory each takes.

usage: python triton_compiles.py <groups> <dim> <dtype> <capped> <windowed>
       python triton_compiles.py race <dtype>
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

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
FLOATS = ("outs", "maxima", "sums", "inverses", "bests", "seconds", "tops", "slacks", "masses", "totals")
INTS = ("width", "window", "k_head", "k_row", "v_head", "v_row", "q_head", "q_row", "vocabulary")
WIDE = ("keys_of_positions", "tokens")
COUNTS = ("ids", "before", "near")


def shared(name: str, capability: int, pointer: str, constants: dict[str, Any], warps: int, stages: int) -> int:
    """Return bytes of shared memory; raises if the kernel does not compile."""
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
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return int(made.metadata.shared)


def main(groups: int, dim: int, dtype: str, capped: bool, windowed: bool) -> None:
    cut, most_warps, stages = launch_constants(groups, dim, dim, getattr(torch, dtype))
    ways = {"CAPPED": capped, "WINDOWED": windowed, "PRECISION": PRECISION, "WIDEN": False}
    pads = {name: cut[name] for name in ("DV", "DV_PAD")}
    writing = pads | {"DK": dim, "DK_PAD": cut["DK_PAD"]}
    merging = pads | {"GROUPS": groups, "GROUPS_PAD": triton.next_power_of_2(groups), "SINKS": True}
    kind = TYPES[dtype]
    for capability in (80, 90):
        took = [
            shared("attend", capability, kind, cut | ways, most_warps, stages),
            shared("write", capability, kind, writing, warps=1, stages=2),
            shared("merge", capability, kind, merging, warps=4, stages=2),
        ]
        print(capability, *took)


def race(dtype: str) -> None:
    for capability in (80, 90):
        names = ("race", "rank")
        took = [shared(name, capability, TYPES[dtype], {"BLOCK": triton_race.BLOCK}, 4, 2) for name in names]
        print(capability, *took)


if __name__ == "__main__":
    if sys.argv[1] == "race":
        race(sys.argv[2])
        sys.exit()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *(value == "True" for value in sys.argv[4:6]))
