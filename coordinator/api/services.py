"""Hold what all services of a coordinator share: stores and keys, callers, counts and traces, checks of ids."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from coordinator.api.authentication import Authenticator, Caller
from coordinator.api.metrics import CoordinatorCounters
from coordinator.api.tenant_keys import TenantKeys
from coordinator.api.ticket_key import TicketKeys
from coordinator.config import CoordinatorConfig
from coordinator.releases.handlers import ReleaseHandlers
from coordinator.store.redis_store import RedisStore
from coordinator.store.sessions import SessionStore
from coordinator.store.verifiers import VerifierStore
from outrider.core.protocol.messages import MAX_SESSION_ID, MAX_VERIFIER_ID
from outrider.telemetry import logs, traces
from outrider.wire.admission import Admit, Metadata
from outrider.wire.bounds import identifier
from outrider.wire.status import abort
from outrider.wire.v1 import coordinator_pb2 as pb

COORDINATOR, REGISTRY = (pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Coordinator", "Registry"))

_Context = grpc.aio.ServicerContext[Any, Any]
_Q = TypeVar("_Q")
_A = TypeVar("_A")


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The tenant that calls a method of Coordinator, as `admission` found before the request was read."""


@dataclass
class Servicer:
    """Has what the calls of all services use. It holds no state that another coordinator would miss."""

    store: RedisStore
    verifiers: VerifierStore
    keys: TicketKeys
    config: CoordinatorConfig
    counters: CoordinatorCounters
    authenticator: Authenticator
    tenants: TenantKeys
    releases: ReleaseHandlers

    def __post_init__(self) -> None:
        self.sessions = SessionStore(self.store)


def rpc(method: Callable[[Any, _Q], Awaitable[_A]]) -> Callable[[Any, _Q, _Context], Awaitable[_A]]:
    """Wrap a method as gRPC calls it: count the call in the servicer's `counters`, trace it, map errors to a status."""

    @functools.wraps(method)
    async def wrapped(self: Any, request: _Q, context: _Context) -> _A:
        metadata = tuple(context.invocation_metadata() or ())
        logs.note(session=getattr(request, "session_id", ""), request=logs.request_id_from(metadata))
        name, begun = method.__name__, time.perf_counter()
        try:
            with traces.span(f"outrider.coordinator.{name}", metadata):
                return await method(self, request)
        except Exception as error:
            self.counters.count_refusal(name, error)
            await abort(context, error)
        finally:
            self.counters.calls_s[name].add(time.perf_counter() - begun)

    return wrapped


def admission(authenticator: Authenticator, counters: CoordinatorCounters) -> Admit:
    """Return what authenticates the caller of a call: a device of Coordinator's, a verifier of Registry's, an operator
    of Admin's. Its tenant is one that has shown a key."""

    async def admit(method: str, metadata: Metadata) -> str | None:
        _, service, name = method.split("/")
        metadata = tuple(metadata)
        try:
            if service == REGISTRY:
                authenticator.check_verifier(metadata)
            elif service != COORDINATOR:
                authenticator.check_operator(metadata)
            else:
                CALLER.set(caller := await authenticator.tenant(metadata))
                return caller.name if caller.api_key_id else None
        except Exception as error:
            logs.note(request=logs.request_id_from(metadata))
            counters.count_refusal(name, error)
            raise
        return None

    return admit


def session_id(value: str, field: str = "session_id") -> str:
    """Return a session id that may become part of a key. Raises BadRequest."""
    return identifier(field, value, MAX_SESSION_ID)


def verifier_id(value: str, field: str = "verifier_id") -> str:
    """Return a verifier id that may become part of a key. Raises BadRequest."""
    return identifier(field, value, MAX_VERIFIER_ID)
