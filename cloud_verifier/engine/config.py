"""Define the configuration of an engine: how much it holds, and how much it does at once."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_verifier.engine.scheduler import StepBudget


@dataclass(frozen=True)
class EngineConfig:
    """Says what an engine holds and does at once; the process that runs it builds this when it starts."""

    kv_slots: int = 32_768
    """The most tokens whose keys and values are held, over all sessions."""
    token_budget: int = 512
    """The most rows of one forward pass: prefill chunks, plain steps and trees together."""
    max_sessions: int = 64
    """The most live sessions."""
    first_token_s: float = 30.0
    """Longest time by which earlier prompts may delay a new session's first token, as the cost model predicts it."""
    prefix_cache: bool = True
    """Keep computed prefixes in slots that no live session needs, and begin sessions with them."""
    record_top: int = 32
    """K, the number of likeliest ids that are recorded of each position of a recorded session."""
    allow_lossy_rules: bool = False
    """Serve sessions whose acceptance rule lets draft tokens change the output."""

    @property
    def budget(self) -> StepBudget:
        return StepBudget(self.token_budget)
