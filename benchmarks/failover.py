"""Break eleven things under running sessions, and count what their users notice.

Two verifiers share one core; the coordinator and a device with several sessions share another. Between device and
verifiers are links with a round trip of 20 ms. The target is throttled to `--step-ms`, so that a text takes seconds.
Each trial begins its sessions together, breaks something once the fastest has between 20% and 60% of its tokens, opens
one more session, and mends it after some seconds. Of the verifiers, and of the links to them, it breaks the one that
most sessions use.

`identical` are texts that equal, token for token, those of the same requests before anything was broken. `rounding` are
those whose other tokens score as well as the target's own but for rounding; `differing` all further ones. `refused`
counts sessions that could not be opened, `lost` others that ended by an error, and `stuck` those without an end after
two minutes. `moved` counts sessions that connected more than once. A pause is the time between two deliveries, or
before the first, that ended after the fault: `pause_s` is the longest of a trial's running sessions, in the median of
the trials, and `longest_pause_s` of all trials. `new_session_s` is the longest time to the first token of a session
that was opened meanwhile. The first row breaks nothing.

Caveat: a verifier that starts again takes seconds of the core that the other verifier computes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import harness, proc
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.network_proxy import DelayProxy, Link
from benchmarks.support.target_reference import TIES, Reference
from benchmarks.support.throttled_verifier import environment
from coordinator.cluster import Child, Cluster
from coordinator.store.embedded_redis import EmbeddedServer
from edge_agent.bench.users import GREEDY, SAMPLED
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError, Unavailable

NEAR = Link(rtt_ms=20.0)
"""The link between the device and a verifier while nothing is wrong."""
FAR = Link(rtt_ms=4_000.0)
"""The link to every verifier while the coordinator alone is near."""
SLOW = Link(rtt_ms=400.0, up_bps=16_000.0, down_bps=16_000.0)
STUCK_S = 120.0
SETTLE_S = 120.0
"""Time after which verifiers that are not back and idle never will be. No figure depends on it."""
SEED = 20_260_801
PROMPT_TOKENS = 512
"""Most tokens of a prompt."""
NOTHING = "nothing"


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    trials: int = 3
    """Of each fault."""
    sessions: int = 4
    tokens: int = 128
    faults: tuple[str, ...] = ()
    """Some of `FAULTS`, all if it is empty."""


QUICK = Setting(trials=1, sessions=3, tokens=64, faults=(NOTHING, "verifier killed", "link cut"))


@dataclass(frozen=True)
class Request:
    """Hold what a session asks for."""

    number: int
    prompt: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass
class Session:
    """Runs one request, and notes when it got tokens."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    delivered_s: list[float] = field(default_factory=list)
    address: str = ""
    """The verifier that serves it, or served it last."""
    connects: int = 0
    error: str = ""
    ended: bool = False
    begun_s: float = field(default_factory=time.monotonic)

    async def run(self, client: AsyncClient) -> None:
        """Run it to its end; an error, or time that runs out, is noted."""
        try:
            async with asyncio.timeout(STUCK_S), await client.stream(self.request.prompt, **self.request.options) as on:
                while (chunk := await on.next()) is not None:
                    self.tokens += chunk.token_ids
                    self.delivered_s.append(time.monotonic())
                    self.address, self.connects = on.statistics.address, on.statistics.attaches
        except TimeoutError:
            self.error = "stuck"
        except OutriderError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = True

    def pause_s(self, since: float) -> float:
        """Return the longest time without a token that ended after `since`; 0 if it had all of them before."""
        times = [self.begun_s, *self.delivered_s]
        return max((end - begin for begin, end in itertools.pairwise(times) if end > since), default=0.0)


class BreakableLink(DelayProxy):
    """A link that can also swallow the bytes of one direction, as a half-open connection does."""

    _swallows_down = False

    @contextlib.asynccontextmanager
    async def half_open(self) -> AsyncIterator[None]:
        """Swallow what comes from the verifier; the connection is reset at the end, since bytes of it are lost."""
        self._swallows_down = True
        try:
            yield
        finally:
            self._swallows_down = False
            self.reset_connections()

    async def _read(self, reader: asyncio.StreamReader, most: int, *, up: bool) -> bytes:
        data = await super()._read(reader, most, up=up)
        while data and self._swallows_down and not up:
            data = await super()._read(reader, most, up=up)
        return data


