"""Connect a command to the coordinator that its flags or the environment name."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from coordinator import DEFAULT_COORDINATOR
from outrider.core.errors import BadRequest, OutriderError, Unauthenticated, Unavailable
from outrider.settings.layers import Layers
from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import ERROR_KEY, error_from_rpc
from outrider.wire.v1 import coordinator_pb2_grpc

AdminCall = Callable[[str, Message], Awaitable[Any]]
"""(method of the service Admin, request) -> response. Raises core errors."""


class AdminSettings(BaseSettings):
    """Hold the settings with which a coordinator is reached: flags, then OUTRIDER_ADMIN_* in the environment."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADMIN_", frozen=True, extra="forbid")

    coordinator: str = DEFAULT_COORDINATOR
    tls: bool = False
    ca: Path | None = None
    insecure: bool = False
    token: SecretStr | None = None


def settings_of(options: argparse.Namespace) -> AdminSettings:
    """Return the settings of a command line. Raises BadRequest for values that cannot be."""
    flags = {name: getattr(options, name, None) for name in AdminSettings.model_fields}
    return Layers(AdminSettings, {name: value for name, value in flags.items() if value is not None}).load()


@contextlib.asynccontextmanager
async def connected(options: argparse.Namespace, timeout_s: float) -> AsyncIterator[AdminCall]:
    """Yield what calls the coordinator's service Admin. timeout_s: for each call. Raises BadRequest for settings."""
    settings = settings_of(options)
    tls = ClientTls(settings.ca) if settings.ca or settings.tls else None
    token = settings.token.get_secret_value() if settings.token else ""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(settings.coordinator, tls=tls, insecure=settings.insecure) as opened:
        admin = coordinator_pb2_grpc.AdminStub(opened)  # type: ignore[no-untyped-call]

        async def call(method: str, request: Message) -> Any:
            try:
                return await getattr(admin, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise _explained(error, settings.coordinator, timeout_s) from error

        yield call


def _explained(error: grpc.aio.AioRpcError, coordinator: str, timeout_s: float) -> OutriderError:
    """Return the error with what an operator can do about it. gRPC's own errors lack a coordinator's mark."""
    known = error_from_rpc(error)
    marked = any(name == ERROR_KEY for name, _ in error.trailing_metadata() or ())
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED if not marked:
            return Unavailable(
                f"the coordinator at {coordinator} did not answer within {timeout_s:g} s; it may be overloaded: try"
                " again, or it may want --tls or --ca"
            )
        case grpc.StatusCode.UNAVAILABLE if not marked:
            return Unavailable(
                f"the coordinator at {coordinator} cannot be reached ({known}); is it running, is --coordinator right,"
                " does it want --tls or --ca?"
            )
        case grpc.StatusCode.UNIMPLEMENTED if not marked:
            return BadRequest(f"the coordinator at {coordinator} is older than this command and does not know this")
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(f"{known}; set it as OUTRIDER_ADMIN_TOKEN here")
    return known
