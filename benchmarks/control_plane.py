"""Measure what coordinators do for a large fleet, what a verifier's front costs, and what a session takes.

Coordinators run over one Redis. The verifiers exist only as reports: each reports its sessions every second, as a real
one does. All sessions are opened first. Then some are opened at a fixed rate, however long the answers take, and an old
one is closed for each. At last a coordinator is killed, where there are several.

`open_ms` is from when a session was due to be opened to the answer. `decision_age_s` is the age that a verifier's
decisions reach until the next ones come, from when the report was sent that they answer. `coordinators_ms` and
`redis_ms` are CPU time by session and second, with the opening; `up_bytes` and `down_bytes` those of reports and their
answers by session and second, without HTTP/2's headers. `takeover_s` is the time until every verifier has decisions of
the coordinators that are left. `lost` counts calls that failed, and sessions that hold no slot in the end.
`load_busy` is the share of a core that this program takes: near 1 it bounds the figures.

`front` shows a real verifier, throttled to 40 ms a step, whose users draft n-grams: CPU time of its front by session
and step, and bytes by token on the streams, also with the draft and without any. `redis_bytes` are those of a live
session, and `log_bytes_per_token` those of a recorded token in the training log.

Caveat: coordinators, Redis, verifiers and devices share two cores here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as redis_client

from benchmarks.support import harness, proc
from benchmarks.support.harness import Pair, quantile, rounded, say
from benchmarks.support.reported_verifiers import Counts, Fleet
from benchmarks.support.throttled_verifier import environment
from coordinator.cluster import Child, stand_apart
from coordinator.store.embedded_redis import EmbeddedServer
from edge_agent.bench.users import SAMPLED, Run, Users, run_users
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

SESSIONS_EACH = 50
"""Sessions of a verifier, on average."""
TAKEOVER_S = 30.0
"""Time after which a takeover that has not come never will."""
STEP_MS = 40.0
FRONT_PROMPT_TOKENS = 128
"""Most tokens of a prompt: all users must have begun before anything is counted."""
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    fleets: tuple[tuple[int, int], ...] = ((1, 1_000), (1, 2_000), (2, 4_000), (4, 8_000))
    """Coordinators and sessions of each row."""
    opens_per_s: float = 50.0
    warm_s: float = 10.0
    seconds: float = 30.0
    users: tuple[int, ...] = (1, 16, 48)
    """At the real verifier."""
    users_s: float = 15.0


QUICK = Setting(fleets=((1, 500), (2, 500)), opens_per_s=20.0, warm_s=3.0, seconds=8.0, users=(1, 8), users_s=6.0)


# --- coordinators


class ControlPlane:
    """Runs coordinators over one Redis."""

    def __init__(self, redis: EmbeddedServer, children: list[Child]) -> None:
        self.children = children
        self._redis = redis
        self._client: redis_client.Redis = redis_client.Redis.from_url(redis.url)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, count: int, scratch: Path) -> AsyncIterator[ControlPlane]:
        async with contextlib.AsyncExitStack() as stack:
            redis = stack.enter_context(EmbeddedServer())
            children = []
            for number in range(count):
                options = [*harness.LOOPBACK, "--redis", redis.url, "--state-dir", str(scratch / "state")]
                command = [sys.executable, "-m", "coordinator.app", *options]
                child = await Child(f"coordinator-{number}", command, on_log=harness.logs_in(scratch)).start()
                stack.push_async_callback(child.stop)
                children.append(child)
            yield cls(redis, children)

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of all coordinators, and of Redis."""
        each = (proc.cpu_seconds(pid) for child in self.children for pid in proc.family(child.pid))
        return sum(each), proc.cpu_seconds(self._redis.pid or 0)

    def redis_bytes(self) -> int:
        memory: dict[str, int] = self._client.info("memory")
        return memory["used_memory"]

    async def placed(self) -> set[str]:
        """Return the ids of all sessions that hold a slot."""
        found: set[str] = set()
        async with channel(self.children[-1].address) as link:
            admin: Any = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
            request = pb.ListSessionsRequest(limit=1_000)
            while True:
                page = await admin.ListSessions(request, timeout=30.0)
                found |= {one.telemetry.session_id for one in page.sessions}
                if not page.next:
                    return found
                request.after = page.next


