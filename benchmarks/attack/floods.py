"""Flood coordinator and verifier: streams that are held, messages without an end, downloads that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.attack import wire
from benchmarks.attack.finding import Finding, rounded
from benchmarks.attack.lab import FLOODER, HONEST, HOSTILE, Lab
from benchmarks.support import proc
from coordinator.cluster import Child
from outrider.core.addresses import split_address
from outrider.wire.channels import channel
from outrider.wire.ticket import ticket_metadata
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2

GROWTH_MB = 64.0
"""Memory that peers without credentials may hold together."""
MESSAGE_BYTES = int(3.9 * (1 << 20))
UNFINISHED = 100
MANY, FLOOD = 40, 20
"""Connections."""
ATTACKER = "127.0.0.2"
"""The host of an attacker that is not everybody else's."""
CHECKING, CHECKS = 3, 256
"""Connections over which the health is checked, and checks at once on each."""
TENANT_CALLS = 400
"""Calls on a connection: four of these fill the coordinator for each tenant."""
DOWNLOADS = 64
DOWNLOADED_S = 20.0
"""Time in which an honest device has the draft, whoever holds downloads."""
AGAIN, CANCELLED = "again", "CANCELLED"
BATCH, TRIES = 100, 3
"""Calls that are begun at once, and how often calls that ended are begun again: of many, gRPC's server cancels some
before it counts them."""
CONNECTIONS = 1_500
HANDSHAKE_S = 20.0
"""Time in which a connection that does not become one of HTTP/2 is closed."""
REPORTS_PER_S = 4.0
"""A verifier reports once a second, and at once where something it cannot know otherwise is asked."""
_FILES = 8_192
_REPORTS = re.compile(r'^outrider_coordinator_rpc_seconds_count\{rpc="Report"\} (\S+)$', re.MULTILINE)


async def watch_coordinator(lab: Lab) -> Finding:
    """Hold 1,100 calls that watch the health on one connection to the coordinator."""
    return await _hold_streams(lab, lab.coordinator, 1_100, _watch)


async def reflect_coordinator(lab: Lab) -> Finding:
    """Hold 1,100 calls of gRPC's reflection on one connection to the coordinator."""
    return await _hold_streams(lab, lab.coordinator, 1_100, _reflect)


async def watch_verifier(lab: Lab) -> Finding:
    """Hold 4,200 calls that watch the health on one connection to the verifier."""
    return await _hold_streams(lab, lab.verifier, 4_200, _watch)


async def reflect_verifier(lab: Lab) -> Finding:
    """Hold 4,200 calls of gRPC's reflection on one connection to the verifier."""
    return await _hold_streams(lab, lab.verifier, 4_200, _reflect)


async def unfinished_at_coordinator(lab: Lab) -> Finding:
    """Send 100 first messages of 3.9 MiB without their end to the coordinator."""
    return await _leave_unfinished(lab, lab.coordinator, wire.OPEN_SESSION)


async def unfinished_at_verifier(lab: Lab) -> Finding:
    """Send 100 first messages of 3.9 MiB without their end to the verifier."""
    return await _leave_unfinished(lab, lab.verifier, wire.SESSION)


async def unfinished_health_checks(lab: Lab) -> Finding:
    """Send 100 health checks of 3.9 MiB without their end to the coordinator: they need no credential."""
    return await _leave_unfinished(lab, lab.coordinator, wire.CHECK)


async def unfinished_from_many_connections(lab: Lab) -> Finding:
    """Send 4,000 first messages of 3.9 MiB without their end over 40 connections, first to the coordinator."""
    findings = [
        await _leave_unfinished(lab, victim, path, MANY)
        for victim, path in ((lab.coordinator, wire.OPEN_SESSION), (lab.verifier, wire.SESSION))
    ]
    measured = dict(zip(("coordinator", "verifier"), (finding.measured for finding in findings), strict=True))
    return Finding(all(finding.held for finding in findings), measured, findings[0].bound)


async def refusals(lab: Lab) -> Finding:
    """Make calls without a credential over 20 connections of one host, another one for each that is refused."""
    return await _leave_unfinished(lab, lab.coordinator, wire.OPEN_SESSION, FLOOD, again=True)


