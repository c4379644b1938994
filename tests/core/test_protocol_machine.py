"""Run the simulator's events under Hypothesis, which looks for the shortest sequence that breaks a promise."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulator import Scenario, Stream, World

from outrider.core.protocol.messages import SessionLimits

LIMITS = st.builds(
    SessionLimits,
    nodes=st.integers(1, 10),
    depth=st.integers(1, 6),
    in_flight=st.integers(1, 14),
    run_ahead=st.integers(1, 10),
)
SCENARIOS = st.builds(
    Scenario,
    max_tokens=st.integers(0, 16),
    vocabulary=st.sampled_from([2, 4]),
    eos_one_in=st.sampled_from([0, 5]),
    tie_one_in=st.sampled_from([0, 2]),
    limits=st.lists(LIMITS, min_size=1, max_size=3).map(tuple),
    nodes_per_step=st.integers(0, 8),
    match=st.sampled_from([0.0, 0.6, 1.0]),
    patient=st.booleans(),
)


def _when(condition):
    """Run the rule only in a session that goes on and in which `condition(world)` holds."""
    return precondition(lambda machine: not machine.world.over and bool(condition(machine.world)))


def _has_zombie(world: World) -> bool:
    return bool(world.old)


class SessionMachine(RuleBasedStateMachine):
    """Define every rule as one event; in any order the session ends and every promise holds on the way."""

    @initialize(scenario=SCENARIOS, seed=st.integers(0, 2**32))
    def open(self, scenario: Scenario, seed: int) -> None:
        self.world = World(scenario, random.Random(seed))
        self.failed = False

    def _do(self, event, *arguments) -> None:
        self.failed = True
        event(*arguments)
        self.world.check_settled()
        self.failed = False

    @_when(lambda world: world.can_draft)
    @rule()
    def draft(self) -> None:
        self._do(self.world.draft)

    @_when(lambda world: world.dirty)
    @rule()
    def poll(self) -> None:
        self._do(self.world.poll)

    @_when(lambda world: world.stream.up)
    @rule()
    def deliver_up(self) -> None:
        self._do(self.world.deliver_up)

    @_when(lambda world: world.stream.down)
    @rule()
    def deliver_down(self) -> None:
        self._do(self.world.deliver_down)

    @_when(lambda world: world.may_begin(world.stream))
    @rule()
    def begin_step(self) -> None:
        self._do(self.world.begin_step)

    @_when(lambda world: world.stream.batch is not None)
    @rule()
    def end_step(self) -> None:
        self._do(self.world.end_step)

    @_when(lambda world: len(world.old) < 4)
    @rule()
    def reconnect(self) -> None:
        self._do(self.world.reconnect)

    @_when(lambda world: len(world.old) < 4)
    @rule()
    def fail_over(self) -> None:
        self._do(self.world.fail_over)

    @_when(lambda world: world.stream.appends)
    @rule()
    def replay_append(self) -> None:
        self._do(self.world.replay_append)

    @_when(lambda world: world.stream.commits)
    @rule()
    def replay_commit(self) -> None:
        self._do(self.world.replay_commit)

    @_when(lambda world: world.stream.down)
    @rule()
    def lose_commit(self) -> None:
        self._do(self.world.lose_commit)

    @_when(_has_zombie)
    @rule(which=st.integers(0, 3))
    def zombie_moves(self, which: int) -> None:
        events = self.world.zombie_events()
        if events:
            event, arguments = events[which % len(events)]
            self._do(event, *arguments)

    @_when(lambda world: len(world.delivered) > 2)
    @rule()
    def cancel(self) -> None:
        self._do(self.world.cancel)

    @precondition(lambda machine: machine.world.over)
    @rule()
    def go_on_after_the_end(self) -> None:
        self._do(self.world.tick)

    @invariant()
    def caps_hold(self) -> None:
        world = self.world
        streams: list[Stream] = [world.stream, *world.old]
        assert all(s.session.held <= s.limits.nodes for s in streams if s.session is not None)
        assert len(world.device.tree) <= world.stream.limits.nodes
        assert world.device.received == world.delivered

    def teardown(self) -> None:
        """Run the session to its end from the state that the rules left it in."""
        if hasattr(self, "world") and not self.failed:
            self.world.run()


class TestSessions(SessionMachine.TestCase):
    settings = settings(
        max_examples=300,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