class Testbed:
    """Runs Redis, a coordinator, two verifiers and the links to them, and brings back what was broken."""

    def __init__(self, cluster: Cluster, redis: EmbeddedServer, pair: Pair, state: Path) -> None:
        self.redis = redis
        self.cluster = cluster
        self.links: dict[str, BreakableLink] = {}
        """By the verifier's address."""
        self._verifier_core, self._device_core = harness.cores()
        models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1", "--dtype", "float32")
        self._verifier_options = (*models, "--engine-args", '{"ngram": false, "prefix_cache": false}', "--drain-s", "1")
        self._coordinator_options = ("--redis", redis.url, "--state-dir", str(state))

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, pair: Pair, step_ms: float) -> AsyncIterator[Testbed]:
        async with contextlib.AsyncExitStack() as stack:
            redis = stack.enter_context(EmbeddedServer())
            cluster = await stack.enter_async_context(harness.cluster(throttle=environment(step_ms)))
            bed = cls(cluster, redis, pair, Path(os.environ["OUTRIDER_EDGE_CACHE_DIR"], "state"))
            await bed.start_coordinator("127.0.0.1:0")
            await asyncio.gather(*(bed.start_verifier("127.0.0.1:0") for _ in range(2)))
            for verifier in cluster.verifiers:
                link = BreakableLink(verifier.address, link=NEAR)
                bed.links[verifier.address] = await stack.enter_async_context(link)
            yield bed

    async def start_coordinator(self, address: str) -> None:
        await self.cluster.start_coordinator("--listen", address, *self._coordinator_options, cores=[self._device_core])

    async def start_verifier(self, address: str) -> None:
        cores = [self._verifier_core]
        await self.cluster.start_verifier("--listen", address, *self._verifier_options, cores=cores)

    @property
    def coordinator(self) -> Child:
        if self.cluster.coordinator is None:
            raise Unavailable("there is no coordinator")
        return self.cluster.coordinator

    def serving(self, sessions: Sequence[Session]) -> Child:
        """Return the verifier that serves most of these sessions."""
        dialled = {link.address: address for address, link in self.links.items()}
        ((most, _),) = Counter(dialled.get(one.address, one.address) for one in sessions).most_common(1)
        return next(child for child in self.cluster.verifiers if child.address == most)

    async def restore(self) -> None:
        """Start verifiers that have ended again, and wait until the coordinator knows both, and neither has a session.

        Raises Unavailable if that takes too long.
        """
        verifiers = self.cluster.verifiers
        verifiers[:] = [child for child in verifiers if child.running]
        missing = [address for address in self.links if all(child.address != address for child in verifiers)]
        await asyncio.gather(*map(self.start_verifier, missing))
        until = time.monotonic() + SETTLE_S
        while not await self._idle():
            if time.monotonic() > until:
                raise Unavailable(f"the cluster has not come to rest within {SETTLE_S:.0f} s")
            await asyncio.sleep(0.2)

    async def _idle(self) -> bool:
        found = await harness.verifiers(self.cluster.address)
        loads = [one.telemetry for one in found if one.address in self.links and not one.telemetry.draining]
        return len(loads) == len(self.links) and not any(load.live_sessions or load.kv_used for load in loads)


# --- faults

Fault = Callable[[Testbed, Child], AbstractAsyncContextManager[None]]
"""Breaks something when it is entered and mends it when it is left. It gets the verifier that serves most sessions."""


def once(act: Callable[[Testbed, Child], Awaitable[None] | None]) -> Fault:
    """Return the fault of an act that is not mended, as what has ended is started again after the trial."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed, serving: Child) -> AsyncIterator[None]:
        done = act(bed, serving)
        if done is not None:
            await done
        yield

    return fault


async def nothing(_bed: Testbed, _serving: Child) -> None:
    """Break nothing."""


async def kill_verifier(_bed: Testbed, serving: Child) -> None:
    await serving.kill()


def kill_engine(_bed: Testbed, serving: Child) -> None:
    """Kill the process that computes, the largest one of the verifier's."""
    os.kill(max(proc.family(serving.pid)[1:], key=proc.rss_mb), signal.SIGKILL)


async def drain(bed: Testbed, serving: Child) -> None:
    """Drain the verifier, as an operator does."""
    verifiers = await harness.verifiers(bed.cluster.address)
    verifier_id = next(one.verifier_id for one in verifiers if one.address == serving.address)
    command = ("-m", "coordinator.cli", "verifiers", "drain", verifier_id, "--coordinator", bed.cluster.address)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.DEVNULL, cwd=harness.ROOT
    )
    if await process.wait():
        raise Unavailable(f"`outrider verifiers drain {verifier_id}` failed")


