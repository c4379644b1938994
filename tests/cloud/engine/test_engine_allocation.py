"""Test that nodes are taken by the verifier's estimate of their acceptance, at the cost of its steps."""

from __future__ import annotations

import random
from collections.abc import Callable

from rig import Rig, client, perfect, prompt_of
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine.row_allocation import by_acceptance
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.device import DeviceSession
from outrider.core.step_cost import StepCost
from outrider.core.tree import ROOT

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


class ExpensiveRows(StepCost):
    """Make a row cost a third of a plain step, whatever the machine."""

    def __init__(self) -> None:
        super().__init__({1: 0.003, 2: 0.004, 2000: 2.002})

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        pass


def unlikely_chain(device: DeviceSession, rng: random.Random) -> None:
    """Draft a chain of one random token six times over, which is right once in a hundred."""
    parent = ROOT
    for _ in range(6):
        node = device.add(parent, rng.randrange(VOCAB))
        if node is None:
            return
        parent = node


def test_a_draft_that_is_never_right_loses_its_rows_and_its_neighbour_keeps_them(
    target: Target, reference: Plain
) -> None:
    good, bad = prompt_of(12), prompt_of(13)
    expected = reference("llama").generate(good, 80, ignore_eos=True)
    rig = Rig(target("llama"), allocation=by_acceptance, cost=ExpensiveRows())
    rig.attach("good", client(good, perfect(expected), max_tokens=80, ignore_eos=True))
    rig.attach("bad", client(bad, unlikely_chain, max_tokens=80, ignore_eos=True))
    rig.run()
    assert rig.clients["good"].device.received == expected
    assert rig.clients["bad"].device.received == reference("llama").generate(bad, 80, ignore_eos=True)
    stats = rig.engine.telemetry
    assert stats["bad"].evaluated < 40  # of over 400 that were offered
    assert stats["good"].accepted == stats["good"].evaluated > 50
    assert stats["good"].committed / stats["good"].steps > 3.0
