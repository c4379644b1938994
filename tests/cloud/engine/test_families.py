"""Test which model families are served exactly, which are refused in what words, and that the docs say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from rig import Rig, adversary, client, prompt_of, random_tree
from tiny_targets import Reference

from cloud_verifier.engine.torch_backend.architecture import OTHER_MODEL, UnservedArchitecture
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = "| family | served | note |"
TOKENS = 16
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
SERVED = [name for name, family in FAMILIES.items() if not family.refusal]
REFUSED = [name for name, family in FAMILIES.items() if family.refusal]


@torch.inference_mode()
def generate(module: Any, prompt: list[int]) -> list[int]:
    """Return the tokens of transformers' own greedy generation."""
    ids = module.generate(
        torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SERVED)
def test_a_served_family_gives_the_tokens_of_transformers_with_trees_and_beside_other_sessions(name: str) -> None:
    module = FAMILIES[name].make()
    prompts = {"greedy": prompt_of(13), "longer": prompt_of(30, seed=1), "sampled": prompt_of(9, seed=2)}
    expected = {key: generate(module, prompts[key]) for key in ("greedy", "longer")}
    expected["sampled"] = Reference(module).generate(prompts["sampled"], TOKENS, SAMPLED, ignore_eos=True)
    model = TargetModel(module, name="m")
    check_numerics(model)
    rig = Rig(model)
    for key, draft in (
        ("greedy", adversary(expected["greedy"])),
        ("longer", random_tree),
        ("sampled", adversary(expected["sampled"])),
    ):
        sampling = SAMPLED if key == "sampled" else SamplingParams()
        rig.attach(key, client(prompts[key], draft, TOKENS, sampling=sampling, ignore_eos=True))
    rig.run()
    assert {key: one.device.received for key, one in rig.clients.items()} == expected
    assert rig.engine.counters.accepted > 0


def assert_refused(family: Family, refusal: UnservedArchitecture) -> None:
    with pytest.raises(ModelRefused) as caught:
        check_numerics(TargetModel(family.make(), name="m"))
    said = str(caught.value)
    assert said.startswith(f"m (model type {family.model_type}) cannot be served: {refusal.why}")
    assert said.endswith(f"; {OTHER_MODEL}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_served_is_refused_in_plain_words(name: str) -> None:
    family = FAMILIES[name]
    assert family.refusal
    assert_refused(family, family.refusal)


def row(name: str, family: Family) -> str:
    """Return the family's row in the table of docs/models.md."""
    if family.refusal:
        return f"| {name} | no | {family.refusal.why} |"
    return f"| {name} | yes | {family.note} |"


def test_the_docs_list_the_families_as_they_are_tested() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(HEADER) + 2 :]
    table = table[: table.index("")]
    assert table == [row(name, family) for name, family in FAMILIES.items()]
