"""Make grammars for the option `grammar`, which constrains an output: JSON, a regular expression, one of some texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.errors import BadRequest

_OPTIONS = "x-guidance"
"""Key of a schema in which llguidance takes options."""
COMMA, COLON = ", ?", ": ?"
"""Separators of a JSON text, as regular expressions: with a space at most. There is no white space elsewhere, of which
weak models would write more and more."""
_SEPARATORS = {"whitespace_flexible": False, "item_separator": COMMA, "key_separator": COLON}


def json_schema(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
    """Return the grammar of JSON texts that a schema accepts, with properties in the schema's order.

    lenient: ignore keywords that cannot be followed; otherwise they are refused when the request is made.
    Raises BadRequest for what is no schema.
    """
    return f"start: {embedded_schema(schema, lenient=lenient)}"


def json_object() -> str:
    """Return the grammar of all JSON objects."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches in whole, in the syntax of Rust's `regex`."""
    return f"start: {embedded_regex(pattern)}"


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of some texts. Raises BadRequest if there is none, or if one is empty."""
    return f"start: CHOICE\nCHOICE: {choice_expression(texts)}"


def gbnf(grammar: str) -> str:
    """Return the grammar of llama.cpp's notation (GBNF); one in Lark's is returned as it is.

    Raises BadRequest for one that cannot be read.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:
        raise BadRequest(f"the grammar cannot be read: {str(error)[:200]}", field="grammar") from error


def embedded_schema(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
    """Return what stands for a schema in the text of a grammar. Raises BadRequest as `json_schema` does."""
    if schema is False:
        return "%json false"  # refused as such, lenient or not
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest("the JSON schema must be an object, or true or false", field="json_schema")
    try:
        return f"%json {json.dumps({**schema, _OPTIONS: {**_SEPARATORS, 'lenient': lenient}}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the JSON schema is no JSON: {error}", field="json_schema") from error


def choice_expression(texts: Sequence[str]) -> str:
    """Return what stands for one of some texts in the text of a grammar. Raises BadRequest as `choice` does."""
    listed = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not listed or not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest("choice must be a list of texts, at least one and none of them empty", field="choice")
    return " | ".join(map(quoted, texts))


def embedded_regex(pattern: str) -> str:
    """Return what stands for a regular expression in the text of a grammar."""
    # A slash would end it, and a line's end cannot stand in it.
    escaped = re.sub(r"(?s)\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def quoted(text: str) -> str:
    """Return what stands for a text in the text of a grammar."""
    return json.dumps(text)
