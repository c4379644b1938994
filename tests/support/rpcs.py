"""Call RPCs as the descriptors have them, with every kind of credential."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
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
