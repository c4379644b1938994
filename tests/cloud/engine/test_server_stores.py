"""Test that the verifier's n-grams use a tenant's store: faster for that tenant, and with the same tokens for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rig import Rig, client, nothing, prompt_of
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.server_draft.ngram import NgramSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.server_draft.sources import sources_of
from cloud_verifier.engine.server_draft.tenant_stores import TenantStores
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.ngram import NgramTable
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
SAMPLING = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=5)}


def stores(folder: Path, target: TargetModel, text: Sequence[int]) -> TenantStores:
    """Return the stores of a folder in which the tenant `acme` has one that knows the text."""
    table = NgramTable.build([text, text], least_sequences=2)
    weights_hash = f"sha256:{target.weights_hash}"
    NgramStore(table, weights_hash, "sha256:tokens", "acme", 2, 2).save(folder / "acme.safetensors")
    found = TenantStores(folder, weights_hash, VOCAB)
    found.wait()
    return found


def rig_with(target: TargetModel, found: TenantStores) -> Rig:
    """Return an engine whose n-grams take no time."""
    overlay = Overlay(sources_of(["ngram"], found), clock=lambda: 0.0)
    return Rig(target, EngineConfig(kv_slots=2048), overlay=overlay)


def steps_of(rig: Rig, tenant: str, prompt: Sequence[int], params: SamplingParams) -> int:
    """Run a session of a tenant whose device drafts nothing; return the steps that it took."""
    one = client(prompt, nothing, max_tokens=40, sampling=params, ignore_eos=True, salt=tenant)
    rig.attach("s", one)
    rig.run()
    return rig.engine.counters.steps


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_store_saves_its_tenant_steps_and_gives_others_nothing_and_the_output_is_the_targets_own(
    sampling: str, target: Target, reference: Plain, tmp_path: Path
) -> None:
    params, prompt = SAMPLING[sampling], prompt_of(12)
    output = reference("llama").generate(prompt, 40, params, ignore_eos=True)
    found = stores(tmp_path, target("llama"), [*prompt, *output])
    taken = {}
    for tenant in ("acme", "bolt", ""):
        rig = rig_with(target("llama"), found)
        taken[tenant] = steps_of(rig, tenant, prompt, params)
        assert rig.clients["s"].device.received == output
    assert taken["bolt"] == taken[""]
    assert taken["acme"] < taken["bolt"] / 1.5


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_store_of_senseless_tokens_changes_no_token(
    sampling: str, target: Target, reference: Plain, tmp_path: Path
) -> None:
    params, prompt = SAMPLING[sampling], prompt_of(12)
    output = reference("llama").generate(prompt, 40, params, ignore_eos=True)
    wrong = [token for right in [*prompt, *output] for token in (right, (right + 1) % VOCAB)]
    rig = rig_with(target("llama"), stores(tmp_path, target("llama"), wrong))
    steps_of(rig, "acme", prompt, params)
    assert rig.clients["s"].device.received == output


def test_a_session_takes_the_store_that_its_tenant_has_now(target: Target, reference: Plain) -> None:
    prompt = prompt_of(12)
    output = reference("llama").generate(prompt, 60, ignore_eos=True)
    table, current = NgramTable.build([[*prompt, *output]]), list[NgramTable]()
    source = NgramSource(lambda tenant: current[0] if current else None)
    source.pauses = False
    rig = Rig(target("llama"), EngineConfig(kv_slots=2048), overlay=Overlay([source], clock=lambda: 0.0))
    rig.attach("s", client(prompt, nothing, max_tokens=60, ignore_eos=True, salt="acme"))
    device, accepted = rig.clients["s"].device, {}
    for name, stores, length in (("before", [], 20), ("with it", [table], 40), ("withdrawn", [], 60)):
        current[:] = stores
        before = rig.engine.counters.server_accepted
        while len(device.received) < length and not device.finished:
            rig.turn()
        accepted[name] = rig.engine.counters.server_accepted - before
    assert device.received == output
    assert accepted["with it"] > 10 > max(accepted["before"], accepted["withdrawn"])
