"""Compare bit for bit the results of `exact` and `sdpa` attention, and measure the cost of `exact`.

Logits of the shipped target on held-out prompts, in random compositions (chunks, trees, other sessions' rows; see
benchmarks.support.batch_invariance) and in steps as full as a verifier's may be, are compared with one-token decode, in
float32 and bfloat16. `sdpa` in bfloat16 is the control: if none of its rows differs, the comparison shows nothing, and
the run fails. Its argmax flips against exact decode are counted, too. The cost is the thread time of a step, exact over
sdpa, each the median of interleaved steps. On a GPU (`--device cuda`) it is the wall clock's, and the run fails, since
there exact attention does not hold.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.support import old_harness as harness
from benchmarks.support.batch_invariance import compose, crowd, decode, differing_bits, pool_for
from benchmarks.support.old_harness import Criterion, Pair
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel

DTYPES = ("float32", "bfloat16")
TREE = (0, 0, 1, 1, 2, 3, 3, 5, 6, 8, 9, 10, 10, 12)
"""Parent rows of 14 nodes; row 0 is the last committed token."""
PREFIX = 500
"""Tokens in the cache before a timed step."""
AT_ONCE = 3
"""Sessions of one composition."""
FULL = EngineConfig.token_budget
"""Rows of a full step."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets by which oneDNN chooses its kernels."""


@dataclass
class BitComparison:
    """Count the bits that differ with one attention backend in one dtype."""

    rows: int = 0
    rows_differing: int = 0
    bits: int = 0
    flips: int = 0
    """Rows whose argmax is not the reference's."""


def texts(pair: Pair, positions: int, length: int) -> list[list[int]]:
    """Return held-out prompts one after another, cut into sequences; `positions` tokens in all."""
    ids = [token for prompt in pair.encode(harness.prompts("heldout")).values() for token in prompt]
    ids = (ids * -(-positions // len(ids)))[:positions]
    return [ids[i : i + length] for i in range(0, positions, length)]


def tally(
    model: TargetModel, sequences: Sequence[list[int]], expected: Sequence[torch.Tensor], compositions: int
) -> BitComparison:
    """Compare every composition, and full steps, with the logits expected, `[T, V]` for each sequence."""
    found = BitComparison()
    rng = np.random.default_rng(0)
    for first in range(0, len(sequences), AT_ONCE):
        group = sequences[first : first + AT_ONCE]
        for composition in (*(compose(model, group, rng) for _ in range(compositions)), crowd(model, group, FULL)):
            for row in composition:
                reference = expected[first + row.sequence][row.position]
                bits = differing_bits(row.logits, reference)
                found.rows += 1
                found.bits += bits
                found.rows_differing += bits > 0
                found.flips += int(row.logits.argmax()) != int(reference.argmax())
    return found


def step(pool: KVPool, prefix: np.ndarray, parents: Sequence[int]) -> Segment:
    """Return a segment of the last token and a random tree below it."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return Segment(
        tokens=np.arange(100, 101 + len(parents)),
        chain=1,
        parents=np.array(parents, dtype=np.int64),
        positions=len(prefix) + np.array(depths),
        prefix=prefix,
        slots=pool.allocate(1 + len(parents)),
        wants_logits=True,
    )


def step_seconds(models: Sequence[TargetModel], parents: Sequence[int], rounds: int) -> list[list[float]]:
    """Return the seconds that each model needs for `rounds` interleaved steps, plan included, after PREFIX tokens.

    They are the thread's own CPU time, so that other work on the machine does not count; on a GPU by the wall clock.
    """
    on_gpu = models[0].device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    pools = [pool_for(model, PREFIX + 64) for model in models]
    segments = [step(pool, pool.allocate(PREFIX), parents) for pool in pools]
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 3):
        for model, pool, segment, times in zip(models, pools, segments, seconds, strict=True):
            began = clock()
            batch = PackedBatch.pack([segment], model.device)
            model.forward(batch, model.attention.plan([segment], pool))
            if on_gpu:
                torch.cuda.synchronize(model.device)
            if number >= 3:  # the first ones warm up
                times.append(clock() - began)
    return seconds


def failure(differing: Mapping[str, int], control: BitComparison, where: str) -> str | None:
    """Return why the run shows no exactness on the processor `where`; differing: number of bits by dtype."""
    if any(differing.values()):
        found = ", ".join(f"{bits} bits in {dtype}" for dtype, bits in differing.items())
        return f"exact attention does not hold on this processor ({where}): {found} differ, must be 0"
    if not control.rows_differing:
        return f"none of {control.rows} rows of the control, sdpa in bfloat16, differs: this comparison shows nothing"
    return None


def processor() -> str:
    """Describe the processor, since its kernels decide on the bits: a comparison holds for one processor only."""
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    found = ", ".join(name for name in INSTRUCTIONS if name in flags) or "instructions unknown"
    return f"{found}; oneDNN limited to {limit}" if limit else found


def main(argv: Sequence[str] | None = None) -> None:
    disable_progress_bar()
    parser = harness.arguments("exact", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(argv)
    pair = Pair.in_folder(options.models)
    target = pair.target
    positions, length, compositions, rounds = options.size.pick(
        smoke=(24, 24, 1, 2), quick=(60, 60, 1, 10), full=(2_000, 200, 4, 100)
    )
    sequences = texts(pair, positions, length)
    differing: dict[str, int] = {}
    ratios: dict[str, dict[str, float]] = {}
    control = BitComparison()
    for dtype in DTYPES:
        exact = TargetModel.load(target, dtype=dtype, device=options.device, attention="exact", threads=1)
        sdpa = TargetModel.load(target, dtype=dtype, device=options.device, attention="sdpa", threads=1)
        expected = [decode(exact, tokens) for tokens in sequences]
        found = tally(exact, sequences, expected, compositions)
        differing[dtype] = found.bits
        print(f"{dtype} exact: {found.rows} rows, {found.rows_differing} differ, in {found.bits} bits", flush=True)
        if dtype == "bfloat16":
            control = tally(sdpa, sequences, [decode(sdpa, tokens) for tokens in sequences], compositions)
            print(f"{dtype} sdpa:  {control.rows} rows, {control.rows_differing} differ, in {control.bits} bits")
            flips = tally(sdpa, sequences, expected, 1)
            print(f"{dtype} sdpa against exact: {flips.flips} of {flips.rows} argmax flips", flush=True)
        ratios[dtype] = {}
        for name, parents in (("1", ()), ("14", TREE)):
            slow, fast = (statistics.median(times) for times in step_seconds((exact, sdpa), parents, rounds))
            ratios[dtype][name] = round(slow / fast, 3)
            print(f"{dtype} N={name:<2} on {PREFIX}: {slow * 1e3:.2f} ms exact, {fast * 1e3:.2f} ms sdpa", flush=True)
    where = processor() if options.device == "cpu" else exact.hardware
    failed = failure(differing, control, where)
    harness.finish(
        {
            "positions": positions,
            "compositions": compositions,
            "differing_bits": differing,
            "control_differing": control.rows_differing,
            "step_time_ratio": ratios,
            "full_step_rows": FULL,
            "processor": where,
        },
        [Criterion("exact attention keeps its bits, and sdpa does not", "yes", failed or "yes", failed is None)],
        options.size,
    )


if __name__ == "__main__":
    main()
