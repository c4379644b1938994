"""Offer five times the work that one verifier can do: it must keep its goodput and refuse the rest at once.

The peak is found first, with more and more sessions in a closed loop, each level for the same time; goodput is the
tokens per second of sessions that finish, counted at their end. Then sessions arrive in an open loop, at random, at
five times the rate at which they finished at the peak. They go straight to the verifier, so that no coordinator refuses
them first. A refused session waits as long as the refusal says, tries once more and gives up. Goodput is counted as
before; sessions that are unfinished at the end count nothing.

All clients share one core with this process. So that the verifier is overloaded and not they, prompts are long: each
keeps the verifier busy for longer, and costs its client no more. A run in which that core was nearly always busy, at
the peak or later, has measured its own load generator: it says so, and fails.

A separate measurement shows that refusals come before any computation: with every place taken by a stalled session
(its device confirms nothing), the engine process's CPU time is read while prompts of 1,000 tokens are refused, and
again for one such prompt that is admitted. The prefix cache is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.support import old_harness as harness
from benchmarks.support import proc
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recording import DraftRecording
from benchmarks.support.draft_replay.swarm import Swarm, record_drafts
from benchmarks.support.long_prompts import LongPrompts
from benchmarks.support.malicious_client import RawStream
from benchmarks.support.old_harness import Criterion, Pair, Size, quantile
from edge_agent.sdk.types import Options
from outrider.wire.v1 import session_pb2 as pb

TIMES = 5.0
"""Factor by which the offered rate exceeds the rate of finished sessions at the peak."""
WANTED = 0.8
PROCESSES = 2
CONTEXT = 400
"""Tokens before each prompt of the loads, held-out code. Without them a client needs as much CPU time for a session as
the verifier."""
KV_SLOTS = 49_152
"""Room for every place's prompt, output and nodes, so that places are what the verifier runs out of."""
PROMPT_TOKENS = 1_000
STALLED_TOKENS = 128
"""Tokens requested by a session that will stall, which it does after `run_ahead` of them, 64."""
FILLED_S = 1_800.0
"""Time after which stalled sessions that have not taken all places never will. No figure depends on it."""
SEED = 20_261_121


@dataclass(frozen=True)
class LoadSizes:
    """Set how much is measured."""

    levels: tuple[int, ...]
    """Sessions in the closed loop."""
    places: int
    """Most sessions that the verifier serves at once; its default is 64."""
    warm_s: float
    """Time before counting, at every level: longer than its sessions take, which all begin together."""
    count_s: float
    """Time that is counted at every level."""
    overload_warm_s: float
    """Longer than a session takes while every place is taken, because none can have ended before."""
    overload_s: float
    """Time that is counted in the open loop."""
    tokens: int
    """Most tokens of a session."""
    prompts: int
    refusals: int = 100
    """Prompts that are refused while every place is taken."""


FULL = LoadSizes((8, 16, 32, 64), 64, 45.0, 75.0, 45.0, 120.0, tokens=96, prompts=8)
QUICK = LoadSizes((4,), 16, 1.0, 3.0, 4.0, 6.0, tokens=32, prompts=2)
SMOKE = LoadSizes((2,), 8, 0.5, 2.0, 1.0, 2.0, tokens=24, prompts=1, refusals=5)


@dataclass(frozen=True)
class EndedSession:
    """Hold the outcome of a session, and when it ended."""

    at: float
    outcome: SessionOutcome


@dataclass(frozen=True)
class Goodput:
    """Count what was finished in a window of time."""

    tokens_per_s: float
    sessions_per_s: float

    @classmethod
    def of(cls, ended: Sequence[EndedSession], begin: float, end: float) -> Goodput:
        inside = [e.outcome for e in ended if begin < e.at <= end and e.outcome.finished]
        return cls(sum(o.tokens for o in inside) / (end - begin), len(inside) / (end - begin))


