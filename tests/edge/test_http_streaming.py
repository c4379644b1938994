"""Test that a stream of events ends with its reader, whatever the server tells of the protocol's version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from edge_agent.http.streaming import streamed


def failed(error: Exception) -> bytes:
    return f"data: {error}\n\n".encode()


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.4"])
async def test_a_client_that_goes_ends_its_stream_while_it_waits_for_a_token(version: str) -> None:
    sent, waits, closed = list[bytes](), asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            waits.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def receive() -> dict[str, Any]:
        await waits.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    response = await streamed(events(), (), failed)
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": version}}
    await asyncio.wait_for(response(scope, receive, send), 60.0)
    assert closed.is_set() and sent == [b"", b"data: 1\n\n"]


async def test_what_fails_within_a_stream_is_its_last_event() -> None:
    sent = list[bytes]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise RuntimeError("a defect")

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    response = await streamed(events(), (), failed)
    await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert sent == [b"", b"data: 1\n\n", b"data: a defect\n\n", b""]