async def fleet_row(count: int, sessions: int, setting: Setting, scratch: Path) -> dict[str, Any]:
    """Return the row of so many coordinators and sessions."""
    async with contextlib.AsyncExitStack() as stack:
        plane = await stack.enter_async_context(ControlPlane.running(count, scratch))
        verifiers = max(2, sessions // SESSIONS_EACH)
        addresses = [child.address for child in plane.children]
        fleet = await stack.enter_async_context(Fleet(addresses, verifiers, 2 * SESSIONS_EACH))
        empty = plane.redis_bytes()
        await fleet.fill(sessions)
        await asyncio.sleep(setting.warm_s)
        kept = plane.redis_bytes() - empty
        async with fleet.counted() as counts:
            used, own_s, begun = plane.cpu_s(), time.process_time(), time.monotonic()
            await fleet.turn_over(setting.opens_per_s, setting.seconds)
            seconds, own_s = time.monotonic() - begun, time.process_time() - own_s
            cpu_s = [after - before for after, before in zip(plane.cpu_s(), used, strict=True)]
        takeover_s = await takeover(plane, fleet) if count > 1 else None
        missing = {one.session_id for one in fleet.opened} - await plane.placed()
    for reason, times in counts.failed.items():
        say(f"{times} times: {reason}")
    session_seconds = seconds * len(fleet.opened)
    return {
        "coordinators": count,
        "sessions": len(fleet.opened),
        "opens_per_s": setting.opens_per_s,
        **opening(counts),
        "decision_age_s_p99": rounded(quantile(counts.ages_s, 0.99)),
        "decided": rounded(counts.directives / max(1, counts.sessions), 3),
        "coordinators_ms": rounded(1e3 * cpu_s[0] / session_seconds, 3),
        "redis_ms": rounded(1e3 * cpu_s[1] / session_seconds, 3),
        "up_bytes": round(counts.bytes_up / max(1, counts.sessions)),
        "down_bytes": round(counts.bytes_down / max(1, counts.sessions)),
        "redis_bytes": round(kept / max(1, sessions)),
        "takeover_s": rounded(takeover_s),
        "lost": len(missing) + counts.failed.total(),
        "load_busy": rounded(own_s / seconds),
    }


def opening(counts: Counts) -> dict[str, Any]:
    """Return the milliseconds of opening a session."""
    return {
        f"open_ms_p{share:.0f}": rounded(
            None if (found := quantile(counts.open_s, share / 100)) is None else 1e3 * found
        )
        for share in (50, 99)
    }


async def takeover(plane: ControlPlane, fleet: Fleet) -> float | None:
    """Kill a coordinator; return the seconds until the others decide for all verifiers, None if they do not."""
    await plane.children[0].kill()
    killed_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TAKEOVER_S):
            await fleet.decided_since(killed_s)
            return time.monotonic() - killed_s
    return None


# --- a verifier's front