class LoadGenerator:
    """Run the sessions of a load on a swarm, and keep their outcomes."""

    def __init__(self, swarm: Swarm, recorded: DraftRecording, core: int) -> None:
        """core: the CPU on which the clients run."""
        self._swarm = swarm
        self._recorded = recorded
        self._core = core
        self._draw = random.Random(SEED)
        self.ended: list[EndedSession] = []
        self.busy = 0.0
        """Share of the counted time for which the clients' core was busy, the greatest of all loads so far."""

    async def closed(self, level: int, lengths: LoadSizes) -> Goodput:
        """Run `level` sessions at once, each followed by the next, and return the goodput.

        At least `level` sessions are counted, however long they take.
        """
        begin = time.monotonic() + lengths.warm_s
        end = begin + lengths.count_s

        def counted() -> list[float]:
            return sorted(e.at for e in self.ended if e.at > begin)

        async def play() -> None:
            while time.monotonic() < end or len(counted()) < level:
                await self._one()

        await asyncio.gather(*(play() for _ in range(level)), self._watch(begin, end))
        return Goodput.of(self.ended, begin, max(end, counted()[level - 1]))

    async def open(self, per_s: float, lengths: LoadSizes) -> tuple[Goodput, int]:
        """Start sessions at random times, `per_s` on average; return the goodput and the number of sessions.

        Sessions that are unfinished at the end are not waited for.
        """
        began = time.monotonic()
        begin = began + lengths.overload_warm_s
        end = begin + lengths.overload_s
        watching = asyncio.create_task(self._watch(begin, end))
        arrivals: set[asyncio.Task[None]] = set()
        due, came = began, 0
        while (due := due + self._draw.expovariate(per_s)) < end:
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.create_task(self._one())
            arrivals.add(task)
            task.add_done_callback(arrivals.discard)
            came += 1
        await watching
        for task in arrivals:
            task.cancel()
        await asyncio.gather(*arrivals, return_exceptions=True)
        return Goodput.of(self.ended, begin, end), came

    async def _watch(self, begin: float, end: float) -> None:
        """Note for how much of this time the clients' core was busy."""
        await asyncio.sleep(begin - time.monotonic())
        before, began = proc.busy_seconds(self._core), time.monotonic()
        await asyncio.sleep(end - began)
        self.busy = max(self.busy, (proc.busy_seconds(self._core) - before) / (time.monotonic() - began))

    async def _one(self) -> None:
        outcome = await self._swarm.play(SessionJob(self._draw.randrange(len(self._recorded.recordings))))
        self.ended.append(EndedSession(time.monotonic(), outcome))


@dataclass(frozen=True)
class RefusalCost:
    """Compare the cost of refusing a session with the cost of admitting it."""

    refusal_ms: float
    """CPU time that the engine process spends on refusing a long prompt."""
    front_ms: float
    """CPU time that the front spends on refusing it."""
    prompt_ms: float
    """CPU time that the engine process spends on such a prompt that is admitted."""
    refused: int
    asked: int = 100
    """Prompts that had to be refused."""


async def refusal_cost(where: ServiceAddress, front: int, engine: int, sizes: LoadSizes) -> RefusalCost:
    """Fill every place, request more sessions, then free one place and take it. front, engine: process ids.

    Raises RuntimeError if a place that was given back is not to be had.
    """
    prompt = [2 + i % 1_000 for i in range(PROMPT_TOKENS)]
    async with StalledSession.filling(where, sizes.places) as stalled:
        idle = await _cpu(engine, 1.0)
        before, began = (proc.cpu_seconds(front), proc.cpu_seconds(engine)), time.monotonic()
        refused = sum([await _refused(where, prompt) for _ in range(sizes.refusals)])
        seconds = time.monotonic() - began
        front_s, engine_s = proc.cpu_seconds(front) - before[0], proc.cpu_seconds(engine) - before[1]
        await stalled[0].leave()
        await asyncio.sleep(0.5)
        before_s, began = proc.cpu_seconds(engine), time.monotonic()
        if await _refused(where, prompt):
            raise RuntimeError("a place that was given back is not to be had")
        prompt_s = proc.cpu_seconds(engine) - before_s - idle * (time.monotonic() - began)
    return RefusalCost(
        refusal_ms=1000.0 * max(0.0, engine_s - idle * seconds) / sizes.refusals,
        front_ms=1000.0 * front_s / sizes.refusals,
        prompt_ms=1000.0 * prompt_s,
        refused=refused,
        asked=sizes.refusals,
    )


