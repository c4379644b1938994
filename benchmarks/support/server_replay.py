"""Let an engine write texts with the verifier's own sources, and a device's if wanted; count its steps and nodes."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Failed
from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost
from outrider.core.tree import ROOT

ROWS = 2048
"""The most rows of a step: every prompt is read in one."""
PRICE = 0.01
"""Seconds of a node, as a share of a step's: at three tokens a step a node pays from an acceptance of 0.03 on."""


class FixedCost(StepCost):
    """Predicts steps of a fixed cost, so that the speed of this machine does not decide which nodes are evaluated."""

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        """Learn nothing."""


class ServerReplay:
    """Writes one text after the other with sources that learn from all of them. The sources must not pause."""

    def __init__(
        self, model: TargetModel, sources: Sequence[ServerSource], plan: SpeculationPlan, drafter: Drafter | None = None
    ) -> None:
        """Take sources for steps of at most `plan.nodes` nodes. drafter: of a device, with as many of its own."""
        config = EngineConfig(kv_slots=2 * ROWS, token_budget=ROWS, prefill_chunk=ROWS, prefix_cache=False)
        cost = FixedCost({1: plan.step_s, 1 + ROWS: plan.step_s * (1.0 + PRICE * ROWS)})
        overlay = Overlay(sources, clock=lambda: 0.0)
        self._engine = Engine(TorchExecutor(model, config, cost), config, overlay=overlay)
        self._ends = tuple(model.eos_token_ids)
        self._plan = plan
        self._limits = SessionLimits(nodes=plan.nodes)
        self._drafter = drafter
        self._texts = 0

    def write(self, prompt: Sequence[int], sampling: SamplingParams, tokens: int) -> tuple[list[int], int, int]:
        """Return the text of at most so many tokens, the steps that it took and the nodes that they evaluated.

        Raises the error with which the engine ends the session.
        """
        engine, counters, drafter = self._engine, self._engine.counters, self._drafter
        device = DeviceSession(prompt, sampling=sampling, max_tokens=tokens, eos_token_ids=self._ends)
        steps, nodes = counters.steps, counters.evaluated + counters.server_evaluated
        self._texts += 1
        session = f"text-{self._texts}"
        engine.start(session, device.attach(1, self._limits), self._limits, Directive())
        if drafter is not None:
            ends = frozenset(self._ends)
            drafter.begin(DraftTask(tuple(prompt), sampling=sampling, max_tokens=tokens, ends=ends), self._plan)
        ids: dict[int, int | None] = {ROOT: ROOT}
        while not device.finished:
            if drafter is not None:
                grow(drafter, device, ids)
            while (append := device.poll(resting=True)) is not None:
                engine.append(session, append)
            for event in engine.step():
                match event:
                    case Committed(_, commit):
                        delivery = device.on_commit(commit)
                        if drafter is not None and delivery is not None:
                            drafter.advance(delivery.tokens)
                    case Failed(error=error):
                        raise error
        engine.stop(session)
        return device.received, counters.steps - steps, counters.evaluated + counters.server_evaluated - nodes


def grow(drafter: Drafter, device: DeviceSession, ids: dict[int, int | None]) -> None:
    """Let the drafter draft until it rests, and give its nodes to the session.

    ids: of the drafter's nodes there, {ROOT: ROOT} at first.
    """
    while drafter.step():
        pass
    update = drafter.harvest(moved=False)
    for node in update.nodes if update is not None else ():
        parent = ids[node.parent]
        ids[node.id] = device.add(parent, node.token) if parent is not None else None
