"""Call RPCs as the descriptors have them, with every kind of credential, and find the errors that they log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from outrider.wire.admission import Metadata
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import ticket_metadata

KEY, JOIN, ADMIN = "acme-key-0123456789", "join-token-0123456789", "admin-token-0123456789"
TICKET = b"the one ticket that is good here"

CREDENTIALS: Mapping[str, Metadata] = {
    "none": (),
    "a tenant's key": (("authorization", f"Bearer {KEY}"),),
    "the join token": (("authorization", f"Bearer {JOIN}"),),
    "the admin token": (("authorization", f"Bearer {ADMIN}"),),
    "a wrong secret": (("authorization", "Bearer wrong-secret-0123456789"),),
    "a secret in another scheme": (("authorization", f"Basic {KEY}"),),
    "an empty secret": (("authorization", "Bearer "),),
    "a secret too long": (("authorization", "Bearer " + "x" * 4_000),),
    "a ticket": tuple(ticket_metadata(TICKET)),
    "another ticket": tuple(ticket_metadata(b"forged")),
}


def rpcs_of(file: FileDescriptor) -> Iterator[MethodDescriptor]:
    """Yield every RPC of a file's services."""
    for service in file.services_by_name.values():
        yield from service.methods


async def answer(link: grpc.aio.Channel, rpc: MethodDescriptor, credential: str) -> Exception | None:
    """Call an RPC with an empty request; return the error that it ends with, None if it answers."""
    request = GetMessageClass(rpc.input_type)().SerializeToString()
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    options: dict[str, Any] = {"metadata": tuple(CREDENTIALS[credential]), "timeout": 10.0}
    try:
        if rpc.client_streaming:
            stream = link.stream_stream(path)(**options)
            await stream.write(request)
            await stream.read()
        elif rpc.server_streaming:
            await link.unary_stream(path)(request, **options).read()
        else:
            await link.unary_unary(path)(request, **options)
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors that the test has logged, without those of servers of earlier tests.

    grpc.aio has one queue of events for all event loops of a process. An event of a server that has stopped may come
    after its loop has been closed; the loop that takes it from the queue then logs it, that of the test now running.
    """
    records = (record for record in caplog.records if record.levelno >= logging.ERROR)
    return [record.getMessage() for record in records if not _of_a_closed_loop(record)]


def _of_a_closed_loop(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return str(error) == "Event loop is closed" and "PollerCompletionQueue._handle_events" in record.getMessage()