async def health_checks(lab: Lab) -> Finding:
    """Check the health of the coordinator over 3 connections, 256 checks at a time on each, and again after each."""
    seconds = lab.size.pick(smoke=1.0, quick=5.0, full=15.0)
    ended: Counter[str] = Counter()

    async def forever(link: grpc.aio.Channel) -> None:
        check = health_pb2_grpc.HealthStub(link).Check
        while True:
            try:
                await check(health_pb2.HealthCheckRequest())
                ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code().name] += 1
                await asyncio.sleep(0.01)  # where the connection is closed, the next answer comes without it

    async with lab.under_attack(), _asking(lab, TRIES) as answers, contextlib.AsyncExitStack() as held:
        links = [await held.enter_async_context(channel(lab.coordinator.address)) for _ in range(CHECKING)]
        checking = [asyncio.create_task(forever(link)) for link in links for _ in range(CHECKS)]
        await asyncio.sleep(seconds)
        await wire.stop(checking)
    measured = {"checks": dict(ended), **_shares(answers)}
    return Finding(_all_served(answers), measured, "everybody else answered")


async def two_tenants(lab: Lab) -> Finding:
    """Hold as many calls at the coordinator as two tenants can together, none of which ever sends its request."""
    seconds = lab.size.pick(smoke=1.0, quick=5.0, full=9.0)  # less than a request may take
    before, grown = proc.rss_mb(lab.coordinator.pid), 0.0
    held = [
        wire.UnfinishedMessages(lab.coordinator.address, headers=((b"authorization", f"Bearer {secret}".encode()),))
        for secret in (lab.keys[HOSTILE], lab.keys[FLOODER])
        for _ in range(4)
    ]
    async with lab.under_attack(), _asking(lab, TRIES) as answers:
        sending = [asyncio.create_task(one.send(wire.OPEN_SESSION, TENANT_CALLS, 64, seconds)) for one in held]
        while not all(task.done() for task in sending):
            await asyncio.sleep(0.1)
            grown = max(grown, proc.rss_mb(lab.coordinator.pid) - before)
    for one in held:
        one.close()
    measured = {
        "calls": len(held) * TENANT_CALLS,
        "refused": sum(one.ended for one in held),
        "rss_growth_mb": rounded(grown),
        **_shares(answers),
    }
    return Finding(_all_served(answers), measured, "everybody else answered")


async def unread_downloads(lab: Lab) -> Finding:
    """Begin 64 downloads without a credential, read none, and begin another one for each that ends."""
    return await _hold_downloads(lab, b"")


async def unread_downloads_with_ticket(lab: Lab) -> Finding:
    """Do the same as a tenant with a ticket."""
    async with lab.caller(HOSTILE) as hostile:
        opened = await hostile.open()
        try:
            return await _hold_downloads(lab, opened.primary.ticket)
        finally:
            await hostile.close(opened)


