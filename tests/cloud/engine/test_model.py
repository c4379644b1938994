"""Test which models are served, and which are refused with what reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rig import Rig, client, nothing
from tiny_targets import make_tiny
from tokenizers import Tokenizer, models

from cloud_verifier.engine.torch_backend.batch import Segment
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan, SdpaBackend
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from cloud_verifier.engine.weights import end_token_ids, vocabulary_of
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams

Directory = Callable[[str], Path]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_trees_have_the_logits_of_plain_sequences_in_half_precision(kind: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(kind), dtype="bfloat16")
    assert model.deviation is None
    assert check_numerics(model) == model.deviation < 0.5


def test_the_same_weights_under_another_configuration_are_another_target(tmp_path: Path) -> None:
    make_tiny("llama").save_pretrained(tmp_path)
    hashes = [TargetModel.load(tmp_path).weights_hash]
    for name, key, value in (
        ("config.json", "rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("generation_config.json", "eos_token_id", 9),
    ):
        file = tmp_path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        hashes.append(TargetModel.load(tmp_path).weights_hash)
    (tmp_path / "generation_config.json").unlink()
    hashes.append(TargetModel.load(tmp_path).weights_hash)
    assert len(set(hashes)) == 4


ENDS = ("</s>", "<|im_end|>", "<|turn|>", "<|user|>")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("", (0, 5, 1)),
        ("{% for m in messages %}<|user|>{{ m.content | trim }} <|turn|>\n{% endfor %}", (0, 5, 1, 2)),
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", (0, 5, 1)),
        ("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", (0, 5, 1)),
        ("{{ raise_exception('no') }}", (0, 5, 1)),
        ("<|user|>{{ messages[0].content }}<|turn|>", (0, 5, 1)),
        ("{% for m in messages %}{{ m.content + '\\nUser: ' }}{% endfor %}", (0, 5, 1)),
    ],
)
def test_whatever_file_says_so_a_token_ends_an_answer(tmp_path: Path, template: str, ends: tuple[int, ...]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(list(ENDS))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert end_token_ids(tmp_path, [0, None, [5, 900]], 100) == ends


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=100.0, seed=3)], ids=str)
def test_an_id_that_stands_for_no_token_is_never_chosen(tmp_path: Path, sampling: SamplingParams) -> None:
    module = make_tiny("llama")
    with torch.no_grad():
        module.lm_head.weight[90:] *= 1e3  # rows beyond the tokens, one of which has the greatest logit
    module.save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([f"<{i}>" for i in range(90)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TargetModel.load(tmp_path)
    check_numerics(model)
    rig = Rig(model)
    rig.attach("s", client((1, 2, 3), nothing, max_tokens=40, sampling=sampling, ignore_eos=True))
    rig.run()
    assert len(rig.clients["s"].device.received) == 40 and max(rig.clients["s"].device.received) < 90
    assert rig.executor.capabilities.vocabulary == model.linear_logits([1]).shape[1] == 90
    assert vocabulary_of(tmp_path, 101, [95]) == 96 and vocabulary_of(tmp_path, 64, [7]) == 64
    (tmp_path / "tokenizer.json").write_text("{}")
    assert vocabulary_of(tmp_path, 101, []) == vocabulary_of(tmp_path / "none", 101, []) == 101


def test_a_model_with_code_of_its_own_is_refused(tiny_directory: Directory, tmp_path: Path) -> None:
    make_tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(
        ModelRefused, match=r"model type mine\) cannot be served: transformers has no text model of this"
    ):
        TargetModel.load(tmp_path)


def test_a_layer_that_does_not_call_the_attention_is_refused() -> None:
    module = make_tiny("llama")
    layer = module.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)
    with pytest.raises(ModelRefused, match="1 of 2 layers"):
        TargetModel(module, name="m")


def test_a_window_that_does_not_reach_the_attention_is_refused() -> None:
    module = make_tiny("gemma2")
    for layer in module.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(ModelRefused, match="sliding window"):
        TargetModel(module, name="m")


class Causal(SdpaBackend):
    """Ignore the trees: every row sees all rows before it, siblings too."""

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return super().plan([replace(s, chain=s.rows, parents=s.parents[:0]) for s in segments], pool)


class Blind(SdpaBackend):
    """Forget the newest slot of every prefix."""

    def plan(self, segments: Sequence[Segment], pool: KVPool) -> AttentionPlan:
        return super().plan([replace(s, prefix=s.prefix[:-1]) for s in segments], pool)


@pytest.mark.parametrize("backend", [Causal(), Blind()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_trees_deviate_is_refused_with_difference_and_bound(
    backend: SdpaBackend, dtype: torch.dtype
) -> None:
    module = make_tiny("llama").to(dtype)
    model = TargetModel(module, name="m", backend=backend)
    with pytest.raises(ModelRefused, match=r"model type llama.* differ \(by .*, must be at most"):
        check_numerics(model)
    assert model.deviation is None
