"""gRPC on one side, handlers on the other: who is calling, what do they say, what are they told."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.api import admin_codec, codec
from coordinator.api.admin_handlers import Operators
from coordinator.api.authentication import Access, Metadata
from coordinator.api.handlers import Handlers
from coordinator.api.tenant_keys import TenantKeys
from coordinator.releases import codec as releases_codec
from coordinator.releases.handlers import ReleaseHandlers
from outrider.telemetry import logs, traces
from outrider.wire.status import abort
from outrider.wire.ticket import target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

SERVICES = tuple(pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Coordinator", "Registry", "Admin"))

_Context = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S", bound="_Servicer")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


def _rpc(method: Callable[[_S, _Q, Metadata], Awaitable[_A]]) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """The method as gRPC calls it; whatever it raises ends the call with its status."""

    @functools.wraps(method)
    async def wrapped(self: _S, request: _Q, context: _Context) -> _A:
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(session=getattr(request, "session_id", ""), request=logs.given_request(metadata))
        name, begun = method.__name__, time.perf_counter()
        try:
            with traces.span(f"outrider.coordinator.{name}", metadata):
                return await method(self, request, metadata)
        except Exception as error:
            self.counters.refuse(name, error)
            await abort(context, error)
        finally:
            self.counters.calls_s[name].add(time.perf_counter() - begun)

    return wrapped


class _Servicer:
    def __init__(self, handlers: Handlers, releases: ReleaseHandlers, access: Access) -> None:
        self._handlers = handlers
        self.counters = handlers.counters
        self._releases = releases
        self._access = access


class CoordinatorServicer(_Servicer, stubs.CoordinatorServicer):
    """For devices."""

    @_rpc
    async def OpenSession(self, request: pb.OpenSessionRequest, metadata: Metadata) -> pb.OpenSessionResponse:
        tenant = await self._access.tenant(metadata)
        need, recording = codec.need_from_proto(request), self._access.recording(tenant)
        opening = await self._handlers.open(tenant, need, recording)
        return codec.opening_to_proto(opening, await self._releases.serial())

    @_rpc
    async def ResumeSession(self, request: pb.ResumeSessionRequest, metadata: Metadata) -> pb.OpenSessionResponse:
        tenant = await self._access.tenant(metadata)
        opening = await self._handlers.resume(tenant, codec.resume_from_proto(request))
        return codec.opening_to_proto(opening, await self._releases.serial())

    @_rpc
    async def CloseSession(self, request: pb.CloseSessionRequest, metadata: Metadata) -> pb.CloseSessionResponse:
        tenant = await self._access.tenant(metadata)
        await self._handlers.close(tenant, codec.session_id(request.session_id), codec.presented(request.ticket))
        return pb.CloseSessionResponse()

    @_rpc
    async def ListTargets(self, request: pb.ListTargetsRequest, metadata: Metadata) -> pb.ListTargetsResponse:
        await self._access.tenant(metadata)
        return pb.ListTargetsResponse(targets=map(target_to_proto, await self._handlers.targets()))

    @_rpc
    async def OfferRelease(self, request: pb.OfferReleaseRequest, metadata: Metadata) -> pb.OfferReleaseResponse:
        await self._access.tenant(metadata)
        return releases_codec.offer_to_proto(await self._releases.offer(*releases_codec.asking_from_proto(request)))


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
        verifier, sessions = codec.telemetry_from_proto(request)
        told = await self._handlers.report(verifier_id, instance, verifier, sessions)
        serial = await self._releases.hear(verifier_id, sessions if told is not None else ())
        keys = dict(self._handlers.membership.public_keys)
        if told is None:
            return pb.ReportResponse(public_keys=keys, release_serial=serial)
        return pb.ReportResponse(
            known=True,
            public_keys=keys,
            directives=[codec.session_directive_to_proto(w, self._handlers.limits) for w in told.windows],
            release_serial=serial,
            drain=told.drain,
            killed=told.killed,
        )

    @_rpc
    async def Deregister(self, request: pb.DeregisterRequest, metadata: Metadata) -> pb.DeregisterResponse:
        self._access.verifier(metadata)
        await self._handlers.deregister(*codec.identity_from_proto(request))
        return pb.DeregisterResponse()


class AdminServicer(_Servicer, stubs.AdminServicer):
    """For operators."""

    def __init__(
        self,
        handlers: Handlers,
        releases: ReleaseHandlers,
        access: Access,
        operators: Operators,
        tenants: TenantKeys,
    ) -> None:
        super().__init__(handlers, releases, access)
        self._operators = operators
        self._tenants = tenants

    @_rpc
    async def Status(self, request: pb.StatusRequest, metadata: Metadata) -> pb.StatusResponse:
        self._access.operator(metadata)
        return admin_codec.fleet_to_proto(await self._handlers.status())

    @_rpc
    async def ListVerifiers(self, request: pb.ListVerifiersRequest, metadata: Metadata) -> pb.ListVerifiersResponse:
        self._access.operator(metadata)
        found, after = await self._operators.verifiers(*admin_codec.verifiers_asked(request))
        return pb.ListVerifiersResponse(verifiers=map(admin_codec.verifier_to_proto, found), next=after)

    @_rpc
    async def SteerVerifier(self, request: pb.SteerVerifierRequest, metadata: Metadata) -> pb.SteerVerifierResponse:
        self._access.operator(metadata)
        verifier = await self._operators.steer(*admin_codec.order_from_proto(request))
        return pb.SteerVerifierResponse(verifier=admin_codec.verifier_to_proto(verifier) if verifier else None)

    @_rpc
    async def ListSessions(self, request: pb.ListSessionsRequest, metadata: Metadata) -> pb.ListSessionsResponse:
        self._access.operator(metadata)
        found, after = await self._operators.sessions(admin_codec.sessions_asked(request))
        return pb.ListSessionsResponse(sessions=map(admin_codec.session_to_proto, found), next=after)

    @_rpc
    async def KillSession(self, request: pb.KillSessionRequest, metadata: Metadata) -> pb.KillSessionResponse:
        self._access.operator(metadata)
        where = await self._operators.kill(codec.session_id(request.session_id))
        return pb.KillSessionResponse(verifier_id=where)

    @_rpc
    async def CreateTenant(self, request: pb.CreateTenantRequest, metadata: Metadata) -> pb.CreateTenantResponse:
        self._access.operator(metadata)
        tenant, key = await self._tenants.create(request.name, self._access.configured)
        return pb.CreateTenantResponse(tenant=admin_codec.tenant_to_proto(tenant), key=key)

    @_rpc
    async def ListTenants(self, request: pb.ListTenantsRequest, metadata: Metadata) -> pb.ListTenantsResponse:
        self._access.operator(metadata)
        after, limit = admin_codec.tenants_asked(request)
        found, following = await self._tenants.listed(after, limit, self._access.configured)
        anonymous = self._access.anonymous and not (await self._tenants.holder(None)).keyed
        return pb.ListTenantsResponse(
            tenants=map(admin_codec.tenant_to_proto, found), next=following, anonymous=anonymous
        )

    @_rpc
    async def RevokeTenant(self, request: pb.RevokeTenantRequest, metadata: Metadata) -> pb.RevokeTenantResponse:
        self._access.operator(metadata)
        tenant = await self._tenants.revoke(request.name, self._access.configured)
        return pb.RevokeTenantResponse(tenant=admin_codec.tenant_to_proto(tenant))

    @_rpc
    async def ShowWindows(self, request: pb.ShowWindowsRequest, metadata: Metadata) -> pb.ShowWindowsResponse:
        self._access.operator(metadata)
        asked = codec.session_id(request.session_id) if request.session_id else ""
        return admin_codec.windows_to_proto(await self._handlers.windows(asked))

    @_rpc
    async def BoundWindow(self, request: pb.BoundWindowRequest, metadata: Metadata) -> pb.BoundWindowResponse:
        self._access.operator(metadata)
        await self._handlers.bound(*admin_codec.bounds_from_proto(request))
        return pb.BoundWindowResponse()

    @_rpc
    async def PublishRelease(self, request: pb.PublishReleaseRequest, metadata: Metadata) -> pb.PublishReleaseResponse:
        self._access.operator(metadata)
        state = await self._releases.publish(request.manifest)
        return pb.PublishReleaseResponse(state=releases_codec.state_to_proto(state))

    @_rpc
    async def ListReleases(self, request: pb.ListReleasesRequest, metadata: Metadata) -> pb.ListReleasesResponse:
        self._access.operator(metadata)
        asked = releases_codec.beginning(request.release) if request.release else ""
        serial, found = await self._releases.listed(asked)
        return pb.ListReleasesResponse(releases=map(releases_codec.release_to_proto, found), serial=serial)

    @_rpc
    async def SteerRelease(self, request: pb.SteerReleaseRequest, metadata: Metadata) -> pb.SteerReleaseResponse:
        self._access.operator(metadata)
        release = await self._releases.steer(*releases_codec.order_from_proto(request))
        return pb.SteerReleaseResponse(release=releases_codec.release_to_proto(release))


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


def add_services(
    server: grpc.aio.Server,
    handlers: Handlers,
    releases: ReleaseHandlers,
    access: Access,
    operators: Operators,
    tenants: TenantKeys,
    vitals: Health,
) -> None:
    """Everything that a coordinator answers."""
    admin = AdminServicer(handlers, releases, access, operators, tenants)
    stubs.add_CoordinatorServicer_to_server(CoordinatorServicer(handlers, releases, access), server)  # type: ignore[no-untyped-call]
    stubs.add_RegistryServicer_to_server(RegistryServicer(handlers, releases, access), server)  # type: ignore[no-untyped-call]
    stubs.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    vitals.add_to(server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
