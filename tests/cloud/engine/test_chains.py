"""Test the engine with a target that evaluates no trees: it gets the most probable path of what a device has sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rig import DIRECTIVE, Rig, adversary, client, prompt_of, random_tree
from tiny_targets import Reference

from cloud_verifier.engine.interface import SessionRows
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.verification import TreeBatch

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


def chained(target: Target, nodes: int = 8) -> tuple[Rig, list[TreeBatch]]:
    """Return a rig whose target evaluates chains of so many nodes at most, and the batches that it is given."""
    rig, batches = Rig(target("llama")), list[TreeBatch]()
    rig.executor.capabilities = replace(rig.executor.capabilities, trees=False, nodes_per_step=nodes)
    prepare = rig.executor.prepare

    def noted(rows: SessionRows) -> None:
        batches.extend([rows.batch] if rows.batch else [])
        prepare(rows)

    rig.executor.prepare = noted  # type: ignore[method-assign]
    return rig, batches


def test_of_a_tree_one_path_is_evaluated_and_no_token_changes(target: Target, reference: Plain) -> None:
    prompt = prompt_of(20)
    expected = reference("llama").generate(prompt, 24, ignore_eos=True)
    rig, batches = chained(target)
    rig.attach("right and wrong", client(prompt, adversary(expected), ignore_eos=True))
    rig.attach("random", client(prompt, random_tree, ignore_eos=True))
    rig.run()
    assert [one.device.received for one in rig.clients.values()] == [expected, expected]
    assert any(len(batch.ids) > 1 for batch in batches)
    for batch in batches:
        assert batch.parents == tuple(range(len(batch.ids)))


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_chain_has_no_more_nodes_than_the_target_evaluates(target: Target, nodes: int) -> None:
    rig, batches = chained(target, nodes)
    assert DIRECTIVE.nodes_per_step > nodes
    rig.attach("s", client(prompt_of(20), random_tree, ignore_eos=True))
    rig.run()
    assert max(len(batch.ids) for batch in batches) <= nodes
