"""Load a verifier for an hour with 32 sessions that join, finish, cancel, die and hang, and one attacker.

The light clients (benchmarks.support.draft_replay) run in four processes, of which one is killed every 20 s; the plan
is drawn from a seed. Beside them a malicious client goes through its attacks (benchmarks.support.malicious_client) in
every other phase of PHASE_S: its effect on its neighbours is the difference, on one machine in one run, between the
phases with it and those without. It runs on the devices' core, so that its own work is part of that difference. The
prefix cache is on. Once a second the verifier's processes and its reports to the coordinator are sampled. After all
clients have gone, sessions are opened until the engine is full to the last slot; KV slots that it no longer promises
are counted as missing. Every honest output is compared with the target's, recorded before. benchmarks.soak_findings has
the criteria.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak_findings import SessionTally, SoakFindings, VerifierSample
from benchmarks.support import old_harness as harness
from benchmarks.support import proc
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob
from benchmarks.support.draft_replay.recording import DraftRecording
from benchmarks.support.draft_replay.swarm import Swarm, record_drafts, settings
from benchmarks.support.malicious_client import MaliciousClient, RawStream
from benchmarks.support.old_harness import Pair
from benchmarks.support.phases import AlternatingPhases
from outrider.core.errors import Overloaded
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import VerifierTelemetry

KV_SLOTS = 16_384
MAX_SEQUENCE = 2_048
TREE_NODES = 64
"""Slots promised to a session beside prompt and answer: the verifier's default."""
PHASE_S = 30.0
"""Length of a phase with the attacker, and of one without; a shorter run is cut into LEAST_PHASES."""
LEAST_PHASES = 6
SETTLE_S = 8.0
"""Time after a session's end in which its slots must come back."""
SEED = 20_261_121
ENDINGS = {"finish": 0.60, "cancel": 0.20, "drop": 0.16, "silence": 0.04}


@dataclass(frozen=True)
class SoakSize:
    """Set how much load there is, and for how long."""

    minutes: float = 60.0
    sessions: int = 32
    processes: int = 4
    prompts: int = 12
    tokens: int = 96
    """Most tokens of a session."""
    kill_every_s: float = 20.0
    """Time between two kills of a process of clients."""
    warm_s: float = 8.0
    """Time until all sessions have joined, which counts for neither kind of phase."""


FULL = SoakSize()
QUICK = SoakSize(minutes=0.5, prompts=4, tokens=64, kill_every_s=8.0)
SMOKE = SoakSize(minutes=0.4, sessions=4, processes=2, prompts=1, tokens=32, kill_every_s=4.0, warm_s=2.0)


def draw(rng: random.Random, recorded: DraftRecording) -> SessionJob:
    """Draw a session's job and how it ends."""
    (ending,) = rng.choices(list(ENDINGS), list(ENDINGS.values()))
    recording = rng.randrange(len(recorded.recordings))
    after = rng.randint(1, len(recorded.recordings[recording].call.output))
    return SessionJob(recording, drafted=rng.random() < 0.9, ending=ending, after=after)  # type: ignore[arg-type]


async def take_turns(
    swarm: Swarm, recorded: DraftRecording, rng: random.Random, tally: SessionTally, until: float
) -> None:
    """Play one session after another until `until`."""
    await asyncio.sleep(rng.uniform(0.0, 2.0))
    while time.monotonic() < until:
        job = draw(rng, recorded)
        tally.add(job, await swarm.play(job))
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def killer(swarm: Swarm, rng: random.Random, size: SoakSize, until: float) -> None:
    """Send SIGKILL to a process of clients now and then, and start another one in its place."""
    while time.monotonic() + size.kill_every_s < until:
        await asyncio.sleep(size.kill_every_s)
        await swarm.kill(rng.randrange(size.processes))
        await swarm.add()


class VerifierMonitor:
    """Sample the verifier until cancelled."""

    def __init__(self, coordinator: str, pid: int) -> None:
        self._coordinator = coordinator
        self._pid = pid
        self.samples: list[VerifierSample] = []
        self.without_lease = 0
        """Samples at which the verifier's lease had run out, as it does where a busy machine delays its reports."""

    async def run(self) -> None:
        while True:
            if (status := await self._status()) is None:
                self.without_lease += 1
            else:
                front, *others = map(proc.rss_mb, proc.family(self._pid))
                load = status.telemetry
                sample = VerifierSample(time.monotonic(), front, sum(others), load.kv_used, load.live_sessions)
                self.samples.append(sample)
            await asyncio.sleep(1.0)

    async def _status(self) -> pb.VerifierStatus | None:
        verifiers = (await harness.status(self._coordinator)).verifiers
        return verifiers[0] if verifiers else None

    async def at_rest(self) -> VerifierTelemetry:
        """Wait until no memory and no session is in use, or time is up, and return the load then."""
        until = time.monotonic() + SETTLE_S
        while True:
            status = await self._status()
            late = time.monotonic() > until
            if status is None and late:
                raise RuntimeError(f"no verifier is registered {SETTLE_S:.0f} s after the last session: it must be")
            if status is not None and (late or not (status.telemetry.kv_used or status.telemetry.live_sessions)):
                return status.telemetry
            await asyncio.sleep(0.5)


