"""Translate gRPC calls for the handlers: authenticate the caller, decode the request, encode the answer."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.api import admin_codec, codec
from coordinator.api.admin_handlers import AdminHandlers
from coordinator.api.authentication import Authenticator, Metadata
from coordinator.api.handlers import Handlers
from coordinator.api.tenant_keys import TenantKeys
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


def _rpc(method: Callable[[_S, _Q, str], Awaitable[_A]]) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """Wrap a method as gRPC calls it: authenticate the caller, count and trace the call, and map errors to a status."""

    @functools.wraps(method)
    async def wrapped(self: _S, request: _Q, context: _Context) -> _A:
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(session=getattr(request, "session_id", ""), request=logs.request_id_from(metadata))
        name, begun = method.__name__, time.perf_counter()
        try:
            with traces.span(f"outrider.coordinator.{name}", metadata):
                return await method(self, request, await self.caller(metadata))
        except Exception as error:
            self.handlers.counters.refuse(name, error)
            await abort(context, error)
        finally:
            self.handlers.counters.calls_s[name].add(time.perf_counter() - begun)

    return wrapped


@dataclass
class _Servicer:
    """The methods of subclasses take the request and the caller, as `caller` returns it."""

    handlers: Handlers
    releases: ReleaseHandlers
    authenticator: Authenticator

    async def caller(self, metadata: Metadata) -> str:
        """Return the authenticated caller. Raises Unauthenticated or PermissionDenied."""
        raise NotImplementedError


class CoordinatorServicer(_Servicer, stubs.CoordinatorServicer):
    """The calls of devices; the caller is a tenant."""

    async def caller(self, metadata: Metadata) -> str:
        return await self.authenticator.tenant(metadata)

    @_rpc
    async def OpenSession(self, request: pb.OpenSessionRequest, tenant: str) -> pb.OpenSessionResponse:
        wanted, recording = codec.open_from_proto(request), self.authenticator.recording(tenant)
        opened = await self.handlers.open(tenant, wanted, recording)
        return codec.opened_to_proto(opened, await self.releases.serial())

    @_rpc
    async def ResumeSession(self, request: pb.ResumeSessionRequest, tenant: str) -> pb.OpenSessionResponse:
        opened = await self.handlers.resume(tenant, *codec.resume_from_proto(request))
        return codec.opened_to_proto(opened, await self.releases.serial())

    @_rpc
    async def CloseSession(self, request: pb.CloseSessionRequest, tenant: str) -> pb.CloseSessionResponse:
        await self.handlers.close(tenant, codec.session_id(request.session_id), codec.ticket_bytes(request.ticket))
        return pb.CloseSessionResponse()

    @_rpc
    async def ListTargets(self, request: pb.ListTargetsRequest, tenant: str) -> pb.ListTargetsResponse:
        return pb.ListTargetsResponse(targets=map(target_to_proto, await self.handlers.targets()))

    @_rpc
    async def OfferRelease(self, request: pb.OfferReleaseRequest, tenant: str) -> pb.OfferReleaseResponse:
        asked = codec.offer_from_proto(request)
        serial, release = await self.releases.offer(*asked, tenant if request.store else "")
        return codec.offer_to_proto(serial, release, self.releases.base_url)


class RegistryServicer(_Servicer, stubs.RegistryServicer):
    """The calls of verifiers, which have the join token."""

    async def caller(self, metadata: Metadata) -> str:
        self.authenticator.check_verifier(metadata)
        return "verifier"

    @_rpc
    async def Register(self, request: pb.RegisterRequest, caller: str) -> pb.RegisterResponse:
        await self.handlers.register(codec.registration_from_proto(request))
        return pb.RegisterResponse(
            lease_ms=self.handlers.config.lease_ms,
            report_interval_ms=self.handlers.config.report_interval_ms,
            public_keys=self.handlers.keyring.public_keys,
        )

    @_rpc
    async def Report(self, request: pb.ReportRequest, caller: str) -> pb.ReportResponse:
        verifier_id, instance = codec.identity_from_proto(request)
        verifier, sessions = codec.telemetry_from_proto(request)
        reply = await self.handlers.report(verifier_id, instance, verifier, sessions)
        serial = await self.releases.sample(verifier_id, sessions if reply is not None else ())
        return codec.report_to_proto(reply, self.handlers.keyring.public_keys, serial, self.handlers.config.limits)

    @_rpc
    async def Deregister(self, request: pb.DeregisterRequest, caller: str) -> pb.DeregisterResponse:
        await self.handlers.deregister(*codec.identity_from_proto(request))
        return pb.DeregisterResponse()


@dataclass
class AdminServicer(_Servicer, stubs.AdminServicer):
    """The calls of operators, who have the admin token."""

    admin: AdminHandlers
    tenants: TenantKeys

    async def caller(self, metadata: Metadata) -> str:
        self.authenticator.check_operator(metadata)
        return "operator"

    @_rpc
    async def Status(self, request: pb.StatusRequest, caller: str) -> pb.StatusResponse:
        verifiers, sessions, total_verifiers, total_sessions = await self.admin.status()
        return pb.StatusResponse(
            verifiers=map(admin_codec.verifier_to_proto, verifiers),
            sessions=map(admin_codec.session_to_proto, sessions),
            store=self.admin.store_name,
            uptime_s=self.admin.uptime_s,
            total_verifiers=total_verifiers,
            total_sessions=total_sessions,
        )

    @_rpc
    async def ListVerifiers(self, request: pb.ListVerifiersRequest, caller: str) -> pb.ListVerifiersResponse:
        found, following = await self.admin.verifiers(*admin_codec.verifiers_query(request))
        return pb.ListVerifiersResponse(verifiers=map(admin_codec.verifier_to_proto, found), next=following)

    @_rpc
    async def UpdateVerifier(self, request: pb.UpdateVerifierRequest, caller: str) -> pb.UpdateVerifierResponse:
        verifier = await self.admin.update_verifier(*admin_codec.verifier_action_from_proto(request))
        return pb.UpdateVerifierResponse(verifier=admin_codec.verifier_to_proto(verifier) if verifier else None)

    @_rpc
    async def ListSessions(self, request: pb.ListSessionsRequest, caller: str) -> pb.ListSessionsResponse:
        query = admin_codec.sessions_query(request)
        if request.session_id:
            found, following = [await self.admin.session(codec.session_id(request.session_id))], ""
        else:
            found, following = await self.admin.sessions(*query)
        return pb.ListSessionsResponse(sessions=map(admin_codec.session_to_proto, found), next=following)

    @_rpc
    async def KillSession(self, request: pb.KillSessionRequest, caller: str) -> pb.KillSessionResponse:
        return pb.KillSessionResponse(verifier_id=await self.admin.kill(codec.session_id(request.session_id)))

    @_rpc
    async def CreateTenant(self, request: pb.CreateTenantRequest, caller: str) -> pb.CreateTenantResponse:
        tenant, key = await self.tenants.create(request.name)
        return pb.CreateTenantResponse(tenant=admin_codec.tenant_to_proto(tenant), key=key)

    @_rpc
    async def ListTenants(self, request: pb.ListTenantsRequest, caller: str) -> pb.ListTenantsResponse:
        after, limit = admin_codec.tenants_query(request)
        found, following = await self.tenants.listed(after, limit)
        _, keys_needed = await self.tenants.holder(None)
        anonymous = self.authenticator.anonymous and not keys_needed
        return pb.ListTenantsResponse(
            tenants=map(admin_codec.tenant_to_proto, found), next=following, anonymous=anonymous
        )

    @_rpc
    async def RevokeTenant(self, request: pb.RevokeTenantRequest, caller: str) -> pb.RevokeTenantResponse:
        tenant = await self.tenants.revoke(request.name)
        return pb.RevokeTenantResponse(tenant=admin_codec.tenant_to_proto(tenant))

    @_rpc
    async def ListWindows(self, request: pb.ListWindowsRequest, caller: str) -> pb.ListWindowsResponse:
        session_id = codec.session_id(request.session_id) if request.session_id else ""
        return admin_codec.windows_to_proto(*await self.admin.windows(session_id))

    @_rpc
    async def SetWindowBounds(self, request: pb.SetWindowBoundsRequest, caller: str) -> pb.SetWindowBoundsResponse:
        await self.admin.set_bounds(*admin_codec.bounds_from_proto(request))
        return pb.SetWindowBoundsResponse()

    @_rpc
    async def PublishRelease(self, request: pb.PublishReleaseRequest, caller: str) -> pb.PublishReleaseResponse:
        state = await self.releases.publish(request.manifest)
        return pb.PublishReleaseResponse(state=admin_codec.state_to_proto(state))

    @_rpc
    async def ListReleases(self, request: pb.ListReleasesRequest, caller: str) -> pb.ListReleasesResponse:
        beginning = admin_codec.hash_beginning(request.release) if request.release else ""
        serial, found = await self.releases.releases(beginning)
        return pb.ListReleasesResponse(releases=map(admin_codec.release_to_proto, found), serial=serial)

    @_rpc
    async def UpdateRelease(self, request: pb.UpdateReleaseRequest, caller: str) -> pb.UpdateReleaseResponse:
        release = await self.releases.apply(*admin_codec.release_action_from_proto(request))
        return pb.UpdateReleaseResponse(release=admin_codec.release_to_proto(release))


def add_services(
    server: grpc.aio.Server,
    handlers: Handlers,
    releases: ReleaseHandlers,
    authenticator: Authenticator,
    admin: AdminHandlers,
    tenants: TenantKeys,
    health_servicer: health.aio.HealthServicer,
) -> None:
    """Add every service of a coordinator, with health checks and reflection."""
    parts = handlers, releases, authenticator
    stubs.add_CoordinatorServicer_to_server(CoordinatorServicer(*parts), server)  # type: ignore[no-untyped-call]
    stubs.add_RegistryServicer_to_server(RegistryServicer(*parts), server)  # type: ignore[no-untyped-call]
    stubs.add_AdminServicer_to_server(AdminServicer(*parts, admin, tenants), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
