"""Define the plan of a dataset, and the card that says what came of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

CARD = "card.json"
"""The card's file in the folder of a dataset, written last."""


class DatasetPlan(BaseModel):
    """Holds the settings of a dataset. Counts of tokens are of labels: tokens to learn from or to measure on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights_hash: str = ""
    """The target whose text is taken; if empty, that of the newest passage."""
    since_unix: float = 0.0
    """Seconds; passages older than this are not read."""
    fresh_since_unix: float = 0.0
    """Seconds; passages from this time on are fresh traffic, usually those after the last training's dataset."""
    lasts_s: float = Field(default=0.0, ge=0)
    """Seconds that the dataset must last: passages that expire sooner are left out."""
    tokens: int = Field(default=1_000_000, ge=1)
    heldout_tokens: int = Field(default=40_000, ge=1)
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the sessions that the gate measures on and no draft learns from."""
    validation_share: float = Field(default=0.04, gt=0, lt=0.5)
    """Share of the sessions by which training chooses its best checkpoint; at least one session."""
    replay_share: float = Field(default=0.3, ge=0, lt=1)
    """Share of the training tokens that is old traffic, so that a new domain does not displace earlier ones. Held-out
    text has its share of every class, however old, so that no class is forgotten unseen."""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of a class, and of all tokens, that one tenant gives unless it is alone; see `tenant_tokens`."""
    tenant_tokens: int = Field(default=20_000, ge=0)
    """Number of `tokens` that any tenant may give whatever its share; of held-out text, in proportion."""
    classes: int = Field(default=32, ge=1)
    """Number of classes that are distinguished, the largest ones. Clients name classes freely; the rest are one."""
    named: tuple[str, ...] = ()
    """Classes that are distinguished whatever their size."""
    copies: int = Field(default=3, ge=1)
    """Number of nearly equal texts that are taken."""
    repeated_share: float = Field(default=0.8, gt=0, le=1)
    """Share of a text's pieces of 8 tokens that others must have for it to be nearly equal to them."""
    top: int = Field(default=32, ge=1)
    """Number of the target's likeliest ids that are kept of each position."""
    window: int = Field(default=512, ge=8)
    """Tokens of the longest text; longer spans of a session are cut."""
    overlap: int = Field(default=64, ge=1)
    """Tokens of context at the head of a text that continues another."""
    prompt: int = Field(default=256, ge=0)
    """Tokens of the prompt at the head of a session's first text, if the log has them; at most half a window. They
    cost training time and are never labels."""
    shortest: int = Field(default=8, ge=2)
    """Tokens of the shortest text."""
    seed: int = 0

    def tenant_floor(self, tokens: int) -> int:
        """Return how many of `tokens` any tenant may give whatever its share."""
        return self.tenant_tokens * tokens // self.tokens


class DatasetCard(BaseModel):
    """A description of what a dataset holds. Counts of tokens are of labels."""

    model_config = ConfigDict(frozen=True)

    expires_unix: float
    """Seconds; when the first of its passages expires, and the dataset must be deleted."""
    weights_hash: str
    train: dict[str, dict[str, int]]
    """Training tokens by class and age (`fresh` or `old`)."""
    heldout: dict[str, int]
    """Held-out tokens by class."""
    heldout_sessions: dict[str, int]
    """Held-out sessions by class."""
    left_out: dict[str, int]
    """Tokens left out by reason: `duplicates`, `over_cap` (of a tenant), `over_budget`, `short`, `other_target`,
    `expiring`, `held_out` (nearly equal to held-out text)."""

    @property
    def train_tokens(self) -> int:
        return sum(sum(ages.values()) for ages in self.train.values())

    @classmethod
    def read(cls, folder: Path) -> DatasetCard:
        """Read the card of a dataset. Raises OSError if there is none: the dataset was never finished."""
        return cls.model_validate_json((folder / CARD).read_text(encoding="utf-8"))
