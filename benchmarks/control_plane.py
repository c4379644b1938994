"""Measure what the coordinators of a large fleet do: decide about windows, take reports, open and resume sessions.

Real coordinator processes run over a real Redis, with verifiers that exist only as reports
(benchmarks.support.fake_verifiers): each reports its sessions every second, with telemetry that goes on from second to
second. First all sessions are opened. Then reports alone are counted in Redis, and then this process opens and resumes
sessions beside them, at a fixed rate whatever the answers take; for each that is opened an old one is closed. At last a
coordinator is killed, and the time runs until every verifier has decisions that were made from a report of later. All
this is repeated for each number of coordinators. The figures of the last line are the worst of these.

decision_age_p99_s: of the decisions that a verifier has when the next answer comes, so the greatest age that they
reach. ms_per_session_decision: CPU time of the coordinators' threads that decide. open_p99_ms: from the time at which a
session was due to be opened. redis_commands_per_report: all that Redis runs, those of scripts included, while there are
reports alone. lost: sessions that hold no place at the end, and calls that failed at every coordinator. Cores are those
that each kind of process has used while sessions were opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import redis as redis_client
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support import old_harness as harness
from benchmarks.support import proc
from benchmarks.support.old_harness import Criterion, quantile, rounded
from coordinator.cluster import Child, stand_apart
from coordinator.store.embedded_redis import EmbeddedServer
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

TENANTS = {name: f"key-of-{name}-0123456789" for name in ("acme", "bobs", "cyan", "dora")}
CLASSES = ("chat", "code", "mail", "notes")
DRAFTS = ("draft-1", "draft-2")
CALL_TIMEOUT_S = 10.0
OPENING = 32
"""Sessions that are opened at once at the beginning."""
TOLD_EVERY_S = 0.25
"""Time until a verifier reports a session that was placed there, at most: a device needs about so long to attach."""
TAKEOVER_TIMEOUT_S = 30.0
MAX_AGE_S, MAX_DECISION_MS, MAX_OPEN_MS, MAX_TAKEOVER_S = 4.0, 0.1, 50.0, 3.0
SEED = 20_261_126


@dataclass(frozen=True)
class FleetLoad:
    """Set how much is measured."""

    coordinators: tuple[int, ...]
    verifiers: int
    sessions: int
    """Sessions of each verifier, on average."""
    per_s: float
    """Sessions opened or resumed in a second."""
    warm_s: float
    """Time before anything is counted."""
    quiet_s: float
    """Time with reports alone."""
    busy_s: float


FULL = FleetLoad((1, 2, 4), 100, 100, 200.0, 15.0, 20.0, 40.0)
QUICK = FleetLoad((2,), 20, 50, 100.0, 3.0, 4.0, 6.0)
SMOKE = FleetLoad((2,), 4, 8, 20.0, 1.0, 1.5, 2.0)


class Devices:
    """Opens, resumes and closes sessions, each at the next coordinator."""

    def __init__(self, coordinators: Sequence[str], tell: Callable[..., Awaitable[Any]]) -> None:
        self.live: dict[str, tuple[str, pb.OpenSessionResponse]] = {}
        """Tenant and last grant by session id."""
        self.open_s: list[float] = []
        self.resume_s: list[float] = []
        self.failed: Counter[str] = Counter()
        """Calls that failed at every coordinator, by the last status."""
        self._tell = tell
        self._order: deque[str] = deque()
        self._added: list[dict[str, Any]] = []
        self._removed: list[tuple[str, str]] = []
        self._channels = [channel(address) for address in coordinators]
        self._stubs = [coordinator_pb2_grpc.CoordinatorStub(one) for one in self._channels]  # type: ignore[no-untyped-call]
        self._turn = itertools.count()
        self._rng = random.Random(SEED)

    async def close(self) -> None:
        for one in self._channels:
            await one.close()

    async def open(self) -> None:
        tenant = self._rng.choice(tuple(TENANTS))
        draft, traffic = self._rng.choice(DRAFTS), self._rng.choice(CLASSES)
        request = pb.OpenSessionRequest(draft_release=draft, traffic_class=traffic, prompt_tokens=200)
        opened = await self._call("OpenSession", request, tenant)
        if opened is None:
            return
        self.live[opened.session_id] = tenant, opened
        self._order.append(opened.session_id)
        self._place(opened, tenant, draft, traffic)

    async def resume(self) -> None:
        """Have a session placed anew, as after its verifier failed."""
        session_id = self._order[self._rng.randrange(len(self._order))]
        tenant, before = self.live[session_id]
        request = pb.ResumeSessionRequest(
            session_id=session_id,
            ticket=before.primary.ticket,
            last_epoch=before.primary.epoch_first,
            failed_verifiers=[before.primary.verifier_id],
        )
        resumed = await self._call("ResumeSession", request, tenant, unless_closed=session_id)
        if resumed is None or session_id not in self.live:
            return
        self.live[session_id] = tenant, resumed
        self._removed.append((before.primary.verifier_id, session_id))
        self._place(resumed, tenant, DRAFTS[0], CLASSES[0])

    async def end_oldest(self) -> None:
        session_id = self._order.popleft()
        tenant, opened = self.live.pop(session_id)
        self._removed.append((opened.primary.verifier_id, session_id))
        request = pb.CloseSessionRequest(session_id=session_id, ticket=opened.primary.ticket)
        await self._call("CloseSession", request, tenant)

    async def tell(self) -> None:
        """Tell the verifiers which sessions have come and gone."""
        added, self._added, removed, self._removed = self._added, [], self._removed, []
        if added or removed:
            await self._tell(op="sessions", added=added, removed=removed)

    async def load(self, per_s: float, seconds: float) -> None:
        """Open and resume sessions in turn at a fixed rate, and close as many as are opened."""
        begun, tasks = time.monotonic(), []
        for number in range(round(per_s * seconds)):
            due = begun + number / per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            timed, work = (self.open_s, self.open) if number % 2 else (self.resume_s, self.resume)
            tasks.append(asyncio.create_task(self._timed(timed, work, due)))
        await asyncio.gather(*tasks)

    async def _timed(self, timed: list[float], work: Callable[[], Awaitable[None]], due: float) -> None:
        await work()
        timed.append(time.monotonic() - due)
        if timed is self.open_s:
            await self.end_oldest()

    def _place(self, opened: pb.OpenSessionResponse, tenant: str, draft: str, traffic: str) -> None:
        at = {"verifier": opened.primary.verifier_id, "session_id": opened.session_id}
        self._added.append(
            at | {"epoch": opened.primary.epoch_first, "tenant": tenant, "draft": draft, "traffic": traffic}
        )

    async def _call(self, method: str, request: Any, tenant: str, *, unless_closed: str = "") -> Any:
        """Return the answer of the first coordinator that gives one; None if none does, which is counted.

        unless_closed: a session whose call may fail if it has been closed meanwhile.
        """
        metadata = (("authorization", f"Bearer {TENANTS[tenant]}"),)
        turn, status = next(self._turn), ""
        for attempt in range(2 * len(self._stubs)):
            stub = self._stubs[(turn + attempt) % len(self._stubs)]
            try:
                return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                status = f"{method} {error.code().name}: {error.details()}"
                if unless_closed and unless_closed not in self.live:
                    return None
                await asyncio.sleep(0.05 * attempt)
        self.failed[status[:200]] += 1
        return None


class Coordinators:
    """Runs coordinators over one Redis, and reads what they and Redis count."""

    def __init__(self, redis: EmbeddedServer, children: Sequence[Child], metrics: Sequence[str]) -> None:
        self.children = list(children)
        self._metrics = metrics
        self._redis = redis
        self.client = redis_client.Redis.from_url(redis.url, decode_responses=True)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, count: int, scratch: Path) -> AsyncIterator[Coordinators]:
        keys = {"OUTRIDER_COORDINATOR_TENANT_KEYS": json.dumps(TENANTS)}
        async with contextlib.AsyncExitStack() as stack:
            redis = stack.enter_context(EmbeddedServer())
            metrics = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
            children = []
            for number, where in enumerate(metrics):
                options = [*harness.LOOPBACK, "--redis", redis.url, "--state-dir", str(scratch / "state")]
                options += ["--metrics", where, "--tenant-opens-per-minute", "60000", "--log-level", "WARNING"]
                command = [sys.executable, "-m", "coordinator.app", *options]
                log = scratch / "logs" / f"coordinator-{count}-{number}.log"
                child = await Child.start(f"coordinator-{number}", command, log=log, environment=keys)
                stack.push_async_callback(child.stop)
                children.append(child)
            yield cls(redis, children, metrics)

    @property
    def addresses(self) -> list[str]:
        return [child.address for child in self.children]

    def store_unix(self) -> float:
        """Return the time by the store's clock."""
        seconds, micros = self.client.time()
        return seconds + micros / 1e6

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of all coordinators, and of Redis."""
        each = [sum(map(proc.cpu_seconds, proc.family(child.pid))) for child in self.children if child.running]
        return {"coordinators": sum(each), "redis": proc.cpu_seconds(self._redis.pid or 0)}

    def redis_counts(self) -> Counter[str]:
        """Return what Redis has counted: commands, those that coordinators sent, bytes, and microseconds of scripts."""
        commands = self.client.info("commandstats")
        own = ("cmdstat_info", "cmdstat_time")
        stats: Any = self.client.info("stats")
        scripts = [commands[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in commands]
        return Counter(
            {
                "commands": sum(c["calls"] for name, c in commands.items() if name not in own),
                "scripts": sum(c["calls"] for c in scripts),
                "script_us": sum(c["usec"] for c in scripts),
                "bytes_in": stats["total_net_input_bytes"],
                "bytes_out": stats["total_net_output_bytes"],
            }
        )

    async def decided(self) -> tuple[float, float]:
        """Return the CPU seconds that the coordinators' decisions took, and how many sessions they were about."""
        seconds = sessions = 0.0
        for where in self._metrics:
            with contextlib.suppress(OSError):  # one was killed
                text = await asyncio.to_thread(lambda at: urllib.request.urlopen(f"http://{at}/metrics").read(), where)
                for family in text_string_to_metric_families(text.decode()):
                    for sample in family.samples:
                        seconds += sample.value * (sample.name == "outrider_coordinator_decide_seconds_sum")
                        sessions += sample.value * (sample.name == "outrider_coordinator_window_k_count")
        return seconds, sessions

    async def placed(self) -> set[str]:
        """Return the ids of all sessions that hold a place."""
        found: set[str] = set()
        alive = next(child for child in self.children if child.running)
        async with channel(alive.address) as link:
            admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
            request = pb.ListSessionsRequest(limit=1_000)
            while True:
                page = await admin.ListSessions(request, timeout=30.0)
                found |= {one.telemetry.session_id for one in page.sessions}
                if not page.next:
                    return found
                request.after = page.next


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