@contextlib.asynccontextmanager
async def frozen(_bed: Testbed, serving: Child) -> AsyncIterator[None]:
    serving.signal_group(signal.SIGSTOP)
    try:
        yield
    finally:
        serving.signal_group(signal.SIGCONT)


async def restart_verifiers(bed: Testbed, _serving: Child) -> None:
    """Kill all verifiers, and start them again at once: the sessions have nowhere to go meanwhile."""
    addresses = [child.address for child in bed.cluster.verifiers]
    await asyncio.gather(*(child.kill() for child in bed.cluster.verifiers))
    bed.cluster.verifiers.clear()
    await asyncio.gather(*map(bed.start_verifier, addresses))


@contextlib.asynccontextmanager
async def coordinator_killed(bed: Testbed, _serving: Child) -> AsyncIterator[None]:
    address = bed.cluster.address
    await bed.coordinator.kill()
    try:
        yield
    finally:
        await bed.start_coordinator(address)


@contextlib.asynccontextmanager
async def redis_killed(bed: Testbed, _serving: Child) -> AsyncIterator[None]:
    """Kill Redis, and start it again without what it held."""
    bed.redis.stop()
    try:
        yield
    finally:
        bed.redis.start()


@contextlib.asynccontextmanager
async def link_cut(bed: Testbed, serving: Child) -> AsyncIterator[None]:
    """Let nothing pass on the link, not even the end of a connection."""
    link = bed.links[serving.address]
    link.blackhole()
    try:
        yield
    finally:
        link.lift()


def link_half_open(bed: Testbed, serving: Child) -> AbstractAsyncContextManager[None]:
    return bed.links[serving.address].half_open()


@contextlib.asynccontextmanager
async def link_slow(bed: Testbed, serving: Child) -> AsyncIterator[None]:
    link = bed.links[serving.address]
    link.link = SLOW
    try:
        yield
    finally:
        link.link = NEAR


@contextlib.asynccontextmanager
async def verifiers_far(bed: Testbed, serving: Child) -> AsyncIterator[None]:
    for link in bed.links.values():
        link.link = FAR
    try:
        yield
    finally:
        for link in bed.links.values():
            link.link = NEAR


FAULTS: Mapping[str, tuple[Fault, float]] = {
    NOTHING: (once(nothing), 0.0),
    "verifier killed": (once(kill_verifier), 0.0),
    "engine process killed": (once(kill_engine), 0.0),
    "verifier frozen": (frozen, 10.0),
    "verifier drained": (once(drain), 0.0),
    "verifiers restarted": (once(restart_verifiers), 0.0),
    "coordinator killed": (coordinator_killed, 3.0),
    "Redis killed": (redis_killed, 3.0),
    "link cut": (link_cut, 10.0),
    "link half open": (link_half_open, 10.0),
    "link slow": (link_slow, 5.0),
    "verifiers far": (verifiers_far, 30.0),
}
"""Name -> the fault, and the seconds after which it is mended."""


# --- trials


@dataclass
class Trial:
    """Hold the sessions that ran when something broke, and the one that was opened after that."""

    sessions: list[Session]
    opened: Session
    broken_s: float

    @property
    def pause_s(self) -> float:
        return max(one.pause_s(self.broken_s) for one in self.sessions)

    @property
    def new_session_s(self) -> float | None:
        """Return the time of the opened session's first token; None if it was refused."""
        return self.opened.delivered_s[0] - self.opened.begun_s if self.opened.delivered_s else None


async def run_trial(bed: Testbed, client: AsyncClient, name: str, requests: Sequence[Request], begin: float) -> Trial:
    """Run a trial. requests: of its sessions, the last one's for that which is opened later. begin: share of tokens."""
    await bed.restore()
    fault, hold_s = FAULTS[name]
    sessions = [Session(request) for request in requests[:-1]]
    running = [asyncio.create_task(session.run(client)) for session in sessions]
    enough = begin * requests[0].options["max_tokens"]
    while not (all(one.tokens for one in sessions) and max(len(one.tokens) for one in sessions) >= enough):
        if all(task.done() for task in running):
            raise Unavailable(f"no session came so far that {name!r} could be tried: {sessions[0].error}")
        await asyncio.sleep(0.01)
    serving, broken_s = bed.serving([one for one in sessions if not one.ended]), time.monotonic()

    async def open_another() -> Session:
        opened = Session(requests[-1])
        await opened.run(client)
        return opened

    breaking = fault(bed, serving)
    entering = asyncio.create_task(breaking.__aenter__())
    await asyncio.sleep(0.1)
    opening = asyncio.create_task(open_another())
    await entering
    try:
        await asyncio.sleep(hold_s)
    finally:
        await breaking.__aexit__(None, None, None)
    await asyncio.gather(*running)
    return Trial(sessions, await opening, broken_s)


