"""Define the kinds of faults: what each breaks, and how that is undone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.cluster import ChaosCluster, Server
from benchmarks.chaos.links import FaultyProxy
from benchmarks.chaos.schedule import FaultRate
from benchmarks.chaos.sessions import WAN, Device, limit_files
from benchmarks.support import old_harness as harness

HOUR_S = 3_600.0
FAR_MS = 4_000.0
SLOW_BPS = 8_000.0
TAMPER_S = 3.0
"""Time in which a chunk must come by that a fault waits for."""
REPLICA_S = 10.0
"""Time in which a replica must have all that its primary has."""


@dataclass(frozen=True)
class Testbed:
    """Holds what faults are injected into, with the generator that decides what is struck."""

    cluster: ChaosCluster
    devices: Sequence[Device]
    draw: random.Random


@dataclass(frozen=True)
class Struck:
    """Tells what a fault has struck.

    device: the number of the only device that it concerns, if there is one. missed: it has struck nothing.
    """

    what: str
    device: int | None = None
    missed: bool = False


Fault = AbstractAsyncContextManager[Struck]
"""Entering it injects a fault, leaving it undoes that."""
Inject = Callable[[Testbed], Fault]


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault.

    hold_s: shortest and longest time until it is undone. leaves_verifier: whether every session can reach a verifier
    all the while. refuses: whether no session can be opened meanwhile, because the control plane is gone, or the
    device's own disk is full.
    """

    name: str
    inject: Inject
    hold_s: tuple[float, float] = (0.5, 3.0)
    leaves_verifier: bool = True
    refuses: bool = False
    weight: float = 1.0
    smoke: bool = False
    """Whether the smoke run has it."""
    logs: str = ""
    """What a line at ERROR has in it that each such fault may cause once, because somebody should look."""

    @property
    def rate(self) -> FaultRate:
        return FaultRate(self.name, self.hold_s, self.weight)


Pick = Callable[[Testbed], Server]


def verifier(bed: Testbed) -> Server:
    return _running(bed, bed.cluster.verifiers)


def coordinator(bed: Testbed) -> Server:
    return _running(bed, bed.cluster.coordinators)


def redis(bed: Testbed) -> Server:
    return bed.cluster.redis


def _running(bed: Testbed, servers: Sequence[Server]) -> Server:
    """Return a random one; if it does not run now, the next that does."""
    first = bed.draw.randrange(len(servers))
    turned = [*servers[first:], *servers[:first]]
    return next((server for server in turned if server.running), turned[0])


# --- processes


def _whole(server: Server) -> list[int]:
    return server.pids


def _front(server: Server) -> list[int]:
    return server.pids[:1]


