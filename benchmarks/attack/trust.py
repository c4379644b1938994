"""Get in with no credential, or with one that nobody gave: by Redis, by a session's id, by being on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio as redis_client
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.attack import wire, wiretap
from benchmarks.attack.finding import Finding
from benchmarks.attack.lab import Caller, Lab, redis_of
from outrider.processes import tied_to_this_process
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2

PUBLIC_KEYS = "{outrider}:v1:public-keys"
KEY_TAKEN_S = 6.0
"""Time in which coordinators exchange keys, and verifiers learn them."""
LOST_S = 6.0
"""Time after the loss of Redis for which callers without a key try."""
UP_S = 90.0
ID_BITS = 128
_HEX = re.compile(r"[0-9a-f]+")
_READY = re.compile(r"coordinator at (\S+?),")


async def redis_lost(lab: Lab) -> Finding:
    """Call without a key once Redis has lost the tenants that were created."""
    admitted: Counter[str] = Counter()
    async with lab.a_coordinator() as coordinator, Caller(coordinator.address) as stranger:
        before = await stranger.tried("Coordinator.ListTargets", pb.ListTargetsRequest())
        created = await stranger.tried("Admin.CreateTenant", pb.CreateTenantRequest(name="somebody"))
        with_tenants = await stranger.tried("Coordinator.ListTargets", pb.ListTargetsRequest())
        async with lab.under_attack():
            pid, _ = redis_of(coordinator)
            os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + LOST_S
            while time.monotonic() < until:
                admitted[await stranger.tried("Coordinator.ListTargets", pb.ListTargetsRequest())] += 1
                await asyncio.sleep(0.2)
    measured = {"before": before, "created": created, "with_tenants": with_tenants, "after_loss": dict(admitted)}
    held = created == "OK" and with_tenants == "UNAUTHENTICATED" and not admitted["OK"]
    return Finding(held, measured, f"no call without a key succeeds in {LOST_S:.0f} s")


async def key_in_redis(lab: Lab) -> Finding:
    """Write a public key into Redis, and sign a ticket with it."""
    key = Ed25519PrivateKey.generate()
    async with lab.operator() as operator:
        (verifier,) = (await operator("Admin.Status", pb.StatusRequest())).verifiers
    session_id = os.urandom(16).hex()
    ticket = wire.sign(key, wire.claims_for(verifier.target, verifier.verifier_id, session_id))
    member = f"{wire.key_id(key)}:{key.public_key().public_bytes_raw().hex()}"
    store = redis_client.Redis.from_url(redis_of(lab.coordinator)[1])
    ended: Counter[str] = Counter()
    try:
        async with lab.under_attack():
            until = time.monotonic() + KEY_TAKEN_S
            while time.monotonic() < until and not ended[wire.SERVED]:
                await store.zadd(PUBLIC_KEYS, {member: 1e3 * time.time()})
                await asyncio.sleep(0.5)
                address, epoch = lab.verifier.address, sum(ended.values()) + 1
                ended[
                    await wire.attached(lab.product, address, session_id, ticket, prompt=lab.prompt[:8], epoch=epoch)
                ] += 1
    finally:
        await store.zrem(PUBLIC_KEYS, member)
        await store.aclose()
    bound = f"no ticket of that key is served within {KEY_TAKEN_S:.0f} s"
    return Finding(not ended[wire.SERVED] and bool(ended), {"attached": dict(ended)}, bound)


async def fenced_by_id(lab: Lab) -> Finding:
    """Look in the log of a verifier without a coordinator for the id of a session, and fence the session with it."""
    lone = await lab.lone_verifier()
    async with wiretap.Wiretap(lone.address) as tap:
        client = {"verifier": lone.address, "reroute": {lone.address: tap.address}, "cache_dir": str(lab.folder("c"))}
        request = lab.request("neighbour", client=client) | {"draft": None, "max_tokens": 64}
        async with lab.under_attack():
            victim = await lab.product.run_device("generate", lab.cores[1], 30.0, **request, sessions=3)
            await asyncio.sleep(0.5)
            log, ids = lab.log_of(lone), tap.session_ids
            logged = {session_id for session_id in ids if session_id in log}
            fenced = Counter([await _fence(lab, lone.address, session_id) for session_id in sorted(logged)])
            await asyncio.sleep(lab.least_s)
    bits = min((4 * len(session_id) if _HEX.fullmatch(session_id) else 0 for session_id in ids), default=0)
    measured = {
        "sessions": len(ids),
        "bits": bits,
        "logged_whole": len(logged),
        "attached_by_logged_id": dict(fenced),
        "victim_ended": victim.code,
    }
    held = bool(ids) and bits >= ID_BITS and not logged
    return Finding(held, measured, f"ids have {ID_BITS} random bits, and none is logged whole")


async def on_loopback(lab: Lab) -> Finding:
    """Read the status of `outrider up`, and join it as a verifier, as any other user of the machine could."""
    async with _up(lab) as (address, folder):
        async with lab.under_attack(), Caller(address) as stranger:
            status = await stranger.tried("Admin.Status", pb.StatusRequest())
            join = pb.RegisterRequest(
                verifier_id="stranger",
                address="127.0.0.1:1",
                target=session_pb2.TargetIdentity(name="any", weights_hash="sha256:w", tokenizer_hash="sha256:t"),
                capacity_sessions=64,
                instance=1,
            )
            joined = await stranger.tried("Registry.Register", join)
            await asyncio.sleep(lab.least_s)
        tokens = [file for file in folder.rglob("*token*") if file.is_file()]
        open_files = [file.name for file in tokens if file.stat().st_mode & 0o077]
    measured = {"status": status, "joined": joined, "token_files_others_can_read": open_files}
    refused = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    held = status in refused and joined in refused and not open_files
    return Finding(held, measured, "both are refused, and no other user may read the tokens' files")


@contextlib.asynccontextmanager
async def _up(lab: Lab) -> AsyncIterator[tuple[str, Path]]:
    """Run `outrider up` with its defaults; yield the coordinator's address and the folder of its state."""
    home = lab.folder("up")
    words = ("up", "--listen", "127.0.0.1:0", "--state-dir", str(home / "state"))
    models = ("--model", str(lab.pair.target), "--draft", str(lab.pair.draft))
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process(),
        *lab.product.python("-m", "coordinator.cli", *words, *models, HOME=str(home)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(UP_S):
            while process.stdout is not None and (line := (await process.stdout.readline()).decode()):
                if line.startswith("ready") and (found := _READY.search(line)):
                    yield found.group(1), home
                    return
        raise RuntimeError("`outrider up` ended before it was ready")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10.0)
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _fence(lab: Lab, verifier: str, session_id: str) -> str:
    """Attach with a later epoch than any device's to the session of this id."""
    return await wire.attached(lab.product, verifier, session_id, b"", prompt=lab.prompt[:8], epoch=1 << 62)
