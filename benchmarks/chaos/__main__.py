"""Inject faults into a cluster under load, from a seeded schedule, and check every session's output.

Two coordinators over one Redis, three verifiers of a tiny random target (the last one with TLS, their steps paced) and
sessions of the SDK in device processes behind an emulated wide-area link. Every session must deliver the tokens of an
undisturbed run of the same request, or end by a typed error after a beginning of them. Meanwhile no session and epoch
may have two owners, and no place or KV slot may be kept (benchmarks.chaos.invariants); now and then, and at the end,
all sessions are let end, and nothing may be left. benchmarks.chaos.faults has the kinds of faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import redis.asyncio as redis_client

from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.faults import KINDS, FaultKind, Testbed
from benchmarks.chaos.findings import Findings, InjectedFault, criteria
from benchmarks.chaos.invariants import HELD_S, Invariants, places_in
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.schedule import PlannedFault, schedule
from benchmarks.chaos.sessions import TIMEOUT_S, Device, Load, SessionOutcome, SessionRequest
from benchmarks.support import old_harness as harness
from benchmarks.support.old_harness import Pair
from benchmarks.support.reference import TIE, Reference, ReferenceSampling
from coordinator.cluster import stand_apart

SEED = 20_261_125
QUIET_EVERY = 25
"""Faults after which all sessions are let end, to see that nothing is left of them."""
TRIES = 3
"""Times that a fault is injected, at most, until it strikes something."""
MOST_HOLD_S = 1.0
"""Length of a fault of the smoke run, at most."""
PROMPT = 96
"""Tokens of a prompt, at most."""
SLOTS_BESIDE = 128
"""KV slots that a session takes beside those of its sequence, at most: for nodes, and for the rows of a step."""
SAMPLING = {"greedy": {"temperature": 0.0, "seed": 0}, "sampled": {"temperature": 0.8, "seed": 7}}


@dataclass(frozen=True)
class ChaosSize:
    faults: int = 310  # some strike nothing
    verifiers: int = 3
    devices: int = 4
    per_device: int = 3
    prompts: int = 6
    tokens: int = 112


FULL = ChaosSize()
QUICK = ChaosSize(faults=6)
SMOKE = ChaosSize(faults=7, verifiers=2, devices=2, per_device=2, prompts=2, tokens=48)


async def undisturbed(devices: Sequence[Device], requests: Sequence[SessionRequest]) -> dict[str, tuple[int, ...]]:
    """Return every request's output before anything is broken. Raises RuntimeError if one fails."""
    outcomes = await asyncio.gather(*(devices[i % len(devices)].run(one) for i, one in enumerate(requests)))
    for outcome in outcomes:
        if outcome.error:
            raise RuntimeError(f"{outcome.request.name} failed undisturbed: {outcome.error}: {outcome.message}")
    return {outcome.request.name: outcome.tokens for outcome in outcomes}


async def inject(
    cluster: ChaosCluster, devices: Sequence[Device], kind: FaultKind, planned: PlannedFault
) -> InjectedFault:
    """Inject one fault, hold it and undo it."""
    bed = Testbed(cluster, devices, random.Random(planned.seed))
    began = time.monotonic()
    async with kind.inject(bed) as struck:
        await asyncio.sleep(planned.hold_s)
    flags = {"leaves_verifier": kind.leaves_verifier, "refuses": kind.refuses}
    ended = time.monotonic()
    return InjectedFault(kind.name, struck.what, began, ended, device=struck.device, missed=struck.missed, **flags)


