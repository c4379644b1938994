"""gRPC on one side, handlers on the other: who is calling, what do they say, what are they told."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator import codec
from coordinator.handlers import Handlers
from coordinator.tenants import Access, Metadata
from outrider.wire.status import abort
from outrider.wire.ticket import target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

SERVICES = tuple(pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Coordinator", "Registry", "Admin"))

_Context = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


def _rpc(method: Callable[[_S, _Q, Metadata], Awaitable[_A]]) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """The method as gRPC calls it; whatever it raises ends the call with its status."""

    @functools.wraps(method)
    async def wrapped(self: _S, request: _Q, context: _Context) -> _A:
        try:
            return await method(self, request, tuple(context.invocation_metadata() or ()))
        except Exception as error:
            await abort(context, error)

    return wrapped


class _Servicer:
    def __init__(self, handlers: Handlers, access: Access) -> None:
        self._handlers = handlers
        self._access = access


class CoordinatorServicer(_Servicer, stubs.CoordinatorServicer):
    """For devices."""

    @_rpc
    async def OpenSession(self, request: pb.OpenSessionRequest, metadata: Metadata) -> pb.OpenSessionResponse:
        tenant = self._access.tenant(metadata)
        return codec.opening_to_proto(await self._handlers.open(tenant, codec.need_from_proto(request)))

    @_rpc
    async def ResumeSession(self, request: pb.ResumeSessionRequest, metadata: Metadata) -> pb.OpenSessionResponse:
        tenant = self._access.tenant(metadata)
        return codec.opening_to_proto(await self._handlers.resume(tenant, codec.resume_from_proto(request)))

    @_rpc
    async def CloseSession(self, request: pb.CloseSessionRequest, metadata: Metadata) -> pb.CloseSessionResponse:
        tenant = self._access.tenant(metadata)
        await self._handlers.close(tenant, codec.session_id(request.session_id), codec.presented(request.ticket))
        return pb.CloseSessionResponse()

    @_rpc
    async def ListTargets(self, request: pb.ListTargetsRequest, metadata: Metadata) -> pb.ListTargetsResponse:
        self._access.tenant(metadata)
        return pb.ListTargetsResponse(targets=map(target_to_proto, await self._handlers.targets()))


class RegistryServicer(_Servicer, stubs.RegistryServicer):
    """For verifiers."""

    @_rpc
    async def Register(self, request: pb.RegisterRequest, metadata: Metadata) -> pb.RegisterResponse:
        self._access.verifier(metadata)
        membership = await self._handlers.register(codec.registration_from_proto(request))
        return pb.RegisterResponse(
            lease_ms=membership.lease_ms,
            report_interval_ms=membership.report_interval_ms,
            public_keys=dict(membership.public_keys),
        )

    @_rpc
    async def Report(self, request: pb.ReportRequest, metadata: Metadata) -> pb.ReportResponse:
        self._access.verifier(metadata)
        verifier_id, instance = codec.identity_from_proto(request)
        load, sessions = codec.load_from_proto(request), codec.sessions_from_proto(request)
        windows = await self._handlers.report(verifier_id, instance, load, sessions)
        return pb.ReportResponse(
            known=windows is not None,
            public_keys=dict(self._handlers.membership.public_keys),
            directives=[codec.session_directive_to_proto(w, self._handlers.limits) for w in windows or ()],
        )

    @_rpc
    async def Deregister(self, request: pb.DeregisterRequest, metadata: Metadata) -> pb.DeregisterResponse:
        self._access.verifier(metadata)
        await self._handlers.deregister(*codec.identity_from_proto(request))
        return pb.DeregisterResponse()


class AdminServicer(_Servicer, stubs.AdminServicer):
    """For operators."""

    @_rpc
    async def Status(self, request: pb.StatusRequest, metadata: Metadata) -> pb.StatusResponse:
        self._access.operator(metadata)
        return codec.fleet_to_proto(await self._handlers.status())

    @_rpc
    async def ShowWindows(self, request: pb.ShowWindowsRequest, metadata: Metadata) -> pb.ShowWindowsResponse:
        self._access.operator(metadata)
        asked = codec.session_id(request.session_id) if request.session_id else ""
        return codec.windows_to_proto(await self._handlers.windows(asked))

    @_rpc
    async def BoundWindow(self, request: pb.BoundWindowRequest, metadata: Metadata) -> pb.BoundWindowResponse:
        self._access.operator(metadata)
        await self._handlers.bound(*codec.bounds_from_proto(request))
        return pb.BoundWindowResponse()


class Health:
    """What the standard health service says of us: we serve as long as the store answers."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Also under each service's own name."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def say(self, serving: bool) -> None:
        """From now on."""
        kinds = health_pb2.HealthCheckResponse
        for service in ("", *SERVICES):
            await self._servicer.set(service, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def leave(self) -> None:
        """Not serving, for good."""
        await self._servicer.enter_graceful_shutdown()


def add_services(server: grpc.aio.Server, handlers: Handlers, access: Access, vitals: Health) -> None:
    """Everything that a coordinator answers."""
    stubs.add_CoordinatorServicer_to_server(CoordinatorServicer(handlers, access), server)  # type: ignore[no-untyped-call]
    stubs.add_RegistryServicer_to_server(RegistryServicer(handlers, access), server)  # type: ignore[no-untyped-call]
    stubs.add_AdminServicer_to_server(AdminServicer(handlers, access), server)  # type: ignore[no-untyped-call]
    vitals.add_to(server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