async def missing_slots(where: ServiceAddress, capacity: int) -> int:
    """Return the number of slots that an empty engine does not promise; 0 if sessions can fill it to the last one."""
    async with contextlib.AsyncExitStack() as held:
        left, most = capacity, MAX_SEQUENCE + TREE_NODES
        while left > most and await _holds(held, where, most):
            left -= most
        low, high = 0, min(left, most)  # what is promised of the rest, and what is not
        if left <= most and await _holds(held, where, left):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            async with contextlib.AsyncExitStack() as tried:
                fits = await _holds(tried, where, middle)
            low, high = (middle, high) if fits else (low, middle)
            await asyncio.sleep(0.3)
        return left - low


async def _holds(stack: contextlib.AsyncExitStack, where: ServiceAddress, slots: int) -> bool:
    """Open a session that is promised so many slots and hold it; return False if the engine refuses."""
    if slots < TREE_NODES + 2:
        return True
    raw = await stack.enter_async_context(RawStream(where))
    await raw.place(wait_s=10.0)
    await raw.open([1], slots - TREE_NODES - 1)
    try:
        while (message := await raw.receive()) is not None:
            if message.WhichOneof("kind") == "commit":
                return True
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, Overloaded):
            raise
    return False


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("soak", __doc__)
    parser.add_argument("--minutes", type=float, help="how long (default: 60; 1 with --quick)")
    options = parser.parse_args(argv)
    pair = Pair.in_folder(options.models)
    size = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    seconds = 60.0 * (options.minutes or size.minutes)
    _, device_core = harness.cores()
    prompts = pair.encode(harness.prompts("heldout", size.prompts))
    async with harness.one_verifier(pair, "--kv-slots", str(KV_SLOTS)) as cluster:
        verifier = cluster.verifiers[0]
        where = ServiceAddress(verifier.address, cluster.address)
        recorded = await record_drafts(where, pair, prompts, settings(size.tokens))
        watcher = VerifierMonitor(cluster.address, verifier.pid)
        tally, phases = SessionTally(), AlternatingPhases()
        attacker = MaliciousClient(where, random.Random(SEED), next(iter(prompts.values())))
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch, "recorded.json")
            recorded.save(file)
            async with Swarm(file, where, processes=size.processes, cores=[device_core]) as swarm:
                print(
                    f"{size.sessions} sessions on {len(recorded.recordings)} recordings for {seconds:.0f} s", flush=True
                )
                await _soak(swarm, recorded, tally, attacker, phases, watcher, size, seconds)
        rest = await watcher.at_rest()
        missing = 0 if rest.kv_used else await missing_slots(where, rest.kv_capacity)
    findings = SoakFindings(
        tally,
        attacker,
        phases,
        watcher.samples,
        seconds,
        without_lease=watcher.without_lease,
        kv_used=rest.kv_used,
        live=rest.live_sessions,
        missing=missing,
    )
    findings.report(options.size)


async def _soak(
    swarm: Swarm,
    recorded: DraftRecording,
    tally: SessionTally,
    attacker: MaliciousClient,
    phases: AlternatingPhases,
    watcher: VerifierMonitor,
    size: SoakSize,
    seconds: float,
) -> None:
    until = time.monotonic() + seconds
    phase_s = min(PHASE_S, (seconds - size.warm_s) / LEAST_PHASES)
    players = [
        asyncio.create_task(take_turns(swarm, recorded, random.Random(SEED + i), tally, until))
        for i in range(size.sessions)
    ]
    attacking = phases.alternate(attacker.run, phase_s=phase_s, warm_s=size.warm_s, until=until)
    others = (watcher.run(), attacking, killer(swarm, random.Random(SEED), size, until))
    tasks = {*players, *map(asyncio.create_task, others)}
    try:
        while not all(task.done() for task in players):
            done, _ = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # what has failed shows nothing any more
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
