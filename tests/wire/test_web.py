"""Test web servers that run inside of other processes."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

import httpx
import pytest

from outrider.core.errors import Unavailable
from outrider.wire import web

DELAYED_ACK_S = 0.04
"""Time for which Linux delays the acknowledgement of a lone packet."""


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Send an answer in three packets."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


async def test_no_packet_of_an_answer_waits_for_the_one_before_to_be_acknowledged() -> None:
    spent: list[float] = []
    async with web.serving(web.config(app), "127.0.0.1:0", "a test") as port, httpx.AsyncClient() as client:
        for _ in range(10):
            begun = time.perf_counter()
            assert (await client.get(web.url("127.0.0.1:0", port))).text == "ab"
            spent.append(time.perf_counter() - begun)
    assert statistics.median(spent) < 0.75 * DELAYED_ACK_S


async def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"a test: cannot listen on {address}: .*is the port taken"):
            async with web.serving(web.config(app), address, "a test"):
                pass