class StalledSession:
    """Run a session whose device answers pings but confirms no token, so that it stalls after `run_ahead` tokens."""

    def __init__(self, raw: RawStream) -> None:
        self._raw = raw
        self._still = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())

    @classmethod
    @contextlib.asynccontextmanager
    async def filling(cls, where: ServiceAddress, places: int) -> AsyncIterator[list[StalledSession]]:
        """Open as many stalled sessions as there are places, and yield them once none moves."""
        async with contextlib.AsyncExitStack() as stack:
            raws = [await stack.enter_async_context(RawStream(where)) for _ in range(places)]
            for raw in raws:
                await raw.open([1], STALLED_TOKENS)
            stalled = [cls(raw) for raw in raws]
            try:
                for one in stalled:
                    await asyncio.wait_for(one._still.wait(), FILLED_S)
                yield stalled
            finally:
                await asyncio.gather(*(one.leave() for one in stalled))

    async def leave(self) -> None:
        self._raw.call.cancel()
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def _receive(self) -> None:
        received = 0
        while (message := await self._raw.receive()) is not None:
            received += len(message.commit.token)
            if received >= STALLED_TOKENS // 2:
                self._still.set()
            if message.WhichOneof("kind") == "ping":
                await self._raw.send(pong=pb.Pong(nonce=message.ping.nonce))


async def _refused(where: ServiceAddress, prompt: list[int]) -> bool:
    """Request one token; return whether it was refused as Overloaded. Raises any other error."""
    async with RawStream(where) as raw:
        try:
            await raw.open(prompt, 1)
            await raw.read_to_end()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return True
    return False


async def _cpu(pid: int, seconds: float) -> float:
    """Return the CPU seconds per second that a process uses, measured for `seconds`."""
    before, began = proc.cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (proc.cpu_seconds(pid) - before) / (time.monotonic() - began)


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("overload", __doc__).parse_args(argv)
    pair = Pair.in_folder(options.models)
    lengths = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    _, device_core = harness.cores()
    heldout = harness.prompts("heldout", lengths.prompts)
    prompts = {
        one.id: ids for one, ids in zip(heldout, LongPrompts(pair).after(CONTEXT, "Part 1", heldout), strict=True)
    }
    settings = {
        "greedy": Options(max_tokens=lengths.tokens, temperature=0.0, seed=0),
        "T=0.8": Options(max_tokens=lengths.tokens, temperature=0.8, seed=SEED),
    }
    places = ("--max-sessions", str(lengths.places), "--kv-slots", str(KV_SLOTS))
    async with harness.one_verifier(pair, *places, prefix_cache=False, coordinator=False) as cluster:
        verifier = cluster.verifiers[0]
        front, engine, *_ = proc.family(verifier.pid)
        where = ServiceAddress(verifier.address, wait_s=0.0)  # asks once more, when the refusal says, and gives up
        cost = await refusal_cost(where, front, engine, lengths)
        recorded = await record_drafts(ServiceAddress(verifier.address), pair, prompts, settings)
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch, "recorded.json")
            recorded.save(file)
            async with Swarm(file, where, processes=PROCESSES, cores=[device_core]) as swarm:
                closed, load = (LoadGenerator(swarm, recorded, device_core) for _ in range(2))
                peak_level, peak = await _peak(closed, lengths)
                offered = TIMES * peak.sessions_per_s
                rate, came = await load.open(offered, lengths)
    print(f"open loop, {offered:.1f} arrivals/s: {rate.tokens_per_s:.1f} tokens/s")
    print(f"the clients' core was busy for {load.busy:.0%} of it, and for {closed.busy:.0%} of a closed loop at most")
    busy = max(closed.busy, load.busy)
    if busy > proc.MOST_BUSY:
        print("the load generator was the limit: the goodput of this run says nothing about the verifier")
    _finish(cost, peak_level, peak, rate, came, [e.outcome for e in load.ended], busy, options.size)


