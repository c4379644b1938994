"""Test that sessions are admitted by the predicted time of their first token, or refused and come again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from even_allocation import evenly
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rig import DIRECTIVE, LIMITS, Rig, attach_of, prompt_of

from cloud_verifier.engine.admission import first_token_s
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.scheduler import StepBudget, StepCandidate, StepPlan, schedule
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import Overloaded
from outrider.core.step_cost import StepCost

FACTOR = 3.0
"""Factor by which a predicted first token may be early or late: where several prompts end in one step, the newcomer
gets less than a chunk and queues again for the rest."""
BUDGET = StepBudget(rows=512)
FLAT = StepCost({1: 1.0})
"""Costs of a step of one second, so that seconds count steps."""
STEEP = StepCost({1: 1.0, 2048: 65.0})


def real_s(own: int, before: Sequence[int], generating: int, budget: StepBudget, cost: StepCost) -> float:
    """Return the seconds until the newcomer's first token, by `schedule` itself; everybody goes on generating."""
    pending = {f"prompt {i}": tokens for i, tokens in enumerate(before)}
    pending |= {f"generates {i}": 1 for i in range(generating)} | {"newcomer": own}
    last = dict.fromkeys(pending, 0)
    step, seconds = 0, 0.0
    while True:
        able = [
            StepCandidate(name, left, (), True, True, 0.0, 0.0, 0.0, 1.0, 0.0, step - last[name])
            for name, left in pending.items()
        ]
        plan = schedule(able, 1.0, budget, evenly, cost)
        assert isinstance(plan, StepPlan)
        budget = replace(budget, prompt_s=plan.prompt_s)
        step += 1
        seconds += cost.seconds(sum(own_rows.chain for own_rows in plan.allocations), len(plan.allocations))
        for own_rows in plan.allocations:
            last[own_rows.session_id] = step
            if own_rows.session_id == "newcomer" and own_rows.chain == pending["newcomer"]:
                return seconds
            pending[own_rows.session_id] = max(1, pending[own_rows.session_id] - own_rows.chain)


BUDGETS = st.sampled_from([16, 64, 128, 512]).map(StepBudget)
LENGTHS = st.floats(-3.0, 5.0).map(lambda log: 2.0**log)
"""Lengths of prompts in quarters of a step: from a part of one to 32 of them."""


@settings(max_examples=200)
@given(
    own=LENGTHS,
    before=st.lists(LENGTHS, min_size=1, max_size=16),
    generating=st.integers(0, 16),
    budget=BUDGETS,
    cost=st.sampled_from([FLAT, STEEP]),
)
@example(own=0.1, before=[32.0] * 16, generating=0, budget=BUDGET, cost=FLAT)
@example(own=31.0, before=[0.2] * 15 + [32.0], generating=1, budget=BUDGET, cost=STEEP)
def test_the_first_token_comes_about_when_it_is_predicted(
    own: float, before: list[float], generating: int, budget: StepBudget, cost: StepCost
) -> None:
    tokens = [2 + int(length * budget.rows / 4) for length in (own, *before)]
    predicted = first_token_s(tokens[0], tokens[1:], generating, budget, cost)
    real = real_s(tokens[0], tokens[1:], generating, budget, cost)
    assert real / FACTOR <= predicted <= real * FACTOR


# --------------------------------------------------------------------------- in the engine

Target = Callable[[str], TargetModel]
SMALL = EngineConfig(kv_slots=2_048, token_budget=16)
DEAR = StepCost({1: 1.0, 2048: 1.0 + 0.25 * 2047})
"""Costs of steps in which a prompt gets two rows beside a session that generates."""


def engine_of(target: Target, *prompts: int) -> Engine:
    """Return an engine with steps of a second. One session generates, others have such prompts still to read."""
    rig = Rig(target("llama"), SMALL, cost=DEAR)
    rig.engine.start("generates", attach_of(prompt_of(4), max_tokens=64), LIMITS, DIRECTIVE)
    rig.engine.step()
    for i, length in enumerate(prompts):
        rig.engine.start(f"reads {i}", attach_of(prompt_of(length, seed=i)), LIMITS, DIRECTIVE)
    return rig.engine


def test_a_newcomer_is_refused_where_long_prompts_would_keep_its_first_token(target: Target) -> None:
    engine = engine_of(target)
    with pytest.raises(Overloaded, match=r"first token for \d\d\.\d s, over first_token_s = 30") as refusal:
        for i in range(12):
            before = engine.stats()
            engine.start(f"reads {i}", attach_of(prompt_of(18, seed=i)), LIMITS, DIRECTIVE)
    assert before.verifier.live_sessions >= 4
    late_s = float(re.findall(r"first token for ([\d.]+) s", str(refusal.value))[0]) - 30.0
    assert refusal.value.retry_after_s == pytest.approx(max(0.2, late_s), abs=0.051)
    after = engine.stats()
    assert (after.verifier.live_sessions, after.kv_reserved) == (before.verifier.live_sessions, before.kv_reserved)
    assert after.verifier.kv_used == before.verifier.kv_used


@pytest.mark.parametrize(("before", "own"), [((), 200), ((30,), 20), ((200,), 20)])
def test_a_newcomer_that_is_soon_served_is_taken(target: Target, before: tuple[int, ...], own: int) -> None:
    """Nothing or little is queued before it, or its own prompt is so short that it has been read once it is overdue."""
    engine = engine_of(target, *before)
    engine.start("newcomer", attach_of(prompt_of(own)), LIMITS, DIRECTIVE)
    assert engine.stats().verifier.live_sessions == 2 + len(before)
