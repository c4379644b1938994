"""Test the socket pair between front and engine: required messages pass, optional ones never block."""

from __future__ import annotations

import asyncio
import socket
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

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
    async with asyncio.timeout(10):
        async for event in ipc.read_events(reader):
            got.append(event)
            if event == last:
                break
    writer.close()
    return got


async def test_offers_stop_where_nobody_reads_and_leave_room_for_commits():
    ours, theirs = socket.socketpair()
    end = EngineEnd(theirs)
    began = time.monotonic()
    taken = [number for number in range(1, 1_001) if end.offer(recorded(number))]
    assert 0 < len(taken) < 200
    end.send([commit(number) for number in range(100)])  # more than a second's; it would hang were there no room
    assert not end.offer(recorded(0))
    assert time.monotonic() - began < 5.0
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


@given(st.lists(st.integers(0, 300), max_size=8), st.data())
async def test_events_are_read_whole_however_their_bytes_come(sizes: list[int], data: st.DataObject):
    events = [recorded(number, size) for number, size in enumerate(sizes, 1)]
    stream = b"".join(map(ipc.frame, events))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = asyncio.StreamReader()
    reading = asyncio.create_task(_all(reader))
    for begin, end in pairwise([0, *cuts, len(stream)]):
        reader.feed_data(stream[begin:end])
        await asyncio.sleep(0)
    reader.feed_eof()
    assert await reading == events


async def _all(reader: asyncio.StreamReader) -> list[pb.EngineEvent]:
    return [event async for event in ipc.read_events(reader)]
