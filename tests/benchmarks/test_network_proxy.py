"""Test the proxy on real sockets: bytes are late, in order and complete, and slow, stopped or cut off on request."""

import asyncio
import contextlib
import time

import pytest
from tcp_server import serving

from benchmarks.support.network_link import MAX_CHUNK_BYTES, Link, LinkEvent, Stall
from benchmarks.support.network_proxy import DelayProxy
from outrider.core.errors import BadRequest

SOON_S = 0.15
"""Long enough on loopback for an unwanted event to happen."""


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@pytest.fixture
async def echo_address():
    async with serving(_echo) as address:
        yield address


@pytest.fixture
async def connect():
    """Connect to a proxy; the connection is closed at the end of the test."""
    writers = []

    async def opened(proxy):
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writers.append(writer)
        return reader, writer

    yield opened
    for writer in writers:
        writer.close()


async def echoed(connection, data: bytes) -> float:
    """Return the seconds until `data` has come back whole."""
    reader, writer = connection
    began = time.perf_counter()
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), 10) == data
    return time.perf_counter() - began


async def silent(reader: asyncio.StreamReader) -> bool:
    """Return whether nothing arrives, not even an end. Consumes the reader's next read."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), SOON_S)
        return False
    return True


async def test_a_round_trip_takes_at_least_the_stated_time(echo_address, connect):
    async with DelayProxy(echo_address, rtt_ms=60) as proxy:
        assert 0.060 <= await echoed(await connect(proxy), b"ping") < 0.5


async def test_bytes_arrive_complete_and_in_order_and_are_counted(echo_address, connect):
    data = bytes(i % 251 for i in range(1_000_000))
    async with DelayProxy(echo_address, link=Link(rtt_ms=10, jitter_ms=20, up_bps=200e6)) as proxy:
        await echoed(await connect(proxy), data)
        assert proxy.bytes_up == proxy.bytes_down == len(data)


async def test_delay_does_not_limit_throughput(echo_address, connect):
    async with DelayProxy(echo_address, rtt_ms=100) as proxy:
        reader, writer = await connect(proxy)
        began = time.perf_counter()
        for _ in range(50):
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.002)
        await reader.readexactly(50_000)
        assert time.perf_counter() - began < 1.0  # one after another would take 5 s


async def test_a_line_of_1_mbit_takes_50_kb_in_about_400_ms(echo_address, connect):
    async with DelayProxy(echo_address, link=Link(up_bps=1e6)) as proxy:
        assert 0.4 <= await echoed(await connect(proxy), bytes(50_000)) < 1.0


async def test_connections_share_the_line(echo_address, connect):
    async with DelayProxy(echo_address, link=Link(down_bps=1e6)) as proxy:
        both = [await connect(proxy), await connect(proxy)]
        seconds = await asyncio.gather(*(echoed(connection, bytes(20_000)) for connection in both))
        assert 0.32 <= max(seconds) < 0.9


async def test_cut_connections_end_and_new_ones_work(echo_address, connect):
    async with DelayProxy(echo_address) as proxy:
        reader, writer = await connect(proxy)
        await echoed((reader, writer), b"first")
        proxy.drop_connections()
        assert await reader.read() == b""
        await echoed(await connect(proxy), b"again")


async def test_a_reset_is_felt_as_one_on_both_sides_and_new_connections_work(connect):
    felt = asyncio.get_running_loop().create_future()

    async def target(reader, writer):
        with contextlib.closing(writer):
            try:
                while data := await reader.read(65536):
                    writer.write(data)
            except OSError as error:
                felt.set_result(error)

    async with serving(target) as address, DelayProxy(address) as proxy:
        reader, writer = await connect(proxy)
        await echoed((reader, writer), b"first")
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert isinstance(await asyncio.wait_for(felt, 5), ConnectionResetError)
        last = await connect(proxy)
        await echoed(last, b"again")
        last[1].close()


async def test_a_stall_delays_and_loses_nothing(echo_address, connect):
    async with DelayProxy(echo_address) as proxy:
        connection = await connect(proxy)
        await echoed(connection, b"first")
        proxy.stall(0.3)
        proxy.stall(0.1)  # the later end counts
        assert 0.25 <= await echoed(connection, bytes(i % 251 for i in range(100_000))) < 2.0
        assert await echoed(connection, b"last") < 0.2


async def test_what_a_stall_held_up_goes_on_at_the_pace_of_the_line(echo_address, connect):
    async with DelayProxy(echo_address, link=Link(up_bps=1e6)) as proxy:
        connection = await connect(proxy)
        echo = asyncio.create_task(echoed(connection, bytes(25_000)))  # 0.2 s of the line
        await asyncio.sleep(0.05)
        proxy.stall(0.3)
        assert 0.48 <= await echo < 1.5


async def test_a_blackhole_answers_nobody_and_goes_on_when_lifted(echo_address, connect):
    async with DelayProxy(echo_address) as proxy:
        old = await connect(proxy)
        await echoed(old, b"first")
        proxy.blackhole()
        proxy.stall(0.01)  # ends nothing
        new = await connect(proxy)
        for _, writer in (old, new):
            writer.write(b"hello")
        assert all(await asyncio.gather(silent(old[0]), silent(new[0])))
        proxy.lift()
        for reader, _ in (old, new):
            assert await asyncio.wait_for(reader.readexactly(5), 5) == b"hello"
        await echoed(old, b"again")


async def test_neither_beginning_nor_end_of_a_connection_passes_a_blackhole(connect):
    events: asyncio.Queue[str] = asyncio.Queue()

    async def target(reader, writer):
        with contextlib.closing(writer):
            events.put_nowait("begun")
            await reader.read()
            events.put_nowait("ended")

    async with serving(target) as address, DelayProxy(address) as proxy:
        _, old = await connect(proxy)
        assert await asyncio.wait_for(events.get(), 5) == "begun"
        proxy.blackhole()
        old.close()
        _, new = await connect(proxy)
        await asyncio.sleep(SOON_S)
        assert events.empty()
        proxy.lift()
        assert {await asyncio.wait_for(events.get(), 5) for _ in range(2)} == {"begun", "ended"}
        new.close()


@pytest.mark.parametrize("link", [None, Link(up_bps=100_000)], ids=["blackhole", "slow"])
async def test_a_sender_is_made_to_wait_and_the_proxy_hoards_nothing(echo_address, connect, link):
    async with DelayProxy(echo_address, link=link) as proxy:
        connection = await connect(proxy)
        await echoed(connection, b"first")
        if link is None:
            proxy.blackhole()
        sent, before = 0, proxy.bytes_up
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while sent < 1 << 26:
                    connection[1].write(bytes(1 << 16))
                    sent += 1 << 16
                    await connection[1].drain()
        assert sent < 1 << 24  # the sender's own socket takes some MiB
        assert proxy.bytes_up - before <= (MAX_CHUNK_BYTES if link is None else 2 * link.queue_bytes)
        connection[1].transport.abort()


async def test_a_script_changes_the_link_when_it_says(echo_address, connect):
    async with DelayProxy(echo_address, script=((0.0, Link(rtt_ms=5)), (0.4, Link(rtt_ms=150)))) as proxy:
        entered = time.perf_counter()
        connection = await connect(proxy)
        assert await echoed(connection, b"near") >= 0.005
        await asyncio.sleep(entered + 0.2 - time.perf_counter())
        assert proxy.rtt_ms == 5
        await asyncio.sleep(entered + 0.5 - time.perf_counter())
        assert proxy.rtt_ms == 150
        assert await echoed(connection, b"far") >= 0.150


async def test_a_script_plays_events_and_gives_way_to_the_next_one(echo_address, connect):
    async with DelayProxy(echo_address) as proxy:
        earlier = proxy.play(((30.0, LinkEvent.DROP),))
        playing = proxy.play(
            ((0.0, LinkEvent.BLACKHOLE), (0.2, LinkEvent.LIFT), (0.2, Stall(0.2)), (0.5, LinkEvent.RESET))
        )
        await asyncio.sleep(0.05)
        reader, writer = await connect(proxy)
        assert 0.3 <= await echoed((reader, writer), b"late") < 2.0
        await asyncio.wait_for(playing, 5)
        assert earlier.cancelled()
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_leaving_ends_a_script_a_blackhole_and_every_connection(echo_address, connect):
    async with DelayProxy(echo_address, script=((0.0, LinkEvent.BLACKHOLE), (60.0, LinkEvent.LIFT))) as proxy:
        reader, _ = await connect(proxy)
        await asyncio.sleep(0.02)
    assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_what_is_out_of_bounds_is_refused(echo_address):
    proxy = DelayProxy(echo_address)
    with pytest.raises(BadRequest, match="rtt_ms is -1"):
        proxy.rtt_ms = -1
    with pytest.raises(BadRequest, match="rtt_ms stands beside link"):
        DelayProxy(echo_address, 5.0, link=Link())
    with pytest.raises(BadRequest, match="at_s"):
        DelayProxy(echo_address, script=((-1.0, Link()),))
    async with proxy:
        with pytest.raises(BadRequest, match="seconds is 0"):
            proxy.stall(0.0)
