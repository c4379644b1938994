"""Test docs/models.md: a folder that save_pretrained wrote, with a GGUF that the exporter made of another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from terminal import Network, Terminal

pytestmark = pytest.mark.e2e

FAMILIES = ("Qwen2", "Qwen3")
"""The families tested here; docs/models.md is run with Llama."""
TOKENS = 160
"""So many that the device drafts some of them on a busy machine, too: a step takes a millisecond or two."""
PROMPT = "def read_lines(path):"
_ASK = """
import json, sys
from edge_agent import Client

with Client(verifier=sys.argv[1]) as client:
    done = client.generate(sys.argv[2], max_tokens=int(sys.argv[3]), ignore_eos=True)
print(json.dumps({"tokens": done.token_ids, "drafted": done.statistics.drafted, "draft": done.statistics.draft}))
"""


def make(folder: Path, family: str, width: int) -> Any:
    """Save a model of random weights with the tokenizer of the repository's target, as any user would."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "models" / "target")
    torch.manual_seed(width)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.fixture
def terminal(able: None, network: Network, folder: Path) -> Iterator[Terminal]:
    with Terminal(network, folder) as opened:
        yield opened


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_and_an_exported_draft_work_together(family: str, terminal: Terminal) -> None:
    from cloud_verifier.distill.gguf.export import export

    folder = terminal.folder
    target = make(folder / "my-target", family, 128)
    make(folder / "my-draft", family, 64)
    made = export(folder / "my-draft", folder / "my-target", folder / "my-draft.gguf")
    assert made.probes > 1_000

    assert terminal.type("outrider-verifier --model my-target --draft my-draft.gguf --listen 127.0.0.1:7711") is None
    terminal.environment["ASK"] = _ASK
    result = terminal.type(f'python -c "$ASK" 127.0.0.1:7711 "{PROMPT}" {TOKENS}')
    assert result is not None
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert answer["draft"] == "my-draft.gguf"
    assert answer["drafted"] > 0
    assert answer["tokens"] == alone(target, folder / "my-target")


def alone(target: Any, folder: Path) -> list[int]:
    """Return the greedy output of transformers itself."""
    import torch
    from transformers import AutoTokenizer

    target.generation_config.eos_token_id = None
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        out = target.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens
