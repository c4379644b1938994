"""Let an engine write texts with the verifier's own sources alone, and count its steps and their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Failed
from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost

ROWS = 2048
"""Rows of a step and slots of the engine: every prompt is read in one step."""


class FixedCost(StepCost):
    """Predicts steps of a fixed cost, so that the speed of this machine does not decide which nodes are evaluated."""

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        """Learn nothing."""


class ServerReplay:
    """Writes one text after the other with sources that learn from all of them. The sources must not pause."""

    def __init__(
        self, model: TargetModel, sources: Sequence[ServerSource], *, nodes: int, step_s: float, price: float
    ) -> None:
        """Take sources for steps of at most `nodes` nodes.

        step_s: seconds of a step without nodes. price: seconds of a node, as a share of these.
        """
        config = EngineConfig(kv_slots=2 * ROWS, token_budget=ROWS, prefill_chunk=ROWS, prefix_cache=False)
        cost = FixedCost({1: step_s, 1 + ROWS: step_s * (1.0 + price * ROWS)})
        overlay = Overlay(sources, clock=lambda: 0.0)
        self._engine = Engine(TorchExecutor(model, config, cost), config, overlay=overlay)
        self._ends = tuple(model.eos_token_ids)
        self._limits = SessionLimits(nodes=nodes)
        self._texts = 0

    def write(self, prompt: Sequence[int], sampling: SamplingParams, tokens: int) -> tuple[list[int], int, int]:
        """Return the text of at most so many tokens, the steps that it took and the nodes that they evaluated.

        Raises the error with which the engine ends the session.
        """
        engine, counters = self._engine, self._engine.counters
        device = DeviceSession(prompt, sampling=sampling, max_tokens=tokens, eos_token_ids=self._ends)
        steps, nodes = counters.steps, counters.server_evaluated
        self._texts += 1
        session = f"text-{self._texts}"
        engine.start(session, device.attach(1, self._limits), self._limits, Directive())
        while not device.finished:
            while (append := device.poll(resting=True)) is not None:
                engine.append(session, append)
            for event in engine.step():
                match event:
                    case Committed(_, commit):
                        device.on_commit(commit)
                    case Failed(error=error):
                        raise error
        engine.stop(session)
        return device.received, counters.steps - steps, counters.server_evaluated - nodes