def _engine(server: Server) -> list[int]:
    """Return the engine process of a verifier."""
    return [pid for pid in server.pids[1:] if "paced_engine" in _command(pid)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_text(errors="replace")
    return ""


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def killed(pick: Pick, part: Callable[[Server], list[int]] = _whole) -> Inject:
    """Return a fault that kills a process, which the supervisor starts again."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        server = pick(bed)
        _signal(reversed(part(server)), signal.SIGKILL)
        yield Struck(server.name)

    return fault


def frozen(pick: Pick, part: Callable[[Server], list[int]] = _whole) -> Inject:
    """Return a fault that stops a process and lets it go on later."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        server = pick(bed)
        pids = part(server)
        _signal(pids, signal.SIGSTOP)
        try:
            yield Struck(server.name)
        finally:
            _signal(pids, signal.SIGCONT)

    return fault


@contextlib.asynccontextmanager
async def all_verifiers_killed(bed: Testbed) -> AsyncIterator[Struck]:
    for server in bed.cluster.verifiers:
        _signal(server.pids, signal.SIGKILL)
    yield Struck("all verifiers")
    await bed.cluster.settled(1)


@contextlib.asynccontextmanager
async def rolling_upgrade(bed: Testbed) -> AsyncIterator[Struck]:
    """Drain, stop and start every verifier and coordinator, one after another.

    Where there is a previous version, verifiers go back to it and then forward again: meanwhile both versions serve.
    """
    cluster = bed.cluster
    yield Struck("every verifier and coordinator")
    versions = [cluster.previous, harness.ROOT] if cluster.previous else [harness.ROOT]
    steps = [(server, root) for root in versions for server in cluster.verifiers]
    for server, root in (*steps, *((server, harness.ROOT) for server in cluster.coordinators)):
        server.wanted = False
        try:
            await server.stop()
            server.root = root
        finally:
            server.wanted = True
        await server.until_ready()


# --- Redis


def redis_away(*, empty: bool) -> Inject:
    """Return a fault that stops Redis, and starts it again with its data or without."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        server = bed.cluster.redis
        server.wanted = False
        await server.stop()
        try:
            yield Struck("redis")
        finally:
            if empty:
                server.forget()
            server.wanted = True
        await server.until_ready()

    return fault


@contextlib.asynccontextmanager
async def redis_failed_over(bed: Testbed) -> AsyncIterator[Struck]:
    """Kill Redis, and promote its replica in the end; what was not replicated is lost."""
    cluster = bed.cluster
    try:
        async with asyncio.timeout(REPLICA_S):
            while not await cluster.replica.has_all():  # noqa: ASYNC110  # another process copies
                await asyncio.sleep(0.1)
    except TimeoutError:
        yield Struck("redis, whose replica is not ready", missed=True)
        return
    former = cluster.redis
    former.wanted = False
    await former.kill()
    try:
        yield Struck(former.name)
    finally:
        await cluster.fail_over()
        former.wanted = True
    await former.until_ready()


@contextlib.asynccontextmanager
async def redis_full(bed: Testbed) -> AsyncIterator[Struck]:
    await bed.cluster.redis.say("CONFIG SET maxmemory 1")
    try:
        yield Struck("redis")
    finally:
        await bed.cluster.redis.say("CONFIG SET maxmemory 0")


# --- devices and their links


def _device(bed: Testbed) -> Device:
    return bed.draw.choice(bed.devices)


@contextlib.asynccontextmanager
async def device_killed(bed: Testbed) -> AsyncIterator[Struck]:
    device = _device(bed)
    await device.kill()
    try:
        yield Struck(device.name, device.number)
    finally:
        await device.start()


@contextlib.asynccontextmanager
async def device_frozen(bed: Testbed) -> AsyncIterator[Struck]:
    device = _device(bed)
    pids = [device.worker.pid] if device.worker else []
    _signal(pids, signal.SIGSTOP)
    try:
        yield Struck(device.name, device.number)
    finally:
        _signal(pids, signal.SIGCONT)


@contextlib.asynccontextmanager
async def device_reads_slowly(bed: Testbed) -> AsyncIterator[Struck]:
    """Let a device's programs take nothing from their streams for a while."""
    device = _device(bed)
    if device.worker is not None:
        await device.worker.ask(slow_s=8.0)
    yield Struck(device.name, device.number)


@contextlib.asynccontextmanager
async def device_without_disk(bed: Testbed) -> AsyncIterator[Struck]:
    """Start a device anew with an empty cache and a full disk; its sessions before are killed."""
    device = _device(bed)
    await device.kill()
    await device.start(without_disk=True)
    try:
        yield Struck(device.name, device.number)
    finally:
        await device.kill()
        await device.start()


def _link(bed: Testbed, *, tls: bool | None = None) -> tuple[Device, str, FaultyProxy]:
    """Return a link between a device and a verifier, one in use if there is any. tls: whether it must have TLS."""
    secure = {server.name: server.tls for server in bed.cluster.verifiers}
    links = [
        (device, name, link)
        for device in bed.devices
        for name, link in device.links.items()
        if tls is None or secure[name] is tls
    ]
    return bed.draw.choice([entry for entry in links if entry[2].in_use] or links)


def _coordinators_link(bed: Testbed) -> tuple[Device, str, FaultyProxy]:
    """Return a link between a device and the coordinators, one in use if there is any."""
    used = [device for device in bed.devices if device.front.in_use]
    device = bed.draw.choice(used or bed.devices)
    return device, "a coordinator", device.front


def bytes_broken(how: str, *, up: bool, of: Callable[[Testbed], tuple[Device, str, FaultyProxy]]) -> Inject:
    """Return a fault that flips a bit or loses bytes on a device's link, once. of: returns the link."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        device, name, link = of(bed)
        before = link.tampered
        (link.flip if how == "flip" else link.lose)(up=up)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAMPER_S):
                while link.tampered == before:  # noqa: ASYNC110  # bytes come when they come
                    await asyncio.sleep(0.02)
        link.disarm()
        missed = link.tampered == before
        yield Struck(f"{device.name} to {name}{', nothing came by' * missed}", device.number, missed)

    return fault


@contextlib.asynccontextmanager
async def reset(bed: Testbed) -> AsyncIterator[Struck]:
    device, name, link = _link(bed)
    link.reset_connections()
    yield Struck(f"{device.name} to {name}", device.number)


@contextlib.asynccontextmanager
async def reset_everywhere(bed: Testbed) -> AsyncIterator[Struck]:
    device = _device(bed)
    for link in device.ways:
        link.reset_connections()
    yield Struck(f"all links of {device.name}", device.number)


def half_open(*, up: bool) -> Inject:
    """Return a fault in which one direction is swallowed, and the connection reset at the end."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        device, name, link = _link(bed)
        link.swallow(up=up)
        try:
            yield Struck(f"{device.name} to {name}", device.number)
        finally:
            link.spare()

    return fault


@contextlib.asynccontextmanager
async def blackhole(bed: Testbed) -> AsyncIterator[Struck]:
    device, name, link = _link(bed)
    link.blackhole()
    try:
        yield Struck(f"{device.name} to {name}", device.number)
    finally:
        link.lift()


@contextlib.asynccontextmanager
async def blackhole_everywhere(bed: Testbed) -> AsyncIterator[Struck]:
    device = _device(bed)
    for link in device.ways:
        link.blackhole()
    try:
        yield Struck(f"all links of {device.name}", device.number)
    finally:
        for link in device.ways:
            link.lift()


@contextlib.asynccontextmanager
async def coordinators_unreachable(bed: Testbed) -> AsyncIterator[Struck]:
    """Cut the verifiers off from all coordinators."""
    (link,) = [one for one in bed.cluster.balancers if one not in {device.front for device in bed.devices}]
    link.blackhole()
    try:
        yield Struck("verifiers to coordinators")
    finally:
        link.lift()


def changed_link(**changes: Any) -> Inject:
    """Return a fault that makes all links of a device slow or long."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        device = _device(bed)
        for link in device.ways:
            link.link = replace(WAN, **changes)
        try:
            yield Struck(f"all links of {device.name}", device.number)
        finally:
            for link in device.ways:
                link.link = WAN

    return fault


# --- disks and clocks


def disk_full(pick: Pick) -> Inject:
    """Return a fault in which a process can write to no file: RLIMIT_FSIZE needs no privilege."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        server = pick(bed)
        pids = server.pids
        for pid in pids:
            limit_files(pid, 0)
        try:
            yield Struck(server.name)
        finally:
            for pid in pids:
                limit_files(pid, None)

    return fault


def clock_off(pick: Callable[[Testbed], Server | Device]) -> Inject:
    """Return a fault in which one process's clock is an hour fast or slow."""

    @contextlib.asynccontextmanager
    async def fault(bed: Testbed) -> AsyncIterator[Struck]:
        struck = pick(bed)
        offset = bed.draw.choice((-HOUR_S, HOUR_S))
        struck.clock.write_text(str(offset))
        try:
            device = struck.number if isinstance(struck, Device) else None
            yield Struck(f"{struck.name} by {offset:+.0f} s", device)
        finally:
            struck.clock.write_text("0")

    return fault


def _kinds() -> Iterable[FaultKind]:
    """Yield all kinds; the rare ones take long."""
    yield FaultKind("verifier killed", killed(verifier), weight=0.7, smoke=True)
    yield FaultKind("front killed", killed(verifier, _front), weight=0.5)
    ended = "the engine process has ended by itself"
    yield FaultKind("engine killed", killed(verifier, _engine), weight=0.5, logs=ended)
    yield FaultKind("verifier frozen", frozen(verifier), (0.5, 8.0))
    yield FaultKind("front frozen", frozen(verifier, _front), (0.5, 8.0))
    yield FaultKind("engine frozen", frozen(verifier, _engine), (1.0, 10.0))
    yield FaultKind("all verifiers killed", all_verifiers_killed, leaves_verifier=False, refuses=True, weight=0.3)
    yield FaultKind("rolling upgrade", rolling_upgrade, (0.1, 0.2), weight=0.05)
    yield FaultKind("coordinator killed", killed(coordinator))
    yield FaultKind("coordinator frozen", frozen(coordinator), (0.5, 6.0), smoke=True)
    yield FaultKind("redis killed", killed(redis))
    yield FaultKind("redis frozen", frozen(redis), (0.5, 6.0), refuses=True)
    yield FaultKind("redis away", redis_away(empty=False), (0.5, 6.0), refuses=True)
    yield FaultKind("redis emptied", redis_away(empty=True), (0.1, 2.0), refuses=True, smoke=True)
    yield FaultKind("redis failed over", redis_failed_over, (0.1, 6.0), refuses=True)
    yield FaultKind("redis full", redis_full, (0.5, 6.0), refuses=True)
    yield FaultKind("coordinators unreachable", coordinators_unreachable, (0.5, 8.0), refuses=True)
    yield FaultKind("device killed", device_killed, (0.1, 0.5), weight=0.5)
    yield FaultKind("device frozen", device_frozen, (0.5, 6.0))
    yield FaultKind("device reads slowly", device_reads_slowly, (1.0, 3.0))
    yield FaultKind("reset", reset, (0.1, 0.5), weight=2.0, smoke=True)
    yield FaultKind("reset everywhere", reset_everywhere, (0.1, 0.5), weight=2.0)
    yield FaultKind("half-open up", half_open(up=True), (1.0, 8.0))
    yield FaultKind("half-open down", half_open(up=False), (1.0, 8.0))
    yield FaultKind("blackhole", blackhole, (0.1, 20.0), weight=2.0, smoke=True)
    everywhere = FaultKind("blackhole everywhere", blackhole_everywhere, (0.1, 20.0), leaves_verifier=False)
    yield replace(everywhere, refuses=True, weight=1.5)
    for how, few in (("flip", "bit flipped"), ("lose", "bytes lost")):
        for up, way in ((True, "up"), (False, "down")):
            plain, secure = (functools.partial(_link, tls=tls) for tls in (False, True))
            kind = FaultKind(f"{few} {way}", bytes_broken(how, up=up, of=plain), (0.3, 1.0), weight=2.0)
            yield replace(kind, smoke=how == "flip")
            yield FaultKind(f"{few} {way}, TLS", bytes_broken(how, up=up, of=secure), (0.3, 1.0))
            yield FaultKind(f"{few} {way}, coordinator", bytes_broken(how, up=up, of=_coordinators_link), (0.3, 1.0))
    yield FaultKind("slow link", changed_link(down_bps=SLOW_BPS, up_bps=SLOW_BPS), (1.0, 6.0))
    yield FaultKind("round trip of 4 s", changed_link(rtt_ms=FAR_MS), (10.0, 14.0), weight=0.3)
    yield FaultKind("disk full, verifier", disk_full(verifier), (1.5, 6.0))
    yield FaultKind("disk full, coordinator", disk_full(coordinator), (0.5, 4.0))
    yield FaultKind("disk full, device", device_without_disk, (1.0, 3.0), refuses=True, weight=0.3)
    yield FaultKind("clock off, verifier", clock_off(verifier), (1.0, 6.0))
    yield FaultKind("clock off, coordinator", clock_off(coordinator), (1.0, 6.0))
    yield FaultKind("clock off, device", clock_off(_device), (1.0, 6.0))


KINDS = {kind.name: kind for kind in _kinds()}
