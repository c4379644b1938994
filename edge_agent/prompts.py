"""Read prompts to measure with from JSONL or one JSON array, in our own format or in that of well-known benchmarks.

A row                                                           of
{"id", "category", "turns": ["first", "second"]}                our benchmarks/prompts.jsonl
{"question_id", "category", "turns"}                            Spec-Bench, MT-bench (one category, as in Spec-Bench)
{"task_id", "prompt"} or only {"prompt"}                        HumanEval
{"question"}                                                    GSM8K
{"id", "conversations": [{"from": "human", "value": "first"}]}  ShareGPT, whose usual file is an array of 0.7 GB
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from outrider.core.errors import BadRequest, between

MAX_FILE_BYTES = 1 << 30
MAX_TURNS = 256
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""The categories of MT-bench, of ten prompts each, which Spec-Bench reports as one task."""

_HUMAN = ("human", "user")
"""Who asks in a conversation of ShareGPT's."""

_Text = Annotated[str, StringConstraints(pattern=r"\S")]


@dataclass(frozen=True)
class Prompt:
    """Hold what a user asks: the first turn, and what follows each answer to the turn before."""

    id: str
    category: str
    turns: tuple[str, ...]


class _Row(BaseModel, strict=True):
    """One prompt of a file."""

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

    Conversations that no human begins, or in which the human once says nothing, are left out. Raises BadRequest, which
    names the file and the line (of an array, the entry), for what cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    where = "line 1"
    try:
        between(f"bytes of {path}", path.stat().st_size, 0, MAX_FILE_BYTES)
        for where, row in _rows(path.read_bytes().removeprefix(b"\xef\xbb\xbf")):
            row = _json(row) if isinstance(row, bytes) else row
            if not isinstance(row, dict):
                raise ValueError(f"is {row!r:.40}, must be a JSON object")
            if isinstance(said := row.get("conversations"), list):
                if not (asked := _asked(said)):
                    continue
                # Long conversations stand there in parts, some of which have one id.
                id_ = row.get("id")
                row = row | {"turns": asked[:MAX_TURNS], "id": f"{id_}, {where}" if str(id_) in prompts else id_}
            found = _Row.model_validate(row)
            category = found.category or path.stem
            if found.question_id is not None and category in MT_BENCH:
                category = "mt-bench"
            id_ = f"{path.stem}-{where.split()[1]}" if found.id is None else str(found.id)
            prompt = Prompt(id_, category, tuple(found.turns))
            if prompts.setdefault(prompt.id, prompt) is not prompt:
                raise ValueError(f"the id {prompt.id!r} is an earlier row's, must be of one row only")
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="prompts") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = "".join(f"{part}: " for part in first["loc"]) + first["msg"]
        raise BadRequest(f"{path}, {where}: {reason}", field="prompts") from None
    except ValueError as error:
        raise BadRequest(f"{path}, {where}: {error}", field="prompts") from None
    if not prompts:
        raise BadRequest(f"{path} has no prompt", field="prompts")
    return list(prompts.values())


def _rows(text: bytes) -> Iterator[tuple[str, object]]:
    """Yield each row after where it stands: of an array its value, of lines the JSON. Raises ValueError."""
    if text.lstrip().startswith(b"["):
        yield from ((f"entry {number}", row) for number, row in enumerate(_json(text), 1))
    else:
        yield from ((f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _json(text: bytes) -> Any:
    """Return the JSON value of `text`. Raises ValueError if it has none."""
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None


def _asked(conversation: Sequence[object]) -> list[object]:
    """Return what the human says in turn; nothing where someone else begins, or where the human says nothing."""
    said = [one for one in conversation if isinstance(one, dict) and one.get("from") != "system"]
    if not said or said[0].get("from") not in _HUMAN:
        return []
    asked = [one.get("value") for one in said if one.get("from") in _HUMAN]
    return [] if any(isinstance(one, str) and not one.strip() for one in asked) else asked


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, the categories in turn, in the order of their first rows."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in turns if prompt is not None]