async def _peak(load: LoadGenerator, lengths: LoadSizes) -> tuple[int, Goodput]:
    rates = {}
    for level in lengths.levels:
        rates[level] = rate = await load.closed(level, lengths)
        print(
            f"closed loop, {level:>2} sessions: {rate.tokens_per_s:.1f} tokens/s, {rate.sessions_per_s:.2f} finished/s"
        )
        _check([e.outcome for e in load.ended])
    return max(rates.items(), key=lambda item: item[1].tokens_per_s)


def _check(outcomes: Sequence[SessionOutcome]) -> None:
    """Raise RuntimeError if a session failed, other than by being refused as Overloaded."""
    wrong = Counter(o.error for o in outcomes if o.error and not o.error.startswith("Overloaded"))
    if wrong:
        raise RuntimeError(f"sessions failed: {wrong.most_common(3)}")


def _finish(
    cost: RefusalCost,
    peak_level: int,
    peak: Goodput,
    rate: Goodput,
    came: int,
    outcomes: Sequence[SessionOutcome],
    busy: float,
    size: Size = Size.FULL,
) -> None:
    """Print what was found and the last line; exits with status 1 if a criterion is not met.

    busy: share of the time for which the clients' core was busy.
    """
    refusals = [1000.0 * seconds for outcome in outcomes for seconds in outcome.refused_s]
    shed = sum(outcome.error.startswith("Overloaded") for outcome in outcomes)
    second = sum(bool(outcome.refused_s) and outcome.finished for outcome in outcomes)
    failures = Counter(o.error[:160] for o in outcomes if o.error and not o.error.startswith("Overloaded"))
    errors = sum(failures.values())
    for error, count in failures.most_common():
        print(f"error, {count} times: {error}")
    wrong = sum(outcome.wrong > 0 for outcome in outcomes)
    share = rate.tokens_per_s / peak.tokens_per_s if peak.tokens_per_s else 0.0
    print(
        f"{came} came, {sum(o.finished for o in outcomes)} finished ({second} at the second attempt), {shed} gave up"
        f" after two refusals; {len(refusals)} refusals took {statistics.median(refusals):.1f} ms in the middle"
        if refusals
        else f"{came} came and nobody was refused"
    )
    print(
        f"a refusal of {PROMPT_TOKENS} tokens costs the engine {cost.refusal_ms:.2f} ms of CPU and the front"
        f" {cost.front_ms:.2f}; the same prompt let in costs the engine {cost.prompt_ms:.0f} ms"
        f" ({cost.refused} of {cost.asked} refused)"
    )
    harness.finish(
        {
            "goodput_share_of_peak": round(share, 3),
            "peak_tokens_per_s": round(peak.tokens_per_s, 1),
            "peak_sessions": peak_level,
            "overload_tokens_per_s": round(rate.tokens_per_s, 1),
            "arrivals": came,
            "shed": shed,
            "refusals": len(refusals),
            "refusal_p50_ms": harness.rounded(quantile(refusals, 0.50)),
            "refusal_p99_ms": harness.rounded(quantile(refusals, 0.99)),
            "engine_ms_per_refusal": round(cost.refusal_ms, 3),
            "front_ms_per_refusal": round(cost.front_ms, 3),
            "engine_ms_per_prompt": round(cost.prompt_ms, 1),
            "differing": wrong,
            "errors": errors,
            "clients_core_busy": round(busy, 3),
        },
        [
            Criterion.bound("goodput under overload over the peak", share, at_least=WANTED),
            Criterion.bound("share of the time for which the clients' core was busy", busy, at_most=proc.MOST_BUSY),
            Criterion.none("sessions whose output differs", wrong),
            Criterion.none("sessions that ended by an error", errors),
            Criterion.none("prompts that were let in with every place taken", cost.asked - cost.refused),
            Criterion.bound(
                "CPU time of a refusal over that of the prompt", cost.refusal_ms / cost.prompt_ms, at_most=0.1
            ),
        ],
        size,
    )


if __name__ == "__main__":
    asyncio.run(main())
