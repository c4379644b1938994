"""Read prompts to measure with, from our own file or from the files of well-known benchmarks.

JSONL, a row each                                              of
{"id", "category", "turns": ["first", "second"]}               our benchmarks/prompts.jsonl
{"question_id", "category", "turns"}                           Spec-Bench, MT-bench (one category, as in Spec-Bench)
{"task_id", "prompt"} or only {"prompt"}                       HumanEval
{"question"}                                                   GSM8K
{"conversations": [{"from": "human", "value": "first"}, ...]}  ShareGPT, also as one JSON array
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from outrider.core.errors import BadRequest, between

MAX_FILE_BYTES = 1 << 30
"""ShareGPT's usual file has 0.7 GB, and is one JSON value."""
MAX_ROW_BYTES = 4 << 20
MAX_TURNS = 256
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""The categories of MT-bench, of ten prompts each, which Spec-Bench reports as one task."""


@dataclass(frozen=True)
class Prompt:
    """Hold what a user asks: the first turn, and what follows each answer to the turn before."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file in any format that this module names; a row without a category has the file's name.

    Conversations in which a human does not speak first are left out. Raises BadRequest, which names the file and the
    line (in an array: the entry), for what cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    try:
        between(f"bytes of {path}", path.stat().st_size, 0, MAX_FILE_BYTES)
        for where, row in _rows(path):
            try:
                prompt = _prompt(row, path.stem, where.rpartition(" ")[2])
                if prompt is not None and prompts.setdefault(prompt.id, prompt) is not prompt:
                    raise ValueError(f"the id {prompt.id!r} is an earlier row's, must be of one row only")
            except ValueError as error:  # a BadRequest is none
                raise BadRequest(f"{path}, {where}: {error}", field="prompts") from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="prompts") from error
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


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each row of the file after where it stands. Raises OSError, and BadRequest for what is no JSON."""
    with path.open("rb") as file:
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_array:
            yield from ((f"entry {number}", row) for number, row in enumerate(_json(file.read(), path, "line 1"), 1))
            return
        for number in range(1, MAX_FILE_BYTES):
            where = f"line {number}"
            line = file.readline(MAX_ROW_BYTES + 1)
            between(f"{path}, {where}: its bytes", len(line), 0, MAX_ROW_BYTES)
            if line.strip():
                yield where, _json(line, path, where)
            elif not line:
                return


def _json(text: bytes, path: Path, where: str) -> Any:
    """Return the JSON value of `text`. Raises BadRequest if it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no UTF-8
        raise BadRequest(f"{path}, {where}: is no JSON ({error})", field="prompts") from None


def _prompt(row: object, name: str, number: str) -> Prompt | None:
    """Return the prompt of a row, or None if no human begins it. Raises ValueError, with a sentence, if it has none.

    name: the category if the row has none, and with the row's number the id if it has none.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is {_shown(row)}, must be a JSON object")
    if "conversations" in row:
        turns = _human_turns(row["conversations"])
        if not turns:
            return None
    else:
        key = next((key for key in ("turns", "prompt", "question") if key in row), None)
        if key is None:
            raise ValueError(f"has only {sorted(row)}, must have `turns`, `prompt`, `question` or `conversations`")
        turns = row[key] if key == "turns" else [row[key]]
    if not isinstance(turns, list) or not 1 <= len(turns) <= MAX_TURNS:
        raise ValueError(f"`turns` is {_shown(turns)}, must be a list of 1 to {MAX_TURNS} texts")
    texts = [turn for turn in turns if _is_text(turn)]
    if len(texts) < len(turns):
        bad = next(turn for turn in turns if not _is_text(turn))
        raise ValueError(f"a turn is {_shown(bad)}, must be a text that is not empty")
    found = next((row[key] for key in ("id", "question_id", "task_id") if key in row), f"{name}-{number}")
    category = row.get("category", name)
    if isinstance(found, bool) or not isinstance(found, str | int) or not _is_text(category):
        raise ValueError(f"has the id {_shown(found)} and the category {_shown(category)}, must be texts")
    if "question_id" in row and category in MT_BENCH:
        category = "mt-bench"
    return Prompt(str(found), category, tuple(texts))


def _human_turns(said: object) -> list[object]:
    """Return what the human says in a conversation of ShareGPT, nothing unless they begin."""
    if not isinstance(said, list) or not all(isinstance(part, dict) for part in said):
        raise ValueError(f"`conversations` is {_shown(said)}, must be a list of objects with `from` and `value`")
    spoken = [part for part in said if part.get("from") != "system"][:MAX_TURNS]
    if not spoken or spoken[0].get("from") not in ("human", "user"):
        return []
    return [part.get("value") for part in spoken if part.get("from") in ("human", "user")]


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether this is a text that can be encoded; JSON can write half a surrogate pair, which cannot."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= char <= "\udfff" for char in value)


def _shown(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
