"""Take places and keep them: as a tenant who wants all, and with tickets whose time is over."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from typing import Any

import grpc

from benchmarks.attack import wire
from benchmarks.attack.finding import Finding, rounded
from benchmarks.attack.lab import FLOODER, HONEST, HOSTILE, PLACES, Caller, Lab
from outrider.wire.v1 import coordinator_pb2 as pb

PLACED_S = 12.0
"""Time in which a tenant that has no place gets one, whoever has taken all and attaches to none: places that are not
attached are given back after 10 s."""
WANTED = 3
"""Places that the honest tenant wants, one after the other."""
GREEDY = 6
"""Tasks of the hostile tenant."""
ENDED_S = 3.0
"""Time in which a verifier ends what is to end: the interval of its reports, and a second."""
HOARDED = 8
RETRY_AFTER = "outrider-retry-after-s"


async def all_places(lab: Lab) -> Finding:
    """Take every place as one tenant, attach to none, and take again what is given back."""
    taken: list[pb.OpenSessionResponse] = []
    waits: list[float | None] = []
    served: Counter[str] = Counter()
    async with lab.caller(HOSTILE) as hostile, lab.caller(HONEST) as honest:

        async def take() -> None:
            while True:
                try:
                    taken.append(await hostile.open())
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        async with lab.under_attack():
            tasks = [asyncio.create_task(take()) for _ in range(GREEDY)]
            await asyncio.sleep(2.0)
            held = []
            for _ in range(lab.size.pick(smoke=1, quick=WANTED, full=2 * WANTED)):
                began = time.monotonic()
                opened = await _placed(honest, PLACED_S)
                waits.append(time.monotonic() - began if opened else None)
                if opened is None:
                    break
                held.append(opened)
                served[await _attach(lab, opened)] += 1
            await wire.stop(tasks)
        await asyncio.gather(*(hostile.close(opened) for opened in taken), *(honest.close(opened) for opened in held))
    measured = {
        "places": PLACES,
        "taken": len(taken),
        "placed_after_s": [rounded(wait) for wait in waits],
        "attached": dict(served),
    }
    held_up = all(wait is not None and wait <= PLACED_S for wait in waits) and set(served) == {wire.SERVED}
    return Finding(held_up, measured, f"another tenant has a place within {PLACED_S:.0f} s, again and again")


async def flood_of_opens(lab: Lab) -> Finding:
    """Open and close sessions as one tenant, as fast as the coordinator answers."""
    ended: Counter[str] = Counter()
    honest_ended: Counter[str] = Counter()
    without_advice = 0
    async with lab.caller(FLOODER) as hostile, lab.caller(HONEST) as honest:

        async def flood() -> None:
            nonlocal without_advice
            while True:
                try:
                    opened = await hostile.open()
                    ended["OK"] += 1
                    await hostile.close(opened)
                except grpc.aio.AioRpcError as error:
                    ended[error.code().name] += 1
                    without_advice += not _says_when(error)

        async with lab.under_attack():
            seconds = lab.size.pick(smoke=2.0, quick=5.0, full=15.0)
            tasks = [asyncio.create_task(flood()) for _ in range(8)]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                try:
                    await honest.close(await honest.open())
                    honest_ended["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    honest_ended[error.code().name] += 1
                await asyncio.sleep(0.5)
            await wire.stop(tasks)
    refused = ended["RESOURCE_EXHAUSTED"]
    measured = {
        "opened_per_s": rounded(ended["OK"] / seconds),
        "refused_per_s": rounded(refused / seconds),
        "refused_without_time": without_advice,
        "honest": dict(honest_ended),
    }
    held = refused > 0 and not without_advice and set(honest_ended) == {"OK"}
    return Finding(held, measured, "the flood is refused with a time to come again, other tenants are not")


async def closed_tickets(lab: Lab) -> Finding:
    """Close sessions, and attach with their tickets."""
    async with lab.caller(HOSTILE) as hostile:
        opened = await _hoard(hostile, HOARDED)
        await asyncio.gather(*(hostile.close(one) for one in opened))
        async with lab.under_attack():
            await asyncio.sleep(0.5)
            lived = await asyncio.gather(*(_lifetime(lab, one) for one in opened))
            again = Counter(await asyncio.gather(*(_attach(lab, one, attempt=1) for one in opened)))
    measured = {"tickets": len(opened), "served_s": [rounded(seconds) for seconds in lived], "again": dict(again)}
    held = bool(opened) and max(lived, default=0.0) <= ENDED_S and not again[wire.SERVED]
    return Finding(held, measured, f"none is served for more than {ENDED_S:.0f} s, and none twice")


async def killed_session(lab: Lab) -> Finding:
    """Attach again, eight times, to a session that an operator has killed."""
    async with lab.caller(HOSTILE) as hostile, lab.operator() as operator:
        opened = await hostile.open()
        async with lab.under_attack():
            living = asyncio.create_task(_lifetime(lab, opened, 4 * ENDED_S))
            await asyncio.sleep(1.5)
            killed_at = time.monotonic()
            await operator("Admin.KillSession", pb.KillSessionRequest(session_id=opened.session_id))
            await living
            live_s = time.monotonic() - killed_at
            await asyncio.sleep(max(0.0, ENDED_S - live_s))
            again = Counter([await _attach(lab, opened, attempt=attempt) for attempt in range(1, HOARDED + 1)])
        await hostile.close(opened)
    measured = {"ended_after_s": rounded(live_s), "again": dict(again)}
    bound = f"the stream ends within {ENDED_S:.0f} s, no attach is served"
    return Finding(live_s <= ENDED_S and not again[wire.SERVED], measured, bound)


async def revoked_tenant(lab: Lab) -> Finding:
    """Hoard tickets as a tenant, and use them once the tenant is revoked."""
    name = f"hoarder-{secrets.token_hex(4)}"
    async with lab.operator() as operator:
        created = await operator("Admin.CreateTenant", pb.CreateTenantRequest(name=name))
        async with Caller(lab.coordinator.address, created.key) as hoarder:
            opened = await _hoard(hoarder, HOARDED)
            async with lab.under_attack():
                await operator("Admin.RevokeTenant", pb.RevokeTenantRequest(name=name))
                await asyncio.sleep(ENDED_S)
                served = Counter(await asyncio.gather(*(_attach(lab, one) for one in opened)))
                await asyncio.sleep(lab.least_s)
            await asyncio.gather(*(hoarder.close(one) for one in opened))
    measured = {"tickets": len(opened), "attached": dict(served)}
    held = bool(opened) and not served[wire.SERVED]
    return Finding(held, measured, f"no ticket is served {ENDED_S:.0f} s after the tenant was revoked")


async def _placed(caller: Caller, timeout_s: float) -> pb.OpenSessionResponse | None:
    """Open a session as a polite device does: again after the time that a refusal names. None if that fails."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        try:
            return await caller.open()
        except grpc.aio.AioRpcError as error:
            await asyncio.sleep(min(max(_retry_after(error), 0.1), 1.0))
    return None


