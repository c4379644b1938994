"""The link that the demonstration emulates: bytes come as they were sent, and a round trip takes as long as asked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from edge_agent.demo import delayed


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_round_trip_takes_as_long_as_asked(echo: str) -> None:
    async with delayed(echo, 80.0) as address:
        reader, writer = await connect(address)
        for _ in range(2):
            begun = time.monotonic()
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            assert time.monotonic() - begun >= 0.08
        writer.close()


async def test_all_bytes_come_in_order_and_then_the_end(echo: str) -> None:
    data = random.Random(3).randbytes(1_000_000)
    async with delayed(echo, 10.0) as address:
        reader, writer = await connect(address)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
        writer.close()


async def test_an_open_connection_does_not_keep_the_link_from_ending(echo: str) -> None:
    async with delayed(echo, 10.0) as address:
        reader, writer = await connect(address)
        writer.write(b"ping")
        await reader.readexactly(4)
    assert await asyncio.wait_for(reader.read(), 10.0) == b""
    writer.close()
