"""How much an engine holds and does at once."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_verifier.engine.scheduler import StepBudget
from outrider.core.errors import BadRequest


@dataclass(frozen=True)
class EngineConfig:
    """Built once, where the process starts."""

    kv_slots: int = 32_768
    """Tokens whose keys and values are held, over all sessions."""
    token_budget: int = 512
    """Rows of one forward pass: prefill chunks, plain steps and trees together."""
    prefill_chunk: int = 128
    """Of them for prompts while others generate: bounds how much a long prompt slows the others' step."""
    max_sessions: int = 64
    """Live at once."""
    first_token_s: float = 30.0
    """Longest time by which others' prompts may delay a new session's first token, as the cost model predicts it."""
    standing_s: float = 60.0
    """Longest time that a session may stand still because its device confirms nothing (rule 16)."""
    prefix_cache: bool = True
    """Keep what was computed in slots that no live session needs, and begin sessions with it."""
    record_top: int = 32
    """K: likeliest ids that are told of each position of a recorded session."""
    remembered_sessions: int = 65_536
    """Ids whose greatest epoch is remembered after they ended."""
    remembered_tokens: int = 4_000_000
    """Tokens, over all ended sessions, kept for devices that come back without having received them; 4 bytes each."""

    def __post_init__(self) -> None:
        names = "kv_slots", "token_budget", "prefill_chunk", "max_sessions", "first_token_s", "standing_s", "record_top"
        for name in names:
            if not getattr(self, name) >= 1:
                raise BadRequest.bound(name, getattr(self, name), "at least 1")
        if self.token_budget < 2:
            raise BadRequest.bound("token_budget", self.token_budget, "at least 2: a prompt's row and one beside it")

    @property
    def budget(self) -> StepBudget:
        return StepBudget(self.token_budget, min(self.prefill_chunk, self.token_budget))