async def _hoard(caller: Caller, count: int) -> list[pb.OpenSessionResponse]:
    """Open sessions, as many as the tenant gets of `count`."""
    opened = []
    for _ in range(count):
        with contextlib.suppress(grpc.aio.AioRpcError):
            opened.append(await caller.open())
    return opened


async def _attach(lab: Lab, opened: pb.OpenSessionResponse, *, attempt: int = 0) -> str:
    """Attach once, with the ticket's first epoch or a later one."""
    grant = opened.primary
    return await wire.attached(
        lab.product,
        grant.address,
        opened.session_id,
        grant.ticket,
        prompt=lab.prompt[:8],
        epoch=grant.epoch_first + attempt,
    )


async def _lifetime(lab: Lab, opened: pb.OpenSessionResponse, most_s: float = 2 * ENDED_S) -> float:
    """Attach and return the seconds for which the stream is served; `most_s` if it does not end."""
    grant, served_at, ended_at = opened.primary, None, None
    async with lab.product.stream(grant.address, opened.session_id, grant.ticket, grant.epoch_first) as raw:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(most_s):
                await raw.open(lab.prompt[:8], 1_000)
                while (message := await raw.receive()) is not None:
                    if served_at is None and message.WhichOneof("kind") == "commit":
                        served_at = time.monotonic()
        ended_at = time.monotonic()
    return ended_at - served_at if served_at is not None else 0.0


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    """Return the seconds after which a refused caller may come again; 0 if the refusal does not say."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    try:
        return float(trailers.get(RETRY_AFTER, 0.0))
    except ValueError:
        return 0.0


def _says_when(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _retry_after(error) > 0.0
