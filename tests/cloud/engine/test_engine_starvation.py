"""Test that no session starves in the engine, whoever falls behind and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from even_allocation import evenly
from rig import LIMITS, Client, Rig, client, nothing, prompt_of, random_tree

from cloud_verifier.engine import scheduler
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.row_allocation import AllocationPolicy, by_acceptance
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.step_cost import StepCost

Target = Callable[[str], TargetModel]
AT_ONCE = 12
OVERDUE = 16
"""The scheduler's, smaller, so that many prompts become overdue."""
SLOPE = 0.1
"""What a row adds to the cost of a step of one."""
CONFIG = EngineConfig(kv_slots=4_096, max_sessions=AT_ONCE, first_token_s=1e6)


class Crowd:
    """Run more sessions than a step has rows: long prompts, devices with and without nodes, some silent for a while."""

    def __init__(self, model: TargetModel, allocation: AllocationPolicy, rows: int, run_ahead: int, seed: int) -> None:
        self._limits = replace(LIMITS, run_ahead=run_ahead)
        cost = StepCost({1: 1.0, 2048: 1.0 + SLOPE * 2047})
        cost.observe = lambda rows, sessions, seconds: None  # type: ignore[method-assign]
        self.rig = Rig(model, replace(CONFIG, token_budget=rows), seed, allocation, cost=cost)
        self.left_out: dict[EngineSession, int] = {}
        """Successive steps in which other sessions were served while it could have been."""
        self.longest = self.overdue = 0
        self.fell_behind = self.came_back = self.came = 0
        self._silent: dict[str, int] = {}
        """Turns for which a device will stay silent."""
        self._stuck: set[EngineSession] = set()

    def turn(self) -> None:
        self._arrive()
        for name, one in self.rig.clients.items():
            if not one.ended and not self._keeps_silent(name):
                self._speak(name, one)
        self._step()
        self.rig.clock.now += 0.001

    def _arrive(self) -> None:
        rng, live = self.rig.rng, self.rig.engine.stats().verifier.live_sessions
        if live == AT_ONCE or rng.random() < 0.5:
            return
        self.came += 1
        prompt = prompt_of(rng.choice([2, 9, 60, 120]), seed=self.came)
        one = client(prompt, rng.choice([random_tree, nothing]), max_tokens=rng.randrange(5, 60), ignore_eos=True)
        one.limits = self._limits
        self.rig.attach(f"s{self.came}", one)

    def _keeps_silent(self, name: str) -> bool:
        left = self._silent.get(name, 0)
        if left == 0 and self.rig.rng.random() < 0.03:
            left = self.rig.rng.randrange(5, 80)
        self._silent[name] = max(0, left - 1)
        return left > 0

    def _speak(self, name: str, one: Client) -> None:
        one.draft(one.device, self.rig.rng)
        while (append := one.device.poll(resting=True)) is not None:
            self.rig.engine.append(name, append)

    def _step(self) -> None:
        engine = self.rig.engine
        live = list(engine._live.values())
        could = {session: session.computed for session in live if session.protocol.may_step}
        prompts = {session for session in could if session.pending > 1}
        self.overdue += sum(engine.counters.steps - session.last_step >= OVERDUE for session in prompts)
        before = engine.counters.steps
        for event in engine.step():
            self.rig.hear(event)
        stuck = set(live) - set(could)
        self.fell_behind += len(stuck - self._stuck)
        self.came_back += len(self._stuck & set(could))
        self._stuck = stuck
        if engine.counters.steps == before:
            return
        # Whoever had rows has more in its table, or has ended.
        missed = {s for s, rows in could.items() if s in engine._live.values() and s.computed == rows}
        if prompts <= missed:
            missed -= prompts  # the step has no time for prompts
        self.left_out = {session: self.left_out.get(session, 0) + 1 for session in missed}
        self.longest = max(self.longest, *self.left_out.values(), 0)


@pytest.mark.parametrize(("allocation", "rows", "run_ahead"), [(evenly, 3, 12), (evenly, 5, 3), (by_acceptance, 9, 3)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly("another crowd"))])
def test_no_session_that_could_step_is_left_out_of_more_steps_than_stated(
    target: Target,
    allocation: AllocationPolicy,
    rows: int,
    run_ahead: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "OVERDUE", OVERDUE)
    monkeypatch.setattr(scheduler, "PROMPT_SHARE", 0.1)  # so that some steps have no time for prompts
    crowd = Crowd(target("llama"), allocation, rows, run_ahead, seed)
    for _ in range(400):
        crowd.turn()
        assert crowd.longest <= OVERDUE + AT_ONCE - 1
    counters = crowd.rig.engine.counters
    assert counters.steps > 350
    assert not any(one.errors for one in crowd.rig.clients.values())
    # What the bound is about has come to pass.
    assert crowd.overdue > 0
    assert min(crowd.fell_behind, crowd.came_back) >= 5
    assert counters.evaluated > 0 or rows == 3  # which plain rows and prompts fill
    assert crowd.came > AT_ONCE
