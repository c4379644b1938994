"""Test that unauthenticated and bad devices get a clear refusal, over real sockets, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from system import Failed

from outrider.core.errors import BadRequest, Killed, OutriderError, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS, Attach
from outrider.wire import codecs
from outrider.wire.channels import channel
from outrider.wire.codecs import Open
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import ticket_metadata
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, session_pb2, session_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "def area(width, height):\n"


async def opened_session(system) -> Any:
    async with channel(system.cluster.address) as link:
        return await coordinator_pb2_grpc.CoordinatorStub(link).OpenSession(coordinator_pb2.OpenSessionRequest())


@dataclass
class RawOpen:
    """Hold the messages that open a hand-made stream."""

    grant: Any
    session_id: str
    prompt: tuple[int, ...] = (5, 6, 7)
    ticket: bytes | None = None
    epoch: int = 0
    max_tokens: int = 64

    async def refusal(self) -> OutriderError:
        """Return the error that ends the stream."""
        error = await self.end()
        assert error is not None, "the stream ended without an error"
        return error

    async def end(self, *appends: session_pb2.Append) -> OutriderError | None:
        """Return the error that ends the stream after these Appends; None if it runs to its end."""
        epoch = self.epoch or self.grant.epoch_first
        attach = Attach(epoch=epoch, prompt=self.prompt, max_tokens=self.max_tokens, ignore_eos=True)
        ticket = self.grant.ticket if self.ticket is None else self.ticket
        async with channel(self.grant.address) as link:
            call = session_pb2_grpc.VerifierStub(link).Session(metadata=ticket_metadata(ticket))
            opening = codecs.open_to_proto(Open(self.session_id, attach))
            try:  # a write may learn of the end before a read does
                await call.write(session_pb2.ClientMessage(open=opening))
                for append in appends:
                    await call.write(session_pb2.ClientMessage(append=append))
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
        return None


# --- tickets


@pytest.mark.parametrize("spoil", [lambda t: b"", lambda t: b"garbage", lambda t: t[:40] + bytes([t[40] ^ 1]) + t[41:]])
async def test_a_bad_ticket_is_refused(system, spoil):
    session = await opened_session(system)
    raw = RawOpen(session.primary, session.session_id, ticket=spoil(session.primary.ticket))
    assert isinstance(await raw.refusal(), Unauthenticated)


async def test_a_ticket_for_the_other_verifier_is_refused(settled):
    session = await opened_session(settled)
    error = await RawOpen(session.standby, session.session_id, ticket=session.primary.ticket).refusal()
    assert isinstance(error, PermissionDenied)
    assert session.primary.verifier_id in str(error)


async def test_a_ticket_opens_its_own_session_and_epochs_alone(system):
    session = await opened_session(system)
    assert isinstance(await RawOpen(session.primary, "another").refusal(), PermissionDenied)
    error = await RawOpen(session.primary, session.session_id, epoch=session.primary.epoch_last + 1).refusal()
    assert isinstance(error, PermissionDenied)
    assert "attach.epoch" in str(error)


async def test_no_ticket_of_a_killed_session_attaches_at_any_verifier(settled):
    session = await opened_session(settled)
    async with channel(settled.cluster.address) as link:
        order = coordinator_pb2.KillSessionRequest(session_id=session.session_id)
        await coordinator_pb2_grpc.AdminStub(link).KillSession(order)
    await asyncio.sleep(2.5)  # two reports
    for grant in (session.primary, session.standby):
        for epoch in (grant.epoch_first, grant.epoch_first + 1):
            assert isinstance(await RawOpen(grant, session.session_id, epoch=epoch).refusal(), Killed)


async def test_the_ticket_of_a_closed_session_serves_for_a_report_at_most(settled):
    session = await opened_session(settled)
    async with channel(settled.cluster.address) as link:
        order = coordinator_pb2.CloseSessionRequest(session_id=session.session_id, ticket=session.primary.ticket)
        await coordinator_pb2_grpc.CoordinatorStub(link).CloseSession(order)
    begun = time.monotonic()
    for epoch in (session.primary.epoch_first, session.primary.epoch_first + 1):
        raw = RawOpen(session.primary, session.session_id, epoch=epoch, max_tokens=2_000)
        error = await raw.refusal()
        assert isinstance(error, PermissionDenied)
        assert "open a new one" in str(error)
    assert time.monotonic() - begun < 8.0


# --- bounds


async def test_a_prompt_that_the_target_cannot_hold_is_refused_at_the_device(system, device):
    with pytest.raises(Failed, match=r"prompt plus max_tokens is 5000 \+ 8, must be at most \d+") as caught:
        await device.run(system.here, [5] * 5000, max_tokens=8)
    assert caught.value.kind == "BadRequest"


async def test_and_by_the_verifier_where_the_device_does_not_look(system):
    session = await opened_session(system)
    error = await RawOpen(session.primary, session.session_id, (5,) * 5000).refusal()
    assert type(error) is BadRequest
    assert "5000 + 64, must be at most" in str(error)


async def test_a_prompt_beyond_the_wires_bound_is_refused_before_the_engine_sees_it(system):
    session = await opened_session(system)
    error = await RawOpen(session.primary, session.session_id, (5,) * (MAX_PROMPT_TOKENS + 1)).refusal()
    assert type(error) is BadRequest
    assert f"length of attach.prompt is {MAX_PROMPT_TOKENS + 1}, must be between 1 and {MAX_PROMPT_TOKENS}" in str(
        error
    )


async def test_an_unknown_target_and_a_bad_option_are_refused_by_name(system, device):
    with pytest.raises(Failed, match="no-such-target") as caught:
        await device.run({**system.here, "target": "no-such-target"}, PROMPT, max_tokens=4)
    assert caught.value.kind == "NotFound"
    with pytest.raises(Failed, match="temperature is -1"):
        await device.run(system.here, PROMPT, temperature=-1)


# --- a hostile stream

REFUSED = {
    "a parent that no node can have": session_pb2.Append(first_id=1, up=[3], token=[5]),
    "an id outside the vocabulary": session_pb2.Append(first_id=1, up=[0], token=[2**31]),
    "a gap in the ids": session_pb2.Append(first_id=90, up=[0], token=[5]),
    "a base far beyond what was committed": session_pb2.Append(first_id=1, base=9_000, up=[0], token=[5]),
    "more parents than tokens": session_pb2.Append(first_id=1, up=[0, 0], token=[5]),
    "more nodes than a message may hold": session_pb2.Append(first_id=1, up=[0] * 1025, token=[5] * 1025),
}
REFUSED_OR_LATE = {
    "a repeated sibling": session_pb2.Append(first_id=1, up=[0, 0], token=[5, 5]),
    "too deep": session_pb2.Append(first_id=1, up=[0] + [1] * 59, token=[5] * 60),
    "too many nodes": session_pb2.Append(first_id=1, up=[0] * 200, token=range(200)),
}
"""Endings for nodes below a position that may have been committed meanwhile: then they are dead, and no offence."""


async def test_hostile_streams_end_alone_while_their_neighbour_stays_exact(settled, device):
    options = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    expected = await device.run(settled.here, PROMPT, **options)
    neighbour = await device.begin(settled.here, PROMPT, **options)
    await neighbour.until_tokens(10)
    for name, append in (REFUSED | REFUSED_OR_LATE).items():
        session = await opened_session(settled)
        for grant in (session.primary, session.standby):  # one of them is the neighbour's
            error = await RawOpen(grant, session.session_id).end(append)
            assert isinstance(error, BadRequest) or (error is None and name in REFUSED_OR_LATE), name
            assert error is None or "must be" in str(error), name
    assert (await neighbour.done())["tokens"] == expected["tokens"]
    await settled.settled()
