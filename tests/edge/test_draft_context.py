"""Test how long the context of a draft is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.drafting import loading
from edge_agent.drafting.loading import DraftOptions, LoadedModel, load
from outrider.core.errors import ModelRefused
from outrider.llama import LlamaModel

TOKEN_BYTES = 1000


class Trained:
    """Stands for a model that was trained for 32,768 positions."""

    n_ctx_train = 32_768

    def token_bytes(self) -> int:
        return TOKEN_BYTES


def length_of(monkeypatch: pytest.MonkeyPatch, options: DraftOptions, free: int = 1 << 40) -> int:
    monkeypatch.setattr(loading, "free_memory", lambda: free)
    loaded = LoadedModel("d", Trained(), 0, "")  # type: ignore[arg-type]
    return loading._context_length(loaded, options, contexts=options.workers)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (DraftOptions(positions=20_000), 20_000),
        (DraftOptions(positions=131_072), 32_768),
        (DraftOptions(positions=2_048), 2_048),
        (DraftOptions(), 4_096),
    ],
)
def test_it_holds_the_targets_positions_as_far_as_it_was_trained_for_them(
    monkeypatch: pytest.MonkeyPatch, options: DraftOptions, length: int
) -> None:
    assert length_of(monkeypatch, options) == length


def test_all_workers_together_take_a_quarter_of_the_free_memory_but_never_fewer_tokens_than_4096(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = DraftOptions(workers=2, positions=20_000)
    assert length_of(monkeypatch, options, free=4 * 2 * 10_000 * TOKEN_BYTES) == 10_000
    assert length_of(monkeypatch, options, free=0) == 4_096


async def test_a_file_from_the_network_that_would_abort_llama_cpp_is_refused(tmp_path: Path) -> None:
    from tiny_gguf import write_tiny_llama

    file = write_tiny_llama(tmp_path / "aborting.gguf", rope=15)
    with pytest.raises(ModelRefused, match="no token can be decoded with it"):
        await load(file, "a release", "a" * 64, target_table=[], options=DraftOptions())


def test_the_bytes_of_a_token_are_those_of_its_keys_values_and_scores(tiny_gguf: Path) -> None:
    with LlamaModel.load(tiny_gguf) as model:
        scores = model.token_bytes(2) - model.token_bytes(1)
        assert model.token_bytes(0) > 0 and scores > 0 and scores % 4 == 0
    assert loading.free_memory() > 1 << 20
