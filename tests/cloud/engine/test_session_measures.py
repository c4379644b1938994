"""Test what the engine measures of a session for the controller, and that devices cannot falsify it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import LIMITS, Rig, attach_of, client, nothing, perfect, prompt_of
from session_messages import append, directive
from tiny_targets import Reference

from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.acceptance.history import HIT
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
STREAMING = directive(window_nodes=0, nodes_per_step=0, draft_wait_ms=0)


def measured(rig: Rig, name: str = "s") -> SessionTelemetry:
    return rig.engine.telemetry[name]


def committed(rig: Rig) -> tuple[int, ...]:
    """Take one step and return the tokens that it commits."""
    tokens: tuple[int, ...] = ()
    for event in rig.engine.step():
        assert isinstance(event, Committed)
        tokens += tuple(event.commit.token)
    return tokens


@pytest.fixture
def streaming(target: Target) -> Rig:
    """Return a device 40 ms away, none of whose draft tokens is evaluated, after one step."""
    rig = Rig(target("llama"))
    rig.engine.start("s", attach_of(prompt_of(9), ignore_eos=True, max_tokens=64), LIMITS, STREAMING)
    rig.engine.update("s", rtt_ms=40.0)
    return rig


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


def test_the_time_that_a_device_drafts_is_what_passes_beside_the_way(streaming: Rig) -> None:
    for turn in range(20):
        committed(streaming)
        streaming.clock.now += 0.040 + 0.007
        base = measured(streaming).committed
        streaming.engine.append("s", append(1, turn + 1, base, (0,), (5,)))
    assert measured(streaming).draft_ms == pytest.approx(7.0, abs=0.1)
