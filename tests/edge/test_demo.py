"""Test that the demonstration marks the draft's tokens, and that its link delays bytes as requested, in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tcp_server import serving

from edge_agent import AsyncClient
from edge_agent.demo import delayed, show


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


async def test_the_text_is_shown_with_the_drafts_tokens_marked(
    client: AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    completion = await show(client, ("a name", "x", {"max_tokens": 150}), ("\x01", "\x02"))
    head, _, shown = capsys.readouterr().out.partition("x")
    assert head == "\n--- a name\n"
    assert shown.replace("\x01", "").replace("\x02", "") == f"{completion.text}\n"
    table = (await client.prepare()).tokenizer.table
    marked = "".join(part.partition("\x02")[0] for part in shown.split("\x01")[1:])
    own = b"".join(table[t] for t, own in zip(completion.token_ids, completion.drafted, strict=True) if own)
    assert completion.statistics.accepted > 0 and marked.isascii() == own.isascii()
    assert [c for c in marked if c.isascii()] == [c for c in own.decode(errors="ignore") if c.isascii()]
