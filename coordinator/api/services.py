"""Translate gRPC calls for the handlers: authenticate the caller, decode the request, encode the answer."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from coordinator.api import admin_codec, codec
from coordinator.api.admin_handlers import AdminHandlers
from coordinator.api.authentication import OPERATOR, VERIFIER, Authenticator, Caller
from coordinator.api.counters import CoordinatorCounters
from coordinator.api.handlers import Handlers
from coordinator.api.tenant_keys import TenantKeys
from coordinator.releases.handlers import ReleaseHandlers
from outrider.telemetry import logs, traces
from outrider.wire.admission import Metadata
from outrider.wire.status import abort
from outrider.wire.ticket import target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

COORDINATOR, REGISTRY, ADMIN = (
    pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Coordinator", "Registry", "Admin")
)

_Context = grpc.aio.ServicerContext[Any, Any]
_S = TypeVar("_S", bound="_Servicer")
_Q = TypeVar("_Q")
_A = TypeVar("_A")


_caller: ContextVar[Caller] = ContextVar("_caller")
"""Who calls, as `Admission` found before the request was read."""


def _rpc(method: Callable[[_S, _Q, Caller], Awaitable[_A]]) -> Callable[[_S, _Q, _Context], Awaitable[_A]]:
    """Wrap a method as gRPC calls it: count and trace the call, and map errors to a status."""

    @functools.wraps(method)
    async def wrapped(self: _S, request: _Q, context: _Context) -> _A:
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(session=getattr(request, "session_id", ""), request=logs.request_id_from(metadata))
        name, begun = method.__name__, time.perf_counter()
        try:
            with traces.span(f"outrider.coordinator.{name}", metadata):
                return await method(self, request, _caller.get())
        except Exception as error:
            self.handlers.counters.refuse(name, error)
            await abort(context, error)
        finally:
            self.handlers.counters.calls_s[name].add(time.perf_counter() - begun)

    return wrapped


class Admission:
    """Authenticates the caller of every method: devices of Coordinator, verifiers of Registry, operators of Admin."""

    def __init__(self, authenticator: Authenticator, counters: CoordinatorCounters) -> None:
        self._authenticator = authenticator
        self._counters = counters

    async def __call__(self, method: str, metadata: Metadata) -> str | None:
        """Note who calls, and return the tenant that has shown a key. Raises Unauthenticated, PermissionDenied or
        Unavailable."""
        _, service, name = method.split("/")
        metadata = tuple(metadata)
        try:
            _caller.set(caller := await self._caller_of(service, metadata))
            return caller.name if caller.api_key_id else None
        except Exception as error:
            logs.note(request=logs.request_id_from(metadata))
            self._counters.refuse(name, error)
            raise

    async def _caller_of(self, service: str, metadata: Metadata) -> Caller:
        if service == COORDINATOR:
            return await self._authenticator.tenant(metadata)
        if service == REGISTRY:
            self._authenticator.check_verifier(metadata)
            return Caller(VERIFIER)
        self._authenticator.check_operator(metadata)
        return Caller(OPERATOR)


@dataclass
class _Servicer:
    """The methods of subclasses take the request and the caller."""

    handlers: Handlers
    releases: ReleaseHandlers
    authenticator: Authenticator


class CoordinatorServicer(_Servicer, stubs.CoordinatorServicer):
    """The calls of devices; the caller is a tenant."""

    @_rpc
    async def OpenSession(self, request: pb.OpenSessionRequest, caller: Caller) -> pb.OpenSessionResponse:
        wanted, recording = codec.open_from_proto(request), self.authenticator.recording(caller.name)
        opened = await self.handlers.open(caller, wanted, recording)
        return codec.opened_to_proto(opened, await self.releases.serial())

    @_rpc
    async def ResumeSession(self, request: pb.ResumeSessionRequest, caller: Caller) -> pb.OpenSessionResponse:
        opened = await self.handlers.resume(caller, *codec.resume_from_proto(request))
        return codec.opened_to_proto(opened, await self.releases.serial())

    @_rpc
    async def CloseSession(self, request: pb.CloseSessionRequest, caller: Caller) -> pb.CloseSessionResponse:
        await self.handlers.close(caller.name, codec.session_id(request.session_id), codec.ticket_bytes(request.ticket))
        return pb.CloseSessionResponse()

    @_rpc
    async def ListTargets(self, request: pb.ListTargetsRequest, caller: Caller) -> pb.ListTargetsResponse:
        return pb.ListTargetsResponse(targets=map(target_to_proto, await self.handlers.targets()))

    @_rpc
    async def OfferRelease(self, request: pb.OfferReleaseRequest, caller: Caller) -> pb.OfferReleaseResponse:
        serial, release = await self.releases.offer(*codec.offer_from_proto(request))
        return codec.offer_to_proto(serial, release, self.releases.base_url)


class RegistryServicer(_Servicer, stubs.RegistryServicer):
    """The calls of verifiers, which have the join token."""

    @_rpc
    async def Register(self, request: pb.RegisterRequest, caller: Caller) -> pb.RegisterResponse:
        await self.handlers.register(codec.registration_from_proto(request))
        return pb.RegisterResponse(
            lease_ms=self.handlers.config.lease_ms,
            report_interval_ms=self.handlers.config.report_interval_ms,
            public_keys=self.handlers.keys.public_keys,
        )

    @_rpc
    async def Report(self, request: pb.ReportRequest, caller: Caller) -> pb.ReportResponse:
        verifier_id, instance = codec.identity_from_proto(request)
        verifier, sessions = codec.telemetry_from_proto(request)
        tokens, seen = codec.tokens_from_proto(request), request.revocations_seen
        sequence = request.tokens_sequence
        reply = await self.handlers.report(verifier_id, instance, verifier, sessions, tokens, seen, sequence=sequence)
        weights, devices = (reply[0].weights, reply[0].devices) if reply is not None else ("", {})
        serial = await self.releases.sample(weights, sessions if reply is not None else (), devices)
        return codec.report_to_proto(reply, self.handlers.keys.public_keys, serial)

    @_rpc
    async def Deregister(self, request: pb.DeregisterRequest, caller: Caller) -> pb.DeregisterResponse:
        await self.handlers.deregister(*codec.identity_from_proto(request))
        return pb.DeregisterResponse()


@dataclass
class AdminServicer(_Servicer, stubs.AdminServicer):
    """The calls of operators, who have the admin token."""

    admin: AdminHandlers
    tenants: TenantKeys

    @_rpc
    async def Status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusResponse:
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
    async def ListVerifiers(self, request: pb.ListVerifiersRequest, caller: Caller) -> pb.ListVerifiersResponse:
        found, following = await self.admin.verifiers(*admin_codec.verifiers_query(request))
        return pb.ListVerifiersResponse(verifiers=map(admin_codec.verifier_to_proto, found), next=following)

    @_rpc
    async def UpdateVerifier(self, request: pb.UpdateVerifierRequest, caller: Caller) -> pb.UpdateVerifierResponse:
        verifier = await self.admin.update_verifier(*admin_codec.verifier_action_from_proto(request))
        return pb.UpdateVerifierResponse(verifier=admin_codec.verifier_to_proto(verifier) if verifier else None)

    @_rpc
    async def ListSessions(self, request: pb.ListSessionsRequest, caller: Caller) -> pb.ListSessionsResponse:
        query = admin_codec.sessions_query(request)
        if request.session_id:
            found, following = [await self.admin.session(codec.session_id(request.session_id))], ""
        else:
            found, following = await self.admin.sessions(*query)
        return pb.ListSessionsResponse(sessions=map(admin_codec.session_to_proto, found), next=following)

    @_rpc
    async def KillSession(self, request: pb.KillSessionRequest, caller: Caller) -> pb.KillSessionResponse:
        return pb.KillSessionResponse(verifier_id=await self.admin.kill(codec.session_id(request.session_id)))

    @_rpc
    async def CreateTenant(self, request: pb.CreateTenantRequest, caller: Caller) -> pb.CreateTenantResponse:
        tenant, key = await self.tenants.create(request.name, admin_codec.limits_from_proto(request.limits))
        return pb.CreateTenantResponse(tenant=admin_codec.tenant_to_proto(tenant), key=key)

    @_rpc
    async def ListTenants(self, request: pb.ListTenantsRequest, caller: Caller) -> pb.ListTenantsResponse:
        after, limit = admin_codec.tenants_query(request)
        found, following = await self.tenants.listed(after, limit)
        anonymous = await self.authenticator.admits_anybody()
        return pb.ListTenantsResponse(
            tenants=map(admin_codec.tenant_to_proto, found), next=following, anonymous=anonymous
        )

    @_rpc
    async def SetTenantLimits(self, request: pb.SetTenantLimitsRequest, caller: Caller) -> pb.SetTenantLimitsResponse:
        limits = admin_codec.limits_from_proto(request.limits)
        tenant = await self.tenants.set_limits(request.name, limits, afresh=request.defaults)
        return pb.SetTenantLimitsResponse(tenant=admin_codec.tenant_to_proto(tenant))

    @_rpc
    async def RevokeTenant(self, request: pb.RevokeTenantRequest, caller: Caller) -> pb.RevokeTenantResponse:
        tenant = await self.tenants.revoke(request.name)
        return pb.RevokeTenantResponse(tenant=admin_codec.tenant_to_proto(tenant))

    @_rpc
    async def ListWindows(self, request: pb.ListWindowsRequest, caller: Caller) -> pb.ListWindowsResponse:
        session_id = codec.session_id(request.session_id) if request.session_id else ""
        return admin_codec.windows_to_proto(*await self.admin.windows(session_id))

    @_rpc
    async def SetWindowBounds(self, request: pb.SetWindowBoundsRequest, caller: Caller) -> pb.SetWindowBoundsResponse:
        await self.admin.set_bounds(*admin_codec.bounds_from_proto(request))
        return pb.SetWindowBoundsResponse()

    @_rpc
    async def PublishRelease(self, request: pb.PublishReleaseRequest, caller: Caller) -> pb.PublishReleaseResponse:
        state = await self.releases.publish(request.manifest)
        return pb.PublishReleaseResponse(state=admin_codec.state_to_proto(state))

    @_rpc
    async def ListReleases(self, request: pb.ListReleasesRequest, caller: Caller) -> pb.ListReleasesResponse:
        beginning = admin_codec.hash_beginning(request.release) if request.release else ""
        serial, found = await self.releases.releases(beginning)
        return pb.ListReleasesResponse(releases=map(admin_codec.release_to_proto, found), serial=serial)

    @_rpc
    async def UpdateRelease(self, request: pb.UpdateReleaseRequest, caller: Caller) -> pb.UpdateReleaseResponse:
        release = await self.releases.apply(*admin_codec.release_action_from_proto(request))
        return pb.UpdateReleaseResponse(release=admin_codec.release_to_proto(release))


def add_services(
    server: grpc.aio.Server,
    handlers: Handlers,
    releases: ReleaseHandlers,
    authenticator: Authenticator,
    admin: AdminHandlers,
    tenants: TenantKeys,
) -> None:
    """Add every service of a coordinator."""
    parts = handlers, releases, authenticator
    stubs.add_CoordinatorServicer_to_server(CoordinatorServicer(*parts), server)  # type: ignore[no-untyped-call]
    stubs.add_RegistryServicer_to_server(RegistryServicer(*parts), server)  # type: ignore[no-untyped-call]
    stubs.add_AdminServicer_to_server(AdminServicer(*parts, admin, tenants), server)  # type: ignore[no-untyped-call]
