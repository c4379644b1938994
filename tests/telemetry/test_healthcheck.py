"""Test the health check of a container, against the metrics server of a process."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from outrider.telemetry.healthcheck import main, unhealthy
from outrider.telemetry.metrics_server import serving


async def test_a_process_is_healthy_while_it_may_be_sent_work_and_says_why_it_may_not() -> None:
    why = ""
    async with serving("0", CollectorRegistry(), lambda: why) as url:
        port = int(url.split(":")[2].split("/")[0])
        assert await asyncio.to_thread(unhealthy, port) == ""
        why = "draining"
        assert await asyncio.to_thread(unhealthy, port) == "503: draining"
        assert (await asyncio.to_thread(unhealthy, port, "/other")).startswith("404")


def test_nobody_who_answers_is_no_health(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main([str(port)]) == 1
    assert capsys.readouterr().out.startswith(f"no answer at 127.0.0.1:{port}: ")
