from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier
from reciter import recital
from saying import Says, saying

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.serve import serving
from edge_agent.session.channels import Channels

# The GGUF writer of the llama tests, for the tests of the draft on llama.cpp.
sys.path.insert(0, str(Path(__file__).parents[1] / "llama"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random draft of 400 kB; its vocabulary is `scripted.tokenizer_json`'s."""
    from tiny_gguf import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
async def verifier(tiny_gguf: Path) -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(recital(tiny_gguf)) as running:
        yield running


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    opened = Channels()
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts go on alone soon."""
    for name in ("OFFLINE_AFTER_S", "OFFLINE_IN_ANSWER_S"):
        monkeypatch.setattr(f"edge_agent.sdk.sessions.{name}", 0.2)


@pytest.fixture
def give_up_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets requests look for a verifier for so many seconds."""

    def set_budgets(seconds: float) -> None:
        monkeypatch.setattr("edge_agent.sdk.sessions.OPEN_BUDGET_S", seconds)
        monkeypatch.setattr("edge_agent.sdk.sessions.RESUME_BUDGET_S", seconds)

    return set_budgets


@pytest.fixture
def edge_settings(give_up_after: Callable[[float], None]) -> EdgeSettings:
    """Return the settings of `client`, which soon gives up; a module may have its own."""
    give_up_after(0.5)
    return EdgeSettings()


@pytest.fixture
async def client(verifier: FakeVerifier, tmp_path: Path, edge_settings: EdgeSettings) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=edge_settings) as made:
        yield made


@pytest.fixture
async def url(client: AsyncClient) -> AsyncIterator[str]:
    """Yield the URL of `outrider-edge serve` over it, with the target loaded."""
    async with serving(client, EdgeSettings(serve_listen="127.0.0.1:0")) as address:
        await client.prepare()
        yield address


@pytest.fixture
def says(tmp_path: Path, edge_settings: EdgeSettings) -> Says:
    """Return what serves a target that says a text, and then ends."""
    return saying(tmp_path, edge_settings)