async def measured(count: int, load: FleetLoad, scratch: Path) -> dict[str, Any]:
    """Return the figures with so many coordinators."""
    async with contextlib.AsyncExitStack() as stack:
        coordinators = await stack.enter_async_context(Coordinators.running(count, scratch))
        options = {
            "coordinators": coordinators.addresses,
            "verifiers": load.verifiers,
            "capacity": 2 * load.sessions,
            "seed": SEED,
        }
        verifiers = await proc.JsonWorker.start("benchmarks.support.fake_verifiers", json.dumps(options))
        stack.push_async_callback(verifiers.kill)
        devices = Devices(coordinators.addresses, verifiers.ask)
        stack.push_async_callback(devices.close)
        telling = asyncio.create_task(_tell(devices))
        stack.callback(telling.cancel)
        opened_s = await _fill(devices, load.verifiers * load.sessions)
        print(f"{count} coordinators: {len(devices.live)} sessions opened in {opened_s:.1f} s")
        await asyncio.sleep(load.warm_s)

        before = coordinators.redis_counts()
        await verifiers.ask(op="measure")
        await asyncio.sleep(load.quiet_s)
        quiet, redis = await verifiers.ask(op="measure"), coordinators.redis_counts()
        per_report = {name: (redis[name] - before[name]) / max(1, quiet["reports"]) for name in redis}

        used, decided, begun = _cpu(coordinators, verifiers), await coordinators.decided(), time.monotonic()
        await devices.load(load.per_s, load.busy_s)
        seconds, busy = time.monotonic() - begun, await verifiers.ask(op="measure")
        now = _cpu(coordinators, verifiers)
        cores = {name: round((now[name] - used[name]) / seconds, 3) for name in now}
        decide_s, about = (
            after - earlier for after, earlier in zip(await coordinators.decided(), decided, strict=True)
        )
        takeover_s = await _takeover(coordinators, verifiers) if count > 1 else None
        await asyncio.sleep(2.0)
        missing = set(devices.live) - await coordinators.placed()
        after = await verifiers.ask(op="measure")
    lost = len(missing) + devices.failed.total()
    for status, times in devices.failed.items():
        print(f"  {times} times: {status}")
    _tell_reports({"quiet": quiet, "busy": busy, "takeover": after}, per_report)
    print(f"  cores used: {cores}", flush=True)
    return {
        "sessions": len(devices.live),
        "decision_age_p99_s": rounded(quantile(busy["ages_s"], 0.99), 2),
        "ms_per_session_decision": round(1e3 * decide_s / about, 3) if about else None,
        "open_p99_ms": _ms(devices.open_s, 0.99),
        "open_p50_ms": _ms(devices.open_s, 0.5),
        "resume_p99_ms": _ms(devices.resume_s, 0.99),
        "redis_commands_per_report": round(per_report["commands"], 1),
        "redis_kb_per_report": [round(per_report[way] / 1e3, 1) for way in ("bytes_in", "bytes_out")],
        "redis_script_ms_per_report": round(per_report["script_us"] / 1e3, 3),
        "coordinator_cpu": cores["coordinators"],
        "cores": cores,
        "takeover_s": rounded(takeover_s, 2),
        "lost": lost,
    }


async def _fill(devices: Devices, sessions: int) -> float:
    """Open so many sessions; return the seconds that it took. Raises RuntimeError if some cannot be opened."""
    begun, wanted = time.monotonic(), itertools.count()

    async def fill() -> None:
        while next(wanted) < sessions:
            await devices.open()

    await asyncio.gather(*(fill() for _ in range(OPENING)))
    if len(devices.live) < sessions:
        raise RuntimeError(f"not all sessions could be opened: {dict(devices.failed)}")
    return time.monotonic() - begun


def _tell_reports(parts: dict[str, dict[str, Any]], per_report: dict[str, float]) -> None:
    """Print what became of the reports in each part of the run, and what one cost Redis in the first of them."""
    for name, part in parts.items():
        print(
            f"  {name}: {part['reports']} reports, p99 of an answer {rounded(quantile(part['answer_s'], 0.99), 3)} s,"
            f" failed {part['failed'] or 'none'}, {part['unknown']} verifiers unknown; {part['directives']} directives"
            f" for {part['sessions']} sessions reported; decisions' age p50"
            f" {rounded(quantile(part['ages_s'], 0.5), 2)} s, p99 {rounded(quantile(part['ages_s'], 0.99), 2)} s"
        )
    first = next(iter(parts.values()))
    print(
        f"  a report of {first['bytes'] / max(1, first['reports']) / 1e3:.1f} kB costs Redis"
        f" {per_report['commands']:.1f} commands, of which {per_report['scripts']:.1f} are scripts that take"
        f" {per_report['script_us'] / 1e3:.2f} ms, {per_report['bytes_in'] / 1e3:.1f} kB in and"
        f" {per_report['bytes_out'] / 1e3:.1f} kB out"
    )


async def _tell(devices: Devices) -> None:
    while True:
        await devices.tell()
        await asyncio.sleep(TOLD_EVERY_S)


async def _takeover(coordinators: Coordinators, verifiers: proc.JsonWorker) -> float | None:
    """Kill a coordinator; return the seconds until all have decisions from reports of later, None if some never do."""
    await coordinators.children[0].kill()
    killed, since = time.monotonic(), coordinators.store_unix()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TAKEOVER_TIMEOUT_S):
            await verifiers.ask(op="decided", since=since)
            return time.monotonic() - killed
    return None


def _cpu(coordinators: Coordinators, verifiers: proc.JsonWorker) -> dict[str, float]:
    return {
        **coordinators.cpu_s(),
        "fake verifiers": proc.cpu_seconds(verifiers.pid),
        "devices": time.process_time(),
    }


def _ms(seconds: Sequence[float], share: float) -> float | None:
    found = quantile(seconds, share)
    return None if found is None else round(1e3 * found, 1)


def result_of(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the last line: the worst figures over the numbers of coordinators, and those of each."""
    worst: dict[str, Any] = {"sessions": min(one["sessions"] for one in found.values())}
    for name in ("decision_age_p99_s", "ms_per_session_decision", "open_p99_ms", "redis_commands_per_report"):
        values = [one[name] for one in found.values()]
        worst[name] = None if None in values else max(values)
    worst["coordinator_cpu"] = max(one["coordinator_cpu"] for one in found.values())
    several = [one["takeover_s"] for count, one in found.items() if count > 1]
    worst["takeover_s"] = max(several) if several and None not in several else None
    worst["lost"] = sum(one["lost"] for one in found.values())
    return worst | {"by_coordinators": {str(count): one for count, one in found.items()}}


def criteria(result: dict[str, Any]) -> list[Criterion]:
    """Return what the figures have to be."""
    return [
        Criterion.bound("99th percentile of the decisions' age, s", result["decision_age_p99_s"], at_most=MAX_AGE_S),
        Criterion.bound("CPU per session and decision, ms", result["ms_per_session_decision"], at_most=MAX_DECISION_MS),
        Criterion.bound("99th percentile of opening, ms", result["open_p99_ms"], at_most=MAX_OPEN_MS),
        Criterion.bound("takeover, s", result["takeover_s"], at_most=MAX_TAKEOVER_S),
        Criterion.bound("sessions and calls lost", result["lost"], at_most=0),
    ]


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("control_plane", __doc__)
    parser.add_argument("--coordinators", type=int, nargs="+", help="numbers of coordinators, instead of the size's")
    options = parser.parse_args(argv)
    load: FleetLoad = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    found = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch))
        (Path(scratch) / "logs").mkdir()  # nothing runs yet
        try:
            for count in options.coordinators or load.coordinators:
                found[count] = await measured(count, load, Path(scratch))
        except BaseException:
            harness.print_log_ends(Path(scratch, "logs"))
            raise
    result = result_of(found)
    harness.finish(result, criteria(result), options.size)


if __name__ == "__main__":
    asyncio.run(main())