@dataclass
class Judge:
    """Compares texts with those of the same requests before anything was broken."""

    expected: Sequence[Sequence[int]]
    """The texts by the number of their request."""
    target: Path

    def rounds(self, session: Session) -> bool:
        """Return whether a text is the target's own but for rounding."""
        sampling = {name: session.request.options[name] for name in ("temperature", "seed")}
        prompt, limit = session.request.prompt, session.request.options["max_tokens"]
        gaps = Reference(str(self.target), "float32").gaps(prompt, session.tokens, sampling, limit)
        return max(gaps, default=0.0) <= TIES["float32"]

    def row(self, name: str, trials: Sequence[Trial]) -> dict[str, Any]:
        """Return the row of a fault."""
        sessions = [one for trial in trials for one in (*trial.sessions, trial.opened)]
        whole = [one for one in sessions if not one.error]
        other = [one for one in whole if one.tokens != self.expected[one.request.number]]
        rounding = sum(map(self.rounds, other))
        stuck = sum(one.error == "stuck" for one in sessions)
        refused = sum(trial.opened.error not in ("", "stuck") and not trial.opened.tokens for trial in trials)
        first_s = [trial.new_session_s for trial in trials if trial.new_session_s is not None]
        for one in sessions:
            if one.error:
                say(f"{name}: {one.error}")
        return {
            "fault": name,
            "sessions": len(sessions),
            "moved": sum(one.connects > 1 for one in sessions),
            "identical": len(whole) - len(other),
            "rounding": rounding,
            "differing": len(other) - rounding,
            "refused": refused,
            "lost": len(sessions) - len(whole) - stuck - refused,
            "stuck": stuck,
            "pause_s": rounded(statistics.median(trial.pause_s for trial in trials)),
            "longest_pause_s": rounded(max(trial.pause_s for trial in trials)),
            "new_session_s": rounded(max(first_s, default=None)),
        }


def requests_of(options: argparse.Namespace, pair: Pair, setting: Setting) -> list[Request]:
    """Return the requests of one trial: greedy and sampled ones in turn, one more than sessions."""
    prompts = harness.prompts(options, pair, setting.sessions + 1, most=PROMPT_TOKENS).values()
    common = {"max_tokens": setting.tokens, "ignore_eos": True}
    return [
        Request(number, tuple(ids), common | (SAMPLED if number % 2 else GREEDY)) for number, ids in enumerate(prompts)
    ]


async def measure(options: argparse.Namespace) -> None:
    pair, setting = Pair.of(options), QUICK if options.quick else Setting()
    requests, draw, rows = requests_of(options, pair, setting), random.Random(SEED), []
    async with Testbed.running(pair, options.step_ms) as bed:
        reroute = {address: link.address for address, link in bed.links.items()}
        at_once = EdgeSettings(draft_workers=setting.sessions + 1)
        async with AsyncClient(
            coordinator=bed.cluster.address, reroute=reroute, timeout=None, settings=at_once
        ) as client:
            undisturbed = [Session(request) for request in requests]
            await asyncio.gather(*(one.run(client) for one in undisturbed))
            if errors := [one.error for one in undisturbed if one.error]:
                raise Unavailable(f"a session failed before anything was broken: {errors[0]}")
            judge = Judge([one.tokens for one in undisturbed], pair.target)
            for name in options.faults or setting.faults or FAULTS:
                trials = []
                for turn in range(setting.trials):
                    share = draw.uniform(0.2, 0.6)
                    trials.append(await run_trial(bed, client, name, harness.rotated(requests, turn), share))
                rows.append(judge.row(name, trials))
                say(rows[-1])
    harness.finish(
        options,
        f"{setting.trials} trials a fault with {setting.sessions} sessions of {setting.tokens} tokens, target throttled"
        f" to {options.step_ms:g} ms a step.",
        rows,
        **{name: sum(row[name] for row in rows) for name in ("sessions", "differing", "lost", "stuck")},
        longest_pause_s=max(row["longest_pause_s"] for row in rows),
    )


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("failover", __doc__)
    parser.add_argument("--step-ms", type=float, default=40.0, help="throttle the target to this step time")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="FAULT", help=f"some of: {', '.join(FAULTS)}")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