async def disturb(
    cluster: ChaosCluster,
    devices: Sequence[Device],
    load: Load,
    plan: Sequence[PlannedFault],
    invariants: Invariants,
) -> list[InjectedFault]:
    """Inject all faults of a plan, one after another, while sessions run; a line for each."""
    faults = []
    began = time.monotonic()
    for number, planned in enumerate(plan, start=1):
        await cluster.settled(min(2, len(cluster.verifiers)))
        load.check()
        await asyncio.sleep(planned.pause_s)
        for again in range(TRIES):
            fault = await inject(cluster, devices, KINDS[planned.kind], replace(planned, seed=planned.seed + again))
            faults.append(fault)
            if not fault.missed:
                break
        failed = sum(bool(outcome.error) for outcome in load.outcomes)
        print(
            f"{number:>3}/{len(plan)} at {fault.began - began:6.1f} s ({fault.began:.1f}), {fault.kind}: {fault.what},"
            f" {fault.ended - fault.began:.1f} s; {len(load.outcomes)} sessions ended, {failed} by an error",
            flush=True,
        )
        if number % QUIET_EVERY == 0 and number < len(plan):
            await load.end()
            invariants.rested(f"after fault {number}", *await leaks(cluster))
            load.begin()
    return faults


async def leaks(cluster: ChaosCluster) -> tuple[int, int, float]:
    """Return the places and KV slots that are still taken at rest, and the seconds until nothing changed any more."""
    await cluster.settled(len(cluster.verifiers))
    began = time.monotonic()
    while True:
        places, slots, complete = 0, 0, False
        with contextlib.suppress(grpc.RpcError, redis_client.RedisError, OSError):
            held = await places_in(cluster.redis.address)
            places = len({session for sessions in held.values() for session in sessions})
            status = await cluster.status(cluster.coordinators[0])
            loads = [verifier.telemetry for verifier in status.verifiers]
            slots = sum(load.kv_used for load in loads)
            complete = len(loads) == len(cluster.verifiers)
        waited = time.monotonic() - began
        if (complete and not (places or slots)) or waited > HELD_S:
            return places, slots, waited
        await asyncio.sleep(0.5)


def tie_by(target: Path, expected: dict[str, tuple[int, ...]]) -> Any:
    """Return a function that says whether an output's first difference is one of rounding alone."""

    def tie(outcome: SessionOutcome) -> bool:
        wanted = expected[outcome.request.name]
        pairs = enumerate(zip(outcome.tokens, wanted, strict=False))
        at = next((i for i, (got, right) in pairs if got != right), None)
        if at is None:
            return False
        options = outcome.request.options
        settings = ReferenceSampling(temperature=options["temperature"], seed=options["seed"])
        before = [*wanted[:at]]
        return Reference(str(target)).gap([*outcome.request.prompt], before, settings, [outcome.tokens[at]]) <= TIE

    return tie


@contextlib.asynccontextmanager
async def devices_of(cluster: ChaosCluster, scratch: Path, size: ChaosSize) -> AsyncIterator[list[Device]]:
    """Run the device processes with their links; every other one drafts."""
    devices = [Device(n, cluster, scratch, "ngram" if n % 2 == 0 else None) for n in range(size.devices)]
    async with contextlib.AsyncExitStack() as stack:
        for device in devices:
            for way in device.ways:
                await stack.enter_async_context(way)
            cluster.balancers.append(device.front)
        try:
            await asyncio.gather(*(device.start() for device in devices))
            yield devices
        finally:
            await asyncio.gather(*(device.kill() for device in devices))


async def run(options: Any, scratch: Path, size: ChaosSize) -> None:
    count = options.faults or size.faults
    kinds = [KINDS[options.only]] if options.only else list(KINDS.values())
    if options.size is harness.Size.SMOKE and not options.only:
        kinds = [replace(kind, hold_s=(0.2, MOST_HOLD_S)) for kind in kinds if kind.smoke]
    plan = schedule([kind.rate for kind in kinds], count, options.seed)
    prompts = Pair.in_folder(options.models).encode(harness.prompts("heldout", size.prompts))
    common = {"max_tokens": size.tokens, "ignore_eos": True, "timeout": TIMEOUT_S}
    requests = [
        SessionRequest(f"{name} {setting}", tuple(ids[-PROMPT:]), {**common, **sampling})
        for name, ids in prompts.items()
        for setting, sampling in SAMPLING.items()
    ]
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    invariants = Invariants(PROMPT + size.tokens + SLOTS_BESIDE)
    journal = Journal(options.logs, on_line=invariants.read)
    began = time.monotonic()
    async with ChaosCluster(scratch, options.models, size.verifiers, journal, options.previous) as cluster:
        async with devices_of(cluster, scratch, size) as devices:
            expected = await undisturbed(devices, requests)
            tokens = sum(map(len, expected.values()))
            sessions = size.devices * size.per_device
            print(f"{len(plan)} faults, seed {options.seed}, {sessions} sessions at once, {tokens} tokens known")
            load = Load(devices, requests, size.per_device)
            watching = asyncio.create_task(invariants.watch(cluster, load))
            load.begin()
            faults = await disturb(cluster, devices, load, plan, invariants)
            await load.end()
            places, slots, rest_s = await leaks(cluster)
            if not watching.cancel():
                watching.result()  # what has ended it
            for device in devices:
                journal.read(device.name, device.log)
            for kind in KINDS.values():
                if kind.logs:
                    journal.excuse(kind.logs, sum(fault.kind == kind.name for fault in faults))
        target = cluster.target
        findings = Findings(expected, faults, tie_by(target, expected))
        for outcome in load.outcomes:
            findings.add(outcome)
    report(options, findings, journal, invariants, (places, slots, rest_s), time.monotonic() - began)


