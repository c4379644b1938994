"""Test that an emulated distance delays bytes as requested, in order."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from tcp_server import serving

from edge_agent.bench.delay import DelayedAddresses


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async with serving(answer) as address:
        yield address


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_all_bytes_come_in_order_and_then_the_end(echo: str) -> None:
    data = random.Random(3).randbytes(1_000_000)
    async with DelayedAddresses(10.0) as ways:
        reader, writer = await connect(ways[echo])
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60.0) == b""
        writer.close()


async def test_each_address_has_a_way_of_its_own_from_when_it_is_looked_up_first(echo: str) -> None:
    async with DelayedAddresses(20.0) as ways:
        assert ways[echo] == ways.get(echo, echo) != echo
        reader, writer = await connect(ways[echo])
        begun = time.monotonic()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x" and time.monotonic() - begun >= 0.02
        writer.close()
    async with DelayedAddresses(0.0) as ways:
        assert ways[echo] == echo
