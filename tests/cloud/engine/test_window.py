"""Test that the verifier keeps to the directive's window: what a device sends beyond it is ignored and counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import DIRECTIVE, LIMITS, Rig, attach_of, nodes, prompt_of
from session_messages import changed

from cloud_verifier.engine.interface import Committed, Event
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.messages import Directive
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

Target = Callable[[str], TargetModel]
PROMPT = prompt_of(12)


def started(target: Target, directive: Directive) -> Rig:
    rig = Rig(target("llama"))
    rig.engine.start("s", attach_of(PROMPT, ignore_eos=True, max_tokens=64), LIMITS, directive)
    return rig


def stats(rig: Rig) -> SessionTelemetry:
    return rig.engine.telemetry["s"]


def evaluated(events: list[Event]) -> int:
    """Return the number of evaluated nodes by the only commit."""
    (event,) = events
    assert isinstance(event, Committed)
    return event.commit.evaluated


@pytest.mark.parametrize(("window", "looked_at"), [(24, 6), (4, 4), (1, 1), (0, 0)])
def test_of_more_nodes_than_the_window_holds_the_best_are_looked_at_and_the_others_counted(
    target: Target, window: int, looked_at: int
) -> None:
    rig = started(target, changed(DIRECTIVE, window_nodes=window))
    rig.engine.append("s", nodes(*range(20, 26)))
    assert evaluated(rig.engine.step()) == looked_at
    assert stats(rig).ignored == 6 - looked_at
