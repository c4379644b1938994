"""The delay proxy: late, in order, complete."""

import asyncio
import time

import pytest

from outrider.wire.proxy import DelayProxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
async def echo_address():
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_round_trip_takes_at_least_the_stated_time(echo_address):
    async with DelayProxy(echo_address, rtt_ms=60) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        began = time.perf_counter()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert 0.060 <= time.perf_counter() - began < 0.5
        writer.close()


async def test_bytes_arrive_complete_and_in_order_and_are_counted(echo_address):
    data = bytes(i % 251 for i in range(1_000_000))
    async with DelayProxy(echo_address, rtt_ms=10) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        assert proxy.bytes_up == proxy.bytes_down == len(data)
        writer.close()


async def test_delay_does_not_limit_throughput(echo_address):
    async with DelayProxy(echo_address, rtt_ms=100) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        began = time.perf_counter()
        for _ in range(50):
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.002)
        await reader.readexactly(50_000)
        assert time.perf_counter() - began < 1.0  # one after another would take 5 s
        writer.close()


async def test_cut_connections_end_and_new_ones_work(echo_address):
    async with DelayProxy(echo_address) as proxy:
        reader, _ = await asyncio.open_connection(*proxy.address.split(":"))
        await asyncio.sleep(0.05)
        proxy.drop_connections()
        assert await reader.read() == b""
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"
        writer.close()
