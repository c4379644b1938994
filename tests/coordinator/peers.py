"""Register verifiers that exist only as reports, with a coordinator's stubs for them and for devices."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from outrider.wire import ticket
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

DEMO = session_pb2.TargetIdentity(
    name="demo", weights_hash="sha256:w", tokenizer_hash="sha256:t", dtype="float32", backend="sdpa", hardware="cpu"
)


def identity(**changes: str) -> session_pb2.TargetIdentity:
    """Return the demo target with these fields changed."""
    changed = session_pb2.TargetIdentity()
    changed.CopyFrom(DEMO)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float = 60.0) -> None:
    """Wait until the condition holds; fail if it never does."""
    give_up = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"still not so after {timeout_s} s")
        await asyncio.sleep(0.01)


def revoked(answer: pb.ReportResponse) -> list[tuple[str, str]]:
    """Return the kind and the id of each revocation in a report's answer."""
    return [(kind, getattr(one, kind)) for one in answer.revocations if (kind := one.WhichOneof("ended"))]


class Peer:
    """Hold a coordinator's address with stubs for it, and the verifiers registered there."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.sessions = coordinator_pb2_grpc.CoordinatorStub(channel)
        self.registry = coordinator_pb2_grpc.RegistryStub(channel)
        self.admin = coordinator_pb2_grpc.AdminStub(channel)
        self.public_keys: dict[str, bytes] = {}

    async def join(
        self,
        verifier_id: str,
        *,
        capacity: int = 8,
        target=DEMO,
        instance: int = 1,
        tls: bool = False,
    ):
        answer = await self.registry.Register(
            pb.RegisterRequest(
                verifier_id=verifier_id,
                address=f"127.0.0.1:{10_000 + int(verifier_id[1:])}",
                tls=tls,
                target=target,
                capacity_sessions=capacity,
                instance=instance,
            )
        )
        self.public_keys |= dict(answer.public_keys)
        return answer

    async def report(self, verifier_id: str, sessions=(), *, instance: int = 1, seen: int = 0, **load):
        request = pb.ReportRequest(
            verifier_id=verifier_id,
            instance=instance,
            revocations_seen=seen,
            verifier=VerifierTelemetry(live_sessions=len(sessions), **load),
            sessions=[s if isinstance(s, SessionTelemetry) else SessionTelemetry(session_id=s) for s in sessions],
        )
        return await self.registry.Report(request)

    async def open(self, **request):
        return await self.sessions.OpenSession(pb.OpenSessionRequest(**request))

    async def resume(self, opened, **request):
        order = {"session_id": opened.session_id, "ticket": opened.primary.ticket, **request}
        return await self.sessions.ResumeSession(pb.ResumeSessionRequest(**order))

    async def close(self, opened):
        order = pb.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        await self.sessions.CloseSession(order)

    async def serving(self):
        return (await self.admin.ListVerifiers(pb.ListVerifiersRequest())).verifiers

    async def placed(self):
        return (await self.admin.ListSessions(pb.ListSessionsRequest(limit=1_000))).sessions

    async def alive(self) -> set[str]:
        return {v.verifier_id for v in await self.serving()}

    def read(self, grant) -> ticket.Claims:
        """Return the claims of the grant's ticket, as its verifier reads it."""
        return ticket.verify(grant.ticket, self.public_keys, audience=grant.verifier_id, now=time.time())
