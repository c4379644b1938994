"""Test web servers that run inside of other processes."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

import httpx
import pytest

from outrider.core.errors import BadRequest, Unavailable
from outrider.wire import web

DELAYED_ACK_S = 0.04
"""Time for which Linux delays the acknowledgement of a lone packet."""


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Send an answer in three packets."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="IPv6 is off here"))]
)
async def test_no_packet_of_an_answer_waits_for_the_one_before_to_be_acknowledged(host: str) -> None:
    spent: list[float] = []
    async with web.serving(web.config(app), f"{host}:0", "a test") as port, httpx.AsyncClient() as client:
        for _ in range(30):
            begun = time.perf_counter()
            assert (await client.get(web.url(f"{host}:0", port))).text == "ab"
            spent.append(time.perf_counter() - begun)
    assert statistics.median(spent) < 0.75 * DELAYED_ACK_S


async def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"a test: cannot listen on {address}: .*is the port taken"):
            async with web.serving(web.config(app), address, "a test"):
                pass


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(BadRequest):
        async with web.serving(web.config(app), "nowhere", "a test"):
            pass
