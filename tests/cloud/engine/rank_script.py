"""Run a rank for test_tensor_parallel.py: `rank_script.py WHAT DIRECTORY...`. The leader prints a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig import Rig, adversary, client, nothing, prompt_of, random_tree

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from cloud_verifier.engine.torch_backend.parallel.tensor_parallel import RankGroup, ShardedTarget
from outrider.core.errors import InternalError, ModelRefused, Unavailable
from outrider.core.sampling import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=11),
}


def pool_for(model: TargetModel) -> KVPool:
    return KVPool(model.layers, 128, dtype=model.torch_dtype, device=model.device)


def tree_logits(model: TargetModel, pool: KVPool) -> torch.Tensor:
    """Return logits `[rows, V]` of a chunk with a branching tree below it, then of a chain beside another tree."""
    rng = np.random.default_rng(3)

    def segment(chain: int, parents: list[int], prefix: np.ndarray) -> Segment:
        depth = [0] * chain
        for parent in parents:
            depth.append(depth[parent] + 1)
        rows, start = chain + len(parents), len(prefix)
        positions = [start + (row if row < chain else chain - 1 + depth[row]) for row in range(rows)]
        return Segment(
            rng.integers(0, model.vocab_size, rows),
            chain,
            np.asarray(parents, dtype=np.int64),
            np.asarray(positions, dtype=np.int64),
            prefix,
            pool.allocate(rows),
            True,
        )

    nothing_before = np.empty(0, dtype=np.int32)
    first = segment(9, [8, 8, 9, 9, 10], nothing_before)
    second = [segment(1, [0, 0, 1], first.slots[:9]), segment(5, [4], nothing_before)]
    logits = []
    for segments in ([first], second):
        batch = PackedBatch.pack(segments, model.device)
        logits.append(model.forward(batch, model.attention.plan(segments, pool)))
    return torch.cat(logits)


def sequences(model: TargetModel) -> dict[str, list[list[int]]]:
    """Return an engine's tokens for three devices at once: without a draft, random trees, an adversary."""
    out = {}
    for name, sampling in SAMPLINGS.items():
        rig = Rig(model, EngineConfig(kv_slots=512, token_budget=48, prefill_chunk=16))
        drafters = (nothing, random_tree, adversary([5, 6, 7, 8] * 8))
        for number, drafter in enumerate(drafters):
            joining = client(prompt_of(20 + 7 * number), drafter, 16, sampling=sampling, ignore_eos=True)
            rig.attach(f"s{number}", joining)
        rig.run()
        if any(one.errors for one in rig.clients.values()):
            raise RuntimeError(str([one.errors for one in rig.clients.values()]))
        out[name] = [list(one.device.received) for one in rig.clients.values()]
    return out


def report(**facts: Any) -> None:
    # The ranks share one pipe, where a single write stays whole; `print` writes the line's end apart.
    os.write(sys.stdout.fileno(), f"{json.dumps(facts)}\n".encode())


def equal(group: RankGroup, directories: list[str]) -> None:
    """Compare, on the leader, the results of all ranks together with its own."""
    for directory in directories:
        target = group.load(directory)
        if not group.leads:
            group.follow(target)
            continue
        deviation = check_numerics(target)
        pool = pool_for(target)
        together, delivered = tree_logits(target, pool), sequences(target)
        try:
            older = f"an older pool was used: {tree_logits(target, pool)}"
        except InternalError as error:
            older = str(error)
        again = tree_logits(target, pool_for(target))
        group.dismiss()
        single = TargetModel.load(directory)
        check_numerics(single)
        report(
            kind=Path(directory).name,
            deviation=deviation,
            difference=float((together - tree_logits(single, pool_for(single))).abs().max()),
            older=older,
            repeats=torch.equal(together, again),
            same=delivered == sequences(single),
            tokens=sum(map(len, delivered["greedy"] + delivered["sampled"])),
            differs_by_sampling=delivered["greedy"] != delivered["sampled"],
            heads=[layer.kv_heads for layer in target.layers],
            whole_heads=[layer.kv_heads for layer in single.layers],
            backend=target.backend,
        )


def refused(group: RankGroup, directories: list[str]) -> None:
    """Load directories, the last of which differs between ranks: all ranks are refused with the same reason."""
    *bad, mine, theirs = directories
    reasons = []
    loads: list[Callable[[], ShardedTarget]] = [lambda path=path: group.load(path) for path in bad]  # type: ignore[misc]
    loads.append(lambda: group.load(bad[0], attention="exact"))
    loads.append(lambda: group.load(mine if group.leads else theirs))
    for load in loads:
        try:
            load()
            reasons.append("")
        except ModelRefused as error:
            reasons.append(str(error))
    report(rank=group.info.rank, reasons=reasons)


def lost(group: RankGroup, directories: list[str]) -> None:
    """Let rank 1 die or stop in the midst of a session, where only a forward pass can notice."""
    target = group.load(directories[0])
    if not group.leads:
        forward, left = target.forward, 12  # some of them are the numerics check's

        def ending(*arguments: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            return forward(*arguments)

        target.forward = ending  # type: ignore[method-assign]
        group.follow(target)
    check_numerics(target)
    rig = Rig(target)
    rig.attach("s", client(prompt_of(12), nothing, 40, ignore_eos=True))
    for _ in range(2):
        began = time.monotonic()
        try:
            rig.run()
        except Unavailable as error:
            committed = rig.engine.counters.committed
            report(error=str(error), seconds=time.monotonic() - began, committed=committed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *given = sys.argv[1:]
    with RankGroup.join(timeout_s=4.0) as joined:
        {"equal": equal, "refused": refused, "lost": lost}[what](joined, given)
