"""Test what the engine measures of a session for the coordinator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import Rig, client, nothing, perfect, prompt_of
from tiny_targets import Reference

from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.acceptance.history import HIT
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


def measured(rig: Rig, name: str = "s") -> SessionTelemetry:
    return rig.engine.telemetry[name]


def test_a_good_draft_is_known_as_one_and_a_session_without_as_unknown(target: Target, reference: Plain) -> None:
    rig = Rig(target("llama"))
    expected = reference("llama").generate(prompt_of(12), 40, ignore_eos=True)
    rig.attach("s", client(prompt_of(12), perfect(expected), max_tokens=40, ignore_eos=True))
    rig.run()
    history = measured(rig).acceptance_history
    assert set(history) == {HIT}
    assert len(history) > 20
    assert measured(rig).nodes_per_level == pytest.approx(1.0)

    rig.attach("t", client(prompt_of(12), nothing, max_tokens=10, ignore_eos=True))
    rig.run()
    assert rig.engine.telemetry["t"].acceptance_history == b""
