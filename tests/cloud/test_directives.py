"""Test a device's directive: the verifier's settings, the coordinator's decision, and the load."""

from __future__ import annotations

from cloud_verifier.front.directives import CHANGE, DIRECTIVE_TTL_S, DirectiveState
from outrider.core.protocol.messages import LEAST_ACCEPTANCE, Directive, SessionLimits

OWN = Directive(window_nodes=48, window_depth=24, nodes_per_step=10, draft_wait_ms=8)
LIMITS = SessionLimits(nodes=50, depth=30)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def state(clock: Clock | None = None) -> DirectiveState:
    return DirectiveState(OWN, LIMITS, clock or Clock())


def test_a_load_that_has_changed_little_is_not_sent():
    session = state()
    session.next(10.0, 0.8)
    for step_ms, min_acceptance in ((10.0 * (1 + CHANGE), 0.8), (10.0, 0.8 * (1 - CHANGE) + 0.001)):
        assert not session.outdated(step_ms, min_acceptance)
    for step_ms, min_acceptance in ((13.0, 0.8), (7.0, 0.8), (10.0, 1.0 + CHANGE), (10.0, 0.1)):
        assert session.outdated(step_ms, min_acceptance)
    session.set_directive(Directive(window_nodes=4, window_depth=4, nodes_per_step=4))
    session.next(10.0, 0.001)
    assert not session.outdated(10.0, 2 * LEAST_ACCEPTANCE)
    assert session.outdated(10.0, 2 * LEAST_ACCEPTANCE + 0.002)


def test_the_coordinators_word_holds_for_a_while_and_then_the_settings():
    clock = Clock()
    session = state(clock)
    assert session.lapse() is None
    session.set_directive(
        Directive(window_nodes=4, window_depth=4, nodes_per_step=4, min_acceptance=0.5, draft_wait_ms=3)
    )
    session.next(10.0, 0.0)
    clock.now += DIRECTIVE_TTL_S
    assert session.lapse() is None
    clock.now += 0.1
    assert session.lapse() == OWN
    assert session.changed
    assert session.next(10.0, 0.0).window_nodes == OWN.window_nodes
    assert session.lapse() is None
