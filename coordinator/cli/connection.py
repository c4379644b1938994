"""Connect a command to the coordinator that its flags or the environment name."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.core.addresses import DEFAULT_COORDINATOR
from outrider.core.errors import OutriderError, Unauthenticated, Unavailable
from outrider.settings import Address, Layers, Token
from outrider.wire import local_tokens
from outrider.wire.channels import ClientTls, channel, proxy_of
from outrider.wire.status import ERROR_KEY, error_from_rpc
from outrider.wire.v1 import coordinator_pb2_grpc

AdminCall = Callable[[str, Message], Awaitable[Any]]
"""(method of the gRPC service Admin, request) -> response. Raises core errors."""


class AdminSettings(BaseSettings):
    """Settings that say how to reach a coordinator: flags take precedence over OUTRIDER_ADMIN_* in the environment."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ADMIN_", frozen=True, extra="forbid")

    coordinator: Address = DEFAULT_COORDINATOR
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None
    insecure: bool = False
    token: Token | None = None


def admin_settings(options: argparse.Namespace) -> AdminSettings:
    """Return the settings that a command line and the environment give. Raises BadRequest for invalid values."""
    flags = {name: getattr(options, name, None) for name in AdminSettings.model_fields}
    return Layers(AdminSettings, {name: value for name, value in flags.items() if value is not None}).load()


@contextlib.asynccontextmanager
async def connect(options: argparse.Namespace, timeout_s: float) -> AsyncIterator[AdminCall]:
    """Yield a function that calls the service Admin. timeout_s: per call. Raises BadRequest for invalid settings."""
    settings = admin_settings(options)
    trust = ClientTls(settings.ca, settings.cert, settings.cert_key)
    tls = trust if settings.ca or settings.cert or settings.tls else None
    given = settings.token.get_secret_value() if settings.token else ""
    state_dir = Path(options.state_dir) if options.state_dir else None
    token = given or local_tokens.find(local_tokens.ADMIN, settings.coordinator, state_dir)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(settings.coordinator, tls=tls, insecure=settings.insecure) as connection:
        admin = coordinator_pb2_grpc.AdminStub(connection)  # type: ignore[no-untyped-call]

        async def call(method: str, request: Message) -> Any:
            try:
                return await getattr(admin, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise _with_advice(error, settings.coordinator, timeout_s) from error

        yield call


def _with_advice(error: grpc.aio.AioRpcError, coordinator: str, timeout_s: float) -> OutriderError:
    """Return a core error that tells the operator what to do. Only errors that a coordinator raised carry ERROR_KEY."""
    known = error_from_rpc(
        error,
        f"the coordinator at {coordinator} (--coordinator)",
        proxy_of(coordinator) or "is it running, is --coordinator right, does it want --tls, --ca or --cert?",
    )
    by_coordinator = any(name == ERROR_KEY for name, _ in error.trailing_metadata() or ())
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED if not by_coordinator:
            return Unavailable(
                f"the coordinator at {coordinator} did not answer within {timeout_s:g} s; it may be overloaded: try"
                f" again, or {proxy_of(coordinator) or 'it may want --tls or --ca'}"
            )
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(
                f"{known}; set it as OUTRIDER_ADMIN_TOKEN here, or name the folder of `outrider up` with --state-dir"
            )
    return known
