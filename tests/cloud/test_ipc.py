"""Test the socket pair between front and engine: required messages pass, optional ones never block."""

from __future__ import annotations

import asyncio
import socket

from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.ipc import EngineEnd
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2


def recorded(number: int, size: int = 3_000) -> pb.EngineEvent:
    return pb.EngineEvent(session_id="s", epoch=number, recorded=pb.RecordedTokens(top_ids=bytes(size)))


def commit(number: int) -> pb.EngineEvent:
    return pb.EngineEvent(session_id="s", epoch=number, commit=session_pb2.Commit(start=number))


async def read_until(sock: socket.socket, last: pb.EngineEvent) -> list[pb.EngineEvent]:
    """Read all events up to and including `last`."""
    reader, writer = await asyncio.open_connection(sock=sock)
    got = []
    async with asyncio.timeout(60):
        async for event in ipc.read_events(reader):
            got.append(event)
            if event == last:
                break
    writer.close()
    return got


async def test_offers_stop_where_nobody_reads_and_leave_room_for_commits():
    ours, theirs = socket.socketpair()
    end = EngineEnd(theirs)
    taken = [number for number in range(1, 1_001) if end.offer(recorded(number))]
    assert 0 < len(taken) < 200
    end.send([commit(number) for number in range(100)])  # more than a second's; it would hang were there no room
    assert not end.offer(recorded(0))
    got = await read_until(ours, commit(99))
    assert [event.epoch for event in got if event.HasField("recorded")] == taken
    assert sum(event.HasField("commit") for event in got) == 100
    theirs.close()


async def test_an_offer_that_fits_in_part_is_finished_before_anything_else():
    ours, theirs = socket.socketpair()
    end = EngineEnd(theirs)
    large = recorded(1, 4_000_000)
    assert end.offer(large)
    assert not end.offer(recorded(2))  # not in the midst of the other

    reading = asyncio.create_task(read_until(ours, commit(3)))
    await asyncio.to_thread(end.send, [commit(3)])
    assert await reading == [large, commit(3)]
    theirs.close()
