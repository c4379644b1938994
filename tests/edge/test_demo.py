"""Test that the demonstration marks the draft's tokens, and that its link delays bytes as requested, in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tcp_server import serving

from edge_agent.demo import delayed


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
    async with delayed(echo, 10.0) as address:
        reader, writer = await connect(address)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
        writer.close()
