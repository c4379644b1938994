"""Test that the HTTP server answers for metrics and health."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from outrider.core.errors import BadRequest, Unavailable
from outrider.core.histogram import Histogram
from outrider.telemetry.metrics_server import serving
from outrider.telemetry.prometheus import counter, gauge, histogram, registry


class Some(Collector):
    def __init__(self) -> None:
        self.steps = 0
        self.waits = Histogram((1.0, 2.0))
        self.refreshed = 0

    async def refresh(self) -> None:
        self.refreshed += 1

    def collect(self) -> Iterator[Metric]:
        yield counter("some_steps", "Steps", self.steps)
        yield counter("some_ends", "Ends", {("a", "b"): 2}, "how", "why")
        yield gauge("some_unknown", "Not known", None)
        yield histogram("some_wait_seconds", "Waits", self.waits)


async def get(url: str) -> tuple[int, str, str]:
    """Return status, content type and body of the answer."""

    def ask() -> tuple[int, str, str]:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.headers["content-type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, "", error.read().decode()

    return await asyncio.to_thread(ask)


async def test_a_scrape_reads_what_is_counted_now() -> None:
    some = Some()
    async with serving("0", registry(some), lambda: "", some.refresh) as url:
        some.steps = 7
        some.waits.add(1.5, times=3)
        status, kind, body = await get(url)
    assert (status, some.refreshed) == (200, 1)
    assert kind.startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sample.labels.items()): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert samples["some_steps_total",] == 7
    assert samples["some_ends_total", ("how", "a"), ("why", "b")] == 2
    assert samples["some_wait_seconds_bucket", ("le", "1.0")] == 0
    assert samples["some_wait_seconds_bucket", ("le", "2.0")] == 3
    assert samples["some_wait_seconds_bucket", ("le", "+Inf")] == 3
    assert samples["some_wait_seconds_count",] == 3
    assert samples["some_wait_seconds_sum",] == pytest.approx(4.5)
    assert "# TYPE some_unknown gauge" in body
    assert ("process_cpu_seconds_total",) in samples
    assert ("outrider_build_info", ("version", "0.1.0")) in samples


async def test_health_says_why_no_work_should_come() -> None:
    ailing = ""
    async with serving("127.0.0.1:0", registry(Some()), lambda: ailing) as url:
        health = url.replace("/metrics", "/healthz")
        assert (await get(health))[::2] == (200, "ok\n")
        ailing = "draining"
        assert (await get(health))[::2] == (503, "draining\n")
        assert (await get(url.replace("/metrics", "/other")))[0] == 404


async def test_a_taken_address_and_one_that_is_none_are_refused_with_a_reason() -> None:
    async with serving("0", registry(Some()), lambda: "") as url:
        port = url.split(":")[2].split("/")[0]
        with pytest.raises(Unavailable, match=f"metrics: cannot listen on 127.0.0.1:{port}: "):
            await serving(port, registry(Some()), lambda: "").__aenter__()
    with pytest.raises(BadRequest, match="must be HOST:PORT"):
        await serving("nowhere", registry(Some()), lambda: "").__aenter__()
