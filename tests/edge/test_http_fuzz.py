"""Run schemathesis on the HTTP server: no request causes a server error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from reciter import Threaded, in_thread, recital
from schemathesis import GenerationMode

from edge_agent import Client, EdgeSettings
from edge_agent.http.serve import serving

EXAMPLES = 10
SHORT = 4
"""So few tokens that a request ends soon: the handling before them is under test."""


@pytest.fixture(scope="module")
def verifier(tiny_gguf: Path) -> Iterator[Threaded]:
    with in_thread(recital(tiny_gguf)) as running:
        yield running


@pytest.fixture(scope="module")
def url(verifier: Threaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Client(verifier=verifier.address, cache_dir=tmp_path_factory.mktemp("cache")) as client:
        client.prepare()
        server = serving(client._client, EdgeSettings(serve_listen="127.0.0.1:0"))
        yield client._loop.run(server.__aenter__())
        client._loop.run(server.__aexit__(None, None, None))


def shortened(body: Any) -> Any:
    """Return the body with few tokens, if it asks for many, and for the target that there is."""
    if not isinstance(body, dict):
        return body
    body.pop("model", None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if value is None or (isinstance(value, int) and value > SHORT):
            body[name] = SHORT
    return body


def statuses_of(operation: Any, mode: GenerationMode) -> set[int]:
    """Return the status codes of the answers to many requests."""
    found: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def send(case: Any) -> None:
        case.body = shortened(case.body)
        answer = case.call(timeout=120)
        found.add(answer.status_code)
        assert answer.status_code < 500, (answer.status_code, answer.content)

    send()
    return found


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_that_is_sent_is_the_servers_fault(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    statuses = {one.label: statuses_of(one, mode) for one in operations if mode is GenerationMode.POSITIVE or one.body}
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses["POST /v1/completions"] and 200 in statuses["POST /v1/responses"]
        assert 200 in statuses["GET /v1/models"]
    else:
        assert statuses["POST /v1/completions"] >= {400} and statuses["POST /v1/responses"] >= {400}