async def front_rows(options: argparse.Namespace, pair: Pair, setting: Setting) -> list[dict[str, Any]]:
    """Return a row for each number of users who draft n-grams, and for one user with the draft and without any."""
    rows = []
    prompts = list(harness.prompts(options, pair, 16, most=FRONT_PROMPT_TOKENS).values())
    slots = ("--max-sessions", str(2 * max(setting.users)))
    async with harness.one_verifier(pair, *slots, throttle=environment(STEP_MS)) as cluster:
        [core] = os.sched_getaffinity(0)
        verifier = cluster.verifiers[0]
        for count, draft in (*((users, "ngram") for users in setting.users), (1, "auto"), (1, None)):
            users = Users(
                {"coordinator": cluster.address},
                prompts,
                count=count,
                draft=draft,
                options=SAMPLED | {"max_tokens": 128, "ignore_eos": True},
                seconds=setting.users_s,
            )
            samples: list[tuple[float, float]] = []
            sampling = asyncio.create_task(sample(verifier.pid, samples))
            run = await run_users(users, [core])
            sampling.cancel()
            tokens = sum(len(text.tokens) for text in run.texts)
            row = {
                "users": count,
                "draft": draft or "none",
                "front_us_per_session_step": rounded(front_us(run, samples), 1),
                "bytes_up_per_token": rounded(sum(text.bytes_up for text in run.texts) / tokens, 1),
                "bytes_down_per_token": rounded(sum(text.bytes_down for text in run.texts) / tokens, 1),
                "acceptance_length": rounded(run.acceptance_length),
                "devices_busy": rounded(run.busy),
            }
            say(row)
            rows.append(row)
    return rows


async def sample(pid: int, samples: list[tuple[float, float]]) -> None:
    """Add the time and the CPU seconds of a process to `samples` until cancelled."""
    while True:
        samples.append((time.monotonic(), proc.cpu_seconds(pid)))
        await asyncio.sleep(SAMPLE_S)


def front_us(run: Run, samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the CPU microseconds by session and step, over the time in which all users generated.

    samples: time and CPU seconds of the front, in order.
    """
    deliveries: dict[int, set[float]] = {}
    for text in run.texts:
        deliveries.setdefault(text.user, set()).update(text.delivered_s)
    begin, end = max(map(min, deliveries.values())), min(map(max, deliveries.values()))
    inside = [(at, cpu_s) for at, cpu_s in samples if begin <= at <= end]
    if len(inside) < 2:
        return None
    (first_at, first_s), (last_at, last_s) = inside[0], inside[-1]
    steps = sum(first_at < at <= last_at for times in deliveries.values() for at in times)
    return 1e6 * (last_s - first_s) / steps if steps else None


async def logged_bytes(options: argparse.Namespace, pair: Pair, tokens: int, texts: int) -> float:
    """Return the bytes of the training log by recorded token."""
    async with harness.cluster() as cluster:
        log = Path(os.environ["OUTRIDER_EDGE_CACHE_DIR"], "traffic")
        await cluster.start_coordinator(*harness.LOOPBACK, "--tenants", str(harness.recording(log.parent)))
        models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
        verifier = await cluster.start_verifier(*models, "--traffic", str(log))
        prompts = list(harness.prompts(options, pair, texts).values())
        asked = Users({"coordinator": cluster.address}, prompts, warm=0, options=SAMPLED | {"max_tokens": tokens})
        run = await run_users(asked, [harness.cores()[1]])
        await verifier.stop()
        size = size_of(log)
    return size / sum(len(text.tokens) for text in run.texts)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def measure(options: argparse.Namespace) -> None:
    pair, setting = Pair.of(options), QUICK if options.quick else Setting()
    fleets = [(count, options.sessions or setting.fleets[-1][1]) for count in options.coordinators]
    rows = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch))
        for count, sessions in fleets or setting.fleets:
            try:
                rows.append(await fleet_row(count, sessions, setting, Path(scratch)))
            except Exception:
                harness.print_log_ends(Path(scratch))
                raise
            say(rows[-1])
    front = await front_rows(options, pair, setting)
    log_bytes = await logged_bytes(options, pair, *((48, 4) if options.quick else (96, 24)))
    harness.finish(
        options,
        f"{SESSIONS_EACH} sessions a simulated verifier, {setting.seconds:.0f} s a row.",
        rows,
        front=front,
        log_bytes_per_token=rounded(log_bytes, 1),
    )


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("control_plane", __doc__)
    parser.add_argument("--coordinators", type=int, nargs="+", default=[], metavar="N", help="numbers of coordinators")
    parser.add_argument("--sessions", type=int, metavar="N", help="sessions of all verifiers together")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
