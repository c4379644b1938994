"""Test devices without a draft model: n-grams draft, and statistics and metrics say so by name."""

from __future__ import annotations

import tomllib

import pytest
from fake_verifier import FakeVerifier

from edge_agent import AsyncClient
from edge_agent.target import bundle
from tools.install import NEEDS_LLAMA, ROOT


async def test_without_llama_cpp_n_grams_draft_and_no_draft_is_fetched(
    client: AsyncClient, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("llama-cpp-python cannot be imported")

    monkeypatch.setattr(bundle, "library", missing)
    completion = await client.generate("x", max_tokens=200)
    assert completion.statistics.draft == "ngram" and completion.statistics.accepted > 0
    assert b'outrider_edge_drafted_requests_total{source="ngram"} 1.0' in client.metrics.render()
    assert len({digest for digest, _ in verifier.fetches}) == 2  # the tokenizer and the template
    assert completion.statistics.draft_failure == "llama-cpp-python cannot be imported"
    assert [one.levelname for one in caplog.records if "llama-cpp-python" in one.getMessage()] == ["WARNING"]


async def test_that_a_verifier_offers_no_draft_is_logged_and_is_no_failure(
    client: AsyncClient, verifier: FakeVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    del verifier.script.artifacts["draft"]
    completion = await client.generate("x", max_tokens=5)
    assert completion.statistics.draft == "ngram"
    assert completion.statistics.draft_failure == ""
    assert b"outrider_edge_draft_failures_total 0.0" in client.metrics.render()
    assert "the verifier offers no draft model; n-grams of the text draft" in caplog.text


def test_the_extra_for_devices_without_a_model_is_that_of_devices_less_llama_cpp() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    edge, lite = extras["edge"], extras["edge-lite"]
    assert edge == ["outrider[edge-lite]", next(one for one in edge if one.startswith("llama-cpp-python"))]
    assert not any("llama-cpp-python" in one for one in lite) and any("tokenizers" in one for one in lite)
    assert "edge" in NEEDS_LLAMA and "edge-lite" not in NEEDS_LLAMA
