"""The prompts of our own writing that tune and measure the pair; nothing is ever trained on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from models.recipe.settings import ASSISTANT, END, USER

FOLDER = Path(__file__).parents[2] / "benchmarks" / "prompts"


@dataclass(frozen=True)
class Prompt:
    """One prompt: raw text, or what a user says if it is of kind ``chat``."""

    id: str
    kind: str
    text: str

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids that the model is given."""
        text = f"{USER}{self.text}{END}{ASSISTANT}" if self.kind == "chat" else self.text
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load(name: str) -> list[Prompt]:
    """Read ``tuning`` or ``heldout``."""
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Prompt(row["id"], row["kind"], row["prompt"]) for row in rows]
