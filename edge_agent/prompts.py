"""Read prompts to measure with from JSONL, in our own format or in that of well-known benchmarks.

A row                                              of
{"id", "category", "turns": ["first", "second"]}   our benchmarks/prompts.jsonl
{"question_id", "category", "turns"}               Spec-Bench, MT-bench (one category, as in Spec-Bench)
{"task_id", "prompt"} or only {"prompt"}           HumanEval
{"question"}                                       GSM8K
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StringConstraints, ValidationError

from outrider.core.errors import BadRequest, between

MAX_FILE_BYTES = 1 << 28
MAX_TURNS = 256
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""The categories of MT-bench, of ten prompts each, which Spec-Bench reports as one task."""

_Text = Annotated[str, StringConstraints(pattern=r"\S")]


@dataclass(frozen=True)
class Prompt:
    """Hold what a user asks: the first turn, and what follows each answer to the turn before."""

    id: str
    category: str
    turns: tuple[str, ...]


class _Row(BaseModel, strict=True):
    """One line of a file."""

    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "question_id", "task_id"))
    question_id: object = None
    category: _Text | None = None
    turns: Annotated[
        list[_Text],
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
        Field(min_length=1, max_length=MAX_TURNS, validation_alias=AliasChoices("turns", "prompt", "question")),
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file; a row without a category has the file's name.

    Raises BadRequest, which names the file and the line, for what cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    try:
        between(f"bytes of {path}", path.stat().st_size, 0, MAX_FILE_BYTES)
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="prompts") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _Row.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise BadRequest(f"{path}, line {number}: {where}{first['msg']}", field="prompts") from None
        category = row.category or path.stem
        if row.question_id is not None and category in MT_BENCH:
            category = "mt-bench"
        prompt = Prompt(f"{path.stem}-{number}" if row.id is None else str(row.id), category, tuple(row.turns))
        if prompts.setdefault(prompt.id, prompt) is not prompt:
            wrong = f"the id {prompt.id!r} is an earlier row's, must be of one row only"
            raise BadRequest(f"{path}, line {number}: {wrong}", field="prompts")
    if not prompts:
        raise BadRequest(f"{path} has no prompt", field="prompts")
    return list(prompts.values())


def mixed(prompts: Sequence[Prompt], count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts (all without it), the categories in turn, in the order of their first rows."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in turns if prompt is not None][:count]