async def silent_connections(lab: Lab) -> Finding:
    """Open 1,500 TCP connections to the coordinator and say nothing."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, hard), hard))
    host, port = split_address(lab.coordinator.address)
    held: list[asyncio.StreamWriter] = []

    async def hold() -> float:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            held.append(writer)
            while await reader.read(1 << 12):
                pass
        return time.monotonic() - began

    async with lab.under_attack(), _asking(lab) as answers:
        tasks = [asyncio.create_task(hold()) for _ in range(CONNECTIONS)]
        await asyncio.wait(tasks, timeout=HANDSHAKE_S)
    ended = [task.result() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    for writer in held:
        writer.transport.abort()
    measured = {
        "connections": len(held),
        "still_open": CONNECTIONS - len(ended),
        "last_closed_s": rounded(max(ended, default=None)),
        **_shares(answers),
    }
    held_up = len(ended) == CONNECTIONS and _all_served(answers)
    return Finding(held_up, measured, f"all closed within {HANDSHAKE_S:.0f} s, everybody else answered")


async def unknown_keys(lab: Lab) -> Finding:
    """Show the verifier tickets that unknown keys have signed, as fast as it refuses them."""
    async with lab.operator() as operator:
        status = await operator("Admin.Status", pb.StatusRequest())
    target, verifier_id = status.verifiers[0].target, status.verifiers[0].verifier_id
    seconds = lab.size.pick(smoke=2.0, quick=5.0, full=20.0)
    quiet = await _report_rate(lab, seconds / 2)
    refused: Counter[str] = Counter()

    async def show() -> None:
        while True:
            session_id = os.urandom(16).hex()
            ticket = wire.sign(Ed25519PrivateKey.generate(), wire.claims_for(target, verifier_id, session_id))
            ended = await wire.attached(lab.product, lab.verifier.address, session_id, ticket, prompt=lab.prompt)
            refused[ended] += 1

    async with lab.under_attack():
        tasks = [asyncio.create_task(show()) for _ in range(32)]
        rate = await _report_rate(lab, seconds)
        await wire.stop(tasks)
    measured = {"reports_per_s": rounded(rate), "quiet_reports_per_s": rounded(quiet), "refused": dict(refused)}
    held = rate <= REPORTS_PER_S and not refused[wire.SERVED] and bool(refused)
    return Finding(held, measured, f"at most {REPORTS_PER_S:g} reports/s, none served")


def _watch(link: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(link).Watch(health_pb2.HealthCheckRequest())


def _reflect(link: grpc.aio.Channel) -> Any:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.sleep(600.0)

    return reflection_pb2_grpc.ServerReflectionStub(link).ServerReflectionInfo(ask())


async def _hold_streams(lab: Lab, victim: Child, count: int, begin: Callable[[grpc.aio.Channel], Any]) -> Finding:
    """Hold calls that no secret is needed for, while an honest tenant opens and attaches sessions."""
    before = proc.rss_mb(victim.pid)
    async with lab.under_attack(), channel(victim.address) as link:
        calls: list[Any] = []
        for _ in range(TRIES):
            calls = [call for call in calls if not call.done()]
            while len(calls) < count:
                calls.append(begin(link))
                if len(calls) % BATCH == 0:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
        async with _asking(lab) as answers:
            await asyncio.sleep(lab.size.pick(smoke=1.0, quick=7.0, full=15.0))  # longer than a lease
            grown = proc.rss_mb(victim.pid) - before
        held = sum(not call.done() for call in calls)
        ended = Counter([(await call.code()).name for call in calls if call.done()])
        for call in calls:
            call.cancel()
    measured = {
        "streams": count,
        "held": held,
        "ended": dict(ended),
        "rss_growth_mb": rounded(grown),
        **_shares(answers),
    }
    bound = f"everybody else answered, at most {GROWTH_MB:.0f} MB more"
    return Finding(_all_served(answers) and grown <= GROWTH_MB, measured, bound)


async def _leave_unfinished(
    lab: Lab, victim: Child, path: str, connections: int = 1, *, again: bool = False
) -> Finding:
    """Send 100 unfinished messages over each of some connections of another host than everybody else's, and over
    another connection for each that the server closes. again: begin another call for each that is refused, too."""
    seconds = lab.size.pick(smoke=1.0, quick=5.0, full=15.0)
    before, grown, used = proc.rss_mb(victim.pid), 0.0, []
    until = time.monotonic() + lab.calm_s + seconds

    async def flood() -> None:
        while (left := until - time.monotonic()) > 0.5:
            used.append(messages := wire.UnfinishedMessages(victim.address, source=ATTACKER, again=again))
            await messages.send(path, UNFINISHED, MESSAGE_BYTES, left)
            messages.close()

    async with lab.under_attack(), _asking(lab, TRIES if connections > 1 else 1) as answers:
        sending = [asyncio.create_task(flood()) for _ in range(connections)]
        while not all(task.done() for task in sending):
            await asyncio.sleep(0.1)
            grown = max(grown, proc.rss_mb(victim.pid) - before)
        for messages in used:
            messages.close()
    measured = {
        "connections": len(used),
        "sent_mb": rounded(sum(messages.sent for messages in used) / 1e6),
        "rss_growth_mb": rounded(grown),
        "ended": sum(messages.ended for messages in used),
        **_shares(answers),
    }
    bound = f"everybody else answered, at most {GROWTH_MB:.0f} MB more"
    return Finding(grown <= GROWTH_MB and _all_served(answers), measured, bound)


async def _hold_downloads(lab: Lab, ticket: bytes) -> Finding:
    errors = wire.log_errors(lab.log_of(lab.verifier))
    async with lab.caller(HONEST) as honest:
        opened = await honest.open()
        try:
            described = await _describe(lab, opened.primary.ticket)
            (draft,) = (artifact for artifact in described.artifacts if artifact.role == "draft")
            async with lab.under_attack(), channel(lab.verifier.address) as link:
                holding = [asyncio.create_task(_hold_download(link, draft.hash, ticket)) for _ in range(DOWNLOADS)]
                await asyncio.sleep(1.0)
                began, seconds = time.monotonic(), await _download(lab, draft, opened.primary.ticket)
                await asyncio.sleep(lab.least_s - (time.monotonic() - began))
                await wire.stop(holding)
        finally:
            await honest.close(opened)
    await asyncio.sleep(0.3)  # the calls' ends reach the log
    logged = wire.log_errors(lab.log_of(lab.verifier)) - errors
    measured = {"downloaded_s": rounded(seconds), "error_lines": logged}
    held = seconds is not None and not logged
    return Finding(held, measured, f"an honest download ends within {DOWNLOADED_S:.0f} s, no line at ERROR")


async def _hold_download(link: grpc.aio.Channel, wanted: str, ticket: bytes) -> None:
    """Hold a download without reading it, and begin another one when it ends."""
    while True:
        call = _fetch(link, wanted, ticket)
        await call.code()
        await asyncio.sleep(0.1)


def _fetch(link: grpc.aio.Channel, wanted: str, ticket: bytes) -> Any:
    fetch = link.unary_stream(
        "/outrider.wire.v1.Verifier/FetchArtifact",
        request_serializer=session_pb2.FetchArtifactRequest.SerializeToString,
        response_deserializer=session_pb2.ArtifactChunk.FromString,
    )
    return fetch(session_pb2.FetchArtifactRequest(hash=wanted), metadata=ticket_metadata(ticket))


async def _describe(lab: Lab, ticket: bytes) -> session_pb2.DescribeResponse:
    async with channel(lab.verifier.address) as link:
        describe = link.unary_unary(
            "/outrider.wire.v1.Verifier/Describe",
            request_serializer=session_pb2.DescribeRequest.SerializeToString,
            response_deserializer=session_pb2.DescribeResponse.FromString,
        )
        answer: session_pb2.DescribeResponse = await describe(
            session_pb2.DescribeRequest(), metadata=ticket_metadata(ticket), timeout=5.0
        )
    return answer


async def _download(lab: Lab, wanted: session_pb2.Artifact, ticket: bytes) -> float | None:
    """Return the seconds that a download takes, which is tried again when it is refused; None if they are too many."""
    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DOWNLOADED_S), channel(lab.verifier.address, bulk=True) as link:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if sum([len(chunk.data) async for chunk in _fetch(link, wanted.hash, ticket)]) == wanted.size:
                        return time.monotonic() - began
                await asyncio.sleep(0.2)
    return None


@contextlib.asynccontextmanager
async def _asking(lab: Lab, tries: int = 1) -> AsyncIterator[dict[str, Counter[str]]]:
    """Have an honest tenant open and attach sessions and an operator look at the cluster; yield how that ends.

    tries: how often a call is made that gRPC's server cancels before the product sees it; more than one where so many
    calls are pending that it has to, as devices do. Further ones are counted as `again`.
    """
    answers: dict[str, Counter[str]] = {"opened": Counter(), "attached": Counter(), "status": Counter()}

    async def forever(ask: Callable[[], Awaitable[None]]) -> None:
        while True:
            await ask()
            await asyncio.sleep(0.4)

    async with lab.caller(HONEST) as honest, lab.operator() as operator:

        async def session() -> None:
            try:
                opened = await answered("opened", honest.open)
            except grpc.aio.AioRpcError:
                return
            grant = opened.primary
            for left in reversed(range(tries)):
                ended = await wire.attached(
                    lab.product,
                    grant.address,
                    opened.session_id,
                    grant.ticket,
                    prompt=lab.prompt[:8],
                    epoch=grant.epoch_first,
                )
                if ended != CANCELLED or not left:
                    break
                answers["attached"][AGAIN] += 1
                await asyncio.sleep(0.2)
            answers["attached"]["OK" if ended == wire.SERVED else ended] += 1
            await honest.close(opened)

        async def status() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                seen = await answered("status", lambda: operator("Admin.Status", pb.StatusRequest()))
                answers["status"]["no verifier"] += not seen.verifiers

        async def answered(name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
            left = tries
            while True:
                left -= 1
                try:
                    answer = await ask()
                    answers[name]["OK"] += 1
                    return answer
                except grpc.aio.AioRpcError as error:
                    again = error.code().name == CANCELLED and left
                    answers[name][AGAIN if again else error.code().name] += 1
                    if not again:
                        raise
                    await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(forever(session)), asyncio.create_task(forever(status))]
        try:
            yield answers
        finally:
            await wire.stop(tasks)


def _all_served(answers: dict[str, Counter[str]]) -> bool:
    """Return whether everything that was asked was answered, and anything was."""
    return all(ended["OK"] and set(+ended) <= {"OK", AGAIN} for ended in answers.values())


def _shares(answers: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {name: dict(ended) for name, ended in answers.items()}


async def _report_rate(lab: Lab, seconds: float) -> float:
    """Return the verifier's reports per second, as the coordinator counts them."""
    before, began = await _reports(lab), time.monotonic()
    await asyncio.sleep(seconds)
    return (await _reports(lab) - before) / (time.monotonic() - began)


async def _reports(lab: Lab) -> float:
    def read() -> str:
        with urllib.request.urlopen(f"http://{lab.metrics}/metrics", timeout=5.0) as answer:
            return str(answer.read().decode())

    found = _REPORTS.search(await asyncio.to_thread(read))
    return float(found.group(1)) if found else 0.0
