"""The operator's line to a coordinator, and the options that every command with one has."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from outrider.core.errors import BadRequest, OutriderError, Unauthenticated, Unavailable
from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import ERROR_KEY, error_from_rpc
from outrider.wire.v1 import coordinator_pb2_grpc

DEFAULT_COORDINATOR = "127.0.0.1:7700"
TIMEOUT_S = 5.0

Ask = Callable[[str, Message], Awaitable[Any]]


def link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator",
        default=DEFAULT_COORDINATOR,
        metavar="HOST:PORT",
        help=f"({DEFAULT_COORDINATOR}); its admin token is taken from $OUTRIDER_ADMIN_TOKEN",
    )
    parser.add_argument("--tls", action="store_true", help="speak TLS, trusting the public authorities")
    parser.add_argument("--ca", type=Path, metavar="PEM", help="speak TLS, trusting this authority")
    parser.add_argument("--insecure", action="store_true", help="plain text beyond loopback")


@contextlib.asynccontextmanager
async def line(options: argparse.Namespace, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Ask]:
    """(method of Admin, request) -> response. Raises core errors."""
    tls = ClientTls(options.ca) if options.ca or options.tls else None
    token = os.environ.get("OUTRIDER_ADMIN_TOKEN")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with channel(options.coordinator, tls=tls, insecure=options.insecure) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]

        async def ask(method: str, request: Message) -> Any:
            try:
                return await getattr(admin, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise _told(error, options.coordinator, timeout_s) from error

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
