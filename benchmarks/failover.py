"""The serving verifier dies in the middle of a session, and the client must not notice more than a pause.

Two verifiers, one session at a time, greedy and sampled in turn. At a random point between 20% and 80% of the tokens
the serving one is killed with its whole process group (kill -9) or stopped (SIGSTOP) and woken again once the standby
has taken over. The output is compared with that of an undisturbed run of the same request. The time is what the client
sees: from the signal to the first token that the next verifier commits, so that tokens which were on their way when
the signal fell do not count.

A woken verifier is a zombie: it does not know that its session has gone elsewhere. The benchmark keeps its stream open
and hands every Commit that still comes of it to the device, among those of the new stream. The device must refuse all
of them.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.lossless import SETTINGS, sampling
from benchmarks.support import harness
from benchmarks.support.harness import Pair
from benchmarks.support.stream_sniffer import (
    FailoverTrace,
    SniffedClient,
    StaleCommits,
    StreamSniffer,
    counting_stale_commits,
)
from coordinator.cluster import Child, Cluster
from edge_agent.sdk.client import AsyncClient
from outrider.wire.v1 import coordinator_pb2 as pb

TOKENS = 160
SEED = 20_260_801
KILL, STOP = "kill -9", "SIGSTOP"
SETTLE_S = 60.0


@dataclass(frozen=True)
class FailoverTrial:
    kind: str
    setting: str
    prompt: list[int]
    point: int
    """The signal falls once so many tokens were delivered."""


@dataclass(frozen=True)
class TrialResult:
    lost: int
    duplicated: int
    differing: int
    resume_ms: float
    watch: FailoverTrace


def trials(prompts: Sequence[list[int]], runs: int) -> list[FailoverTrial]:
    """Both kinds of death with both settings, in turn; the points come from a seeded generator."""
    draw = random.Random(SEED)
    low, high = TOKENS // 5, 4 * TOKENS // 5
    return [
        FailoverTrial(
            (KILL, STOP)[i // 2 % 2], ("greedy", "sampled")[i % 2], prompts[i % len(prompts)], draw.randint(low, high)
        )
        for i in range(runs)
    ]


def compare(got: Sequence[int], expected: Sequence[int]) -> tuple[int, int, int]:
    """Tokens lost, duplicated and differing."""
    lost = duplicated = differing = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if kind == "delete":
            lost += b - a
        elif kind == "insert":
            duplicated += d - c
        elif kind == "replace":
            differing += max(b - a, d - c)
    return lost, duplicated, differing


class FailoverRun:
    """A cluster of two verifiers, and the device."""

    def __init__(self, cluster: Cluster, pair: Pair, cache: Path) -> None:
        self._cluster = cluster
        self._flags = ("--model", str(pair.target), "--draft", str(pair.draft))
        self._core, self._device_core = harness.cores()
        self._tap = StreamSniffer()
        self._client_options = {"coordinator": cluster.address, "cache_dir": cache}

    async def run(self, plan: Sequence[FailoverTrial]) -> list[TrialResult]:
        os.sched_setaffinity(0, {self._device_core})
        outcomes = []
        async with SniffedClient(self._tap, **self._client_options) as client:
            await self._restore()
            for number, trial in enumerate(plan, start=1):
                undisturbed = await self._undisturbed(client, trial)
                outcome = await self._disturbed(client, trial, undisturbed)
                _tell(number, trial, outcome)
                outcomes.append(outcome)
                if number < len(plan):
                    await self._restore()
        return outcomes

    async def _undisturbed(self, client: AsyncClient, trial: FailoverTrial) -> Sequence[int]:
        self._tap.begin()
        completion = await client.generate(trial.prompt, **_options(trial))
        await self._tap.end()
        return completion.token_ids

    async def _disturbed(self, client: AsyncClient, trial: FailoverTrial, undisturbed: Sequence[int]) -> TrialResult:
        self._tap.begin()
        watch = self._tap.watch
        got: list[int] = []
        resumed = 0.0
        victim: Child | None = None
        stream = await client.stream(trial.prompt, **_options(trial))
        async with stream:
            async for chunk in stream:
                got += chunk.token_ids
                if victim is None and len(got) >= trial.point:
                    victim = self._serving()
                    watch.signalled = time.monotonic()
                    victim.signal_group(signal.SIGKILL if trial.kind == KILL else signal.SIGSTOP)
                elif victim is not None and watch.resumed and not resumed:
                    resumed = time.monotonic()
                    if trial.kind == STOP:
                        victim.signal_group(signal.SIGCONT)
        if victim is not None and trial.kind == STOP:
            victim.signal_group(signal.SIGCONT)
            await asyncio.sleep(0.2)  # what the zombie says after the end is refused too
        await self._tap.end()
        if not resumed or len(set(watch.addresses)) < 2:
            raise RuntimeError(f"no failover took place: {len(got)} tokens, attached at {watch.addresses}")
        return TrialResult(*compare(got, undisturbed), 1000.0 * (resumed - watch.signalled), watch)

    def _serving(self) -> Child:
        address = self._tap.watch.addresses[-1]
        return next(child for child in self._cluster.verifiers if child.running and child.address == address)

    async def _restore(self) -> None:
        """Two verifiers, known to the coordinator, holding nothing."""
        verifiers = self._cluster.verifiers
        for child in [child for child in verifiers if not child.running]:
            verifiers.remove(child)
        while len(verifiers) < 2:
            await self._cluster.start_verifier(*self._flags, cores=(self._core,))
        give_up = time.monotonic() + SETTLE_S
        wanted = {child.address for child in verifiers}
        while not _settled(await harness.status(self._cluster.address), wanted):
            if time.monotonic() > give_up:
                raise TimeoutError(f"the verifiers have not come to rest within {SETTLE_S:.0f} s")
            await asyncio.sleep(0.2)


def _settled(status: pb.StatusResponse, wanted: set[str]) -> bool:
    here = {verifier.address for verifier in status.verifiers}
    loads = [verifier.telemetry for verifier in status.verifiers]
    return here == wanted and not any(load.kv_used or load.live_sessions for load in loads)


def _options(trial: FailoverTrial) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **sampling(SETTINGS[trial.setting])}


def _tell(number: int, trial: FailoverTrial, outcome: TrialResult) -> None:
    watch = outcome.watch
    noticed, attached, resumed = (
        1000 * (end - begin)
        for begin, end in (
            (watch.signalled, watch.noticed),
            (watch.noticed, watch.attached),
            (watch.attached, watch.resumed),
        )
    )
    zombie = f", {watch.zombie_commits} late Commits" if trial.kind == STOP else ""
    print(
        f"{number:>2}  {trial.kind:<8} {trial.setting:<8} at token {trial.point:>3}: lost {outcome.lost},"
        f" duplicated {outcome.duplicated}, differing {outcome.differing}; resumed after {outcome.resume_ms:.0f} ms"
        f" (noticed {noticed:.0f}, attached +{attached:.0f}, token +{resumed:.0f}),"
        f" {len(watch.addresses)} attaches{zombie}",
        flush=True,
    )


async def main() -> None:
    options = harness.arguments("failover", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = [tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")]
    plan = trials(prompts, 4 if options.quick else 20)
    _, device_core = harness.cores()
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch, counting_stale_commits() as stale:
        async with harness.cluster(prefix_cache=False) as cluster:
            await cluster.start_coordinator(
                "--listen", "127.0.0.1:0", "--state-dir", str(Path(scratch, "state")), cores=[device_core]
            )
            outcomes = await FailoverRun(cluster, pair, Path(scratch, "cache")).run(plan)
    _finish(plan, outcomes, stale)


def _finish(plan: Sequence[FailoverTrial], outcomes: Sequence[TrialResult], stale: StaleCommits) -> None:
    by_kind = {
        kind: [o.resume_ms for t, o in zip(plan, outcomes, strict=True) if t.kind == kind] for kind in (KILL, STOP)
    }
    for kind, times in by_kind.items():
        print(f"{kind:<8} resumed after {harness.spread(times)} ms")
    zombies = [o.watch.zombie_commits for t, o in zip(plan, outcomes, strict=True) if t.kind == STOP]
    print(
        f"zombies said {sum(zombies)} Commits after the device had gone elsewhere (per run: {zombies});"
        f" the device refused {stale.refused}, accepted {stale.accepted} and had ended before the others came"
    )
    times = [outcome.resume_ms for outcome in outcomes]
    result = {
        "runs": len(outcomes),
        "lost": sum(outcome.lost for outcome in outcomes),
        "duplicated": sum(outcome.duplicated for outcome in outcomes),
        "differing": sum(outcome.differing for outcome in outcomes),
        "resume_ms_p50": round(statistics.median(times), 1),
        "resume_ms_max": round(max(times), 1),
        "kill9_resume_ms_p50": round(statistics.median(by_kind[KILL]), 1),
        "kill9_resume_ms_max": round(max(by_kind[KILL]), 1),
        "sigstop_resume_ms_p50": round(statistics.median(by_kind[STOP]), 1),
        "sigstop_resume_ms_max": round(max(by_kind[STOP]), 1),
        "zombie_commits": sum(zombies),
        "zombie_refused": stale.refused,
        "zombie_accepted": stale.accepted,
    }
    harness.finish(result)
    if not stale.refused:
        sys.exit("no zombie's Commit reached the device, so none was seen to be refused")
    if result["lost"] or result["duplicated"] or result["differing"] or stale.accepted:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