def report(
    options: Any,
    findings: Findings,
    journal: Journal,
    invariants: Invariants,
    left: tuple[int, int, float],
    seconds: float,
) -> None:
    """Print what was found, and the last line; exits with status 1 where a promise was broken."""
    places, slots, rest_s = left
    for line in (*findings.notes, *findings.long_pauses()):
        print(line)
    for name, counter in (("ERROR", journal.errors), ("WARNING", journal.warnings), ("gRPC's core", journal.grpc)):
        for kind, count in counter.most_common(40):
            print(f"{name}, {count} times: {kind}")
    for kind in journal.errors:
        print(f"first of its kind: {journal.examples[kind][:1500]}")
    for violation in invariants.violations.values():
        print(f"VIOLATED {violation}")
    print(f"all places and slots came back {rest_s:.1f} s after the last session" if not places + slots else "LEAKED")
    counts = findings.counts
    long = [pause for pause in findings.pauses if pause.seconds > 5.0]
    result = {
        "faults": sum(not fault.missed for fault in findings.faults),
        "sessions": counts["sessions"],
        **{key: counts[key] for key in ("differing", "lost", "stuck")},
        "leaked_places": places,
        "leaked_slots": slots,
        "worst_pause_s": round(findings.worst_pause_s, 1),
        **{key: counts[key] for key in ("equal", "ties", "untyped", "refused", "out_of_reach", "killed")},
        "violations": len(invariants.violations),
        "looks": invariants.looks,
        "error_lines": len(journal.errors),
        "most_equal_warnings": max(journal.warnings.values(), default=0),
        "errors": dict(findings.errors.most_common()),
        "lost_by_kind": dict(findings.lost_by_kind.most_common()),
        "refused_by_kind": dict(findings.refused_by_kind.most_common()),
        "worst_pause_s_by_kind": findings.by_kind(),
        "pauses_over_5_s": len(long),
        "pauses_over_5_s_with_verifier": sum(1 for pause in long if pause.fault is None or pause.fault.leaves_verifier),
        "pauses_unexplained": sum(pause.fault is None for pause in long),
        "faults_that_struck_nothing": sum(fault.missed for fault in findings.faults),
        "seed": options.seed,
        "minutes": round(seconds / 60.0, 1),
    }
    harness.finish(result, criteria(result, seconds / 60.0), options.size)


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("chaos", __doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="of the schedule: the same seed, the same faults")
    parser.add_argument("--faults", type=int, help="how many (default: 310; 30 with --quick)")
    parser.add_argument("--only", choices=sorted(KINDS), metavar="KIND", help=f"one kind alone: {', '.join(KINDS)}")
    parser.add_argument(
        "--previous", type=Path, help="checkout of an earlier version: rolling upgrades take verifiers back to it first"
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all processes")
    options = parser.parse_args(argv)
    size = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as scratch:
        stand_apart(Path(scratch))
        await run(options, Path(scratch), size)


if __name__ == "__main__":
    asyncio.run(main())
