"""The operator's line to a coordinator, and the options that every command with one has."""

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

from outrider.core.errors import BadRequest, OutriderError, Unauthenticated, Unavailable
from outrider.settings.layers import Layers
from outrider.settings.options import add_settings, flags_of
from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import ERROR_KEY, error_from_rpc
from outrider.wire.v1 import coordinator_pb2_grpc

DEFAULT_COORDINATOR = "127.0.0.1:7700"
TIMEOUT_S = 5.0

Ask = Callable[[str, Message], Awaitable[Any]]


class AdminSettings(BaseSettings):
    """An operator's: flags come before OUTRIDER_ADMIN_* in the environment; no file has them."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_ADMIN_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    coordinator: str = DEFAULT_COORDINATOR
    """HOST:PORT of the coordinator to ask; what it wants to be shown is in $OUTRIDER_ADMIN_TOKEN, which has no flag."""
    tls: bool = False
    """Speak TLS with the authorities that gRPC ships with."""
    ca: Path | None = None
    """PEM file of the authority to trust; with it TLS is spoken."""
    insecure: bool = False
    """Allow plain text beyond loopback."""
    token: SecretStr | None = None
    """What a coordinator with an admin token wants to be shown."""


def link_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, AdminSettings)


def link_of(options: argparse.Namespace) -> AdminSettings:
    """Raises BadRequest."""
    return Layers(AdminSettings, flags_of(AdminSettings, options)).load()


@contextlib.asynccontextmanager
async def line(options: argparse.Namespace, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Ask]:
    """(method of Admin, request) -> response. Raises core errors."""
    settings = link_of(options)
    tls = ClientTls(settings.ca) if settings.ca or settings.tls else None
    token = settings.token.get_secret_value() if settings.token else ""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(settings.coordinator, tls=tls, insecure=settings.insecure) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]

        async def ask(method: str, request: Message) -> Any:
            try:
                return await getattr(admin, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise _told(error, settings.coordinator, timeout_s) from error

        yield ask


def _told(error: grpc.aio.AioRpcError, coordinator: str, timeout_s: float) -> OutriderError:
    """The error with what an operator can do about it. What gRPC itself says comes without a coordinator's mark."""
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
