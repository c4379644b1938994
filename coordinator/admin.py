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

from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2_grpc

DEFAULT_COORDINATOR = "127.0.0.1:7700"
TIMEOUT_S = 5.0

Ask = Callable[[str, Message], Awaitable[Any]]


def link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", default=DEFAULT_COORDINATOR)
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
                raise error_from_rpc(error) from error

        yield ask
