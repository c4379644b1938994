"""Refuse grammars that ask for more than the compiler's own limits bound, before it is asked.

llguidance writes out each item of a list, and follows every combination of patterns that one text has to match; both
take its memory before its limits are looked at. The rest is left to them, and to the time that compiling may take.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from outrider.core.errors import BadRequest

MAX_ITEMS = 10_000
"""Most items of all lists in a schema, by `minItems` and `maxItems`: compiling takes 0.1 ms for each."""
MAX_MULTIPLE = 10_000
"""Largest common multiple of what `multipleOf` asks for in a schema; numbers then have so many remainders."""
MAX_PATTERNS = 12
"""Most different patterns and formats in a schema that combines schemas; time and memory double with each."""
MAX_TERMINALS = 256
"""Most terminals of a grammar; compiling takes time with the cube of their chains."""
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_ASSERTIONS = frozenset(
    {"pattern", "format", "properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
)
_EMBEDDED = re.compile(r"%json\s*(?=[{\[tf])")
_TERMINAL = re.compile(r"^[ \t]*_*[A-Z]\w*[^\S\n]*[:.\[]", re.MULTILINE)


def check_grammar(grammar: str) -> None:
    """Raise BadRequest for a grammar that asks for too much."""
    if len(_TERMINAL.findall(grammar)) > MAX_TERMINALS:
        raise _too_much("the grammar", f"at most {MAX_TERMINALS} terminals")
    decoder, at = json.JSONDecoder(), 0
    while found := _EMBEDDED.search(grammar, at):
        try:
            schema, at = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the grammar is refused: no JSON stands after %json: {error}", field="grammar") from error
        _check_schema(schema)


def _check_schema(schema: Any) -> None:
    """Raise BadRequest for a JSON schema that asks for too much."""
    items, multiple, patterns, combines = 0.0, 1, set[str](), False
    for node in _objects(schema):
        counts = [min(node[key], 2 * MAX_ITEMS) for key in ("minItems", "maxItems") if _is_number(node.get(key))]
        items += max((0, *counts))
        if not items <= MAX_ITEMS:
            raise _too_much('"minItems" or "maxItems"', f"at most {MAX_ITEMS} items in all lists together")
        if _is_number(factor := node.get("multipleOf")) and (exact := Decimal(str(factor))).is_finite():
            multiple = math.lcm(multiple, Fraction(exact).numerator)
        if multiple > MAX_MULTIPLE:
            raise _too_much('"multipleOf"', f"a common multiple of at most {MAX_MULTIPLE}")
        patterns.update(str(node[key]) for key in ("pattern", "format") if key in node)
        several, keys = node.get("allOf"), node.keys()
        combines |= isinstance(several, list) and len(several) > 1
        combines |= len(keys & _APPLICATORS) + (not keys.isdisjoint(_ASSERTIONS)) > 1
    if combines and len(patterns) > MAX_PATTERNS:
        raise _too_much("a schema that combines schemas", f"at most {MAX_PATTERNS} different patterns and formats")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value, whether they are schemas or not."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _too_much(what: str, bound: str) -> BadRequest:
    return BadRequest(f"the grammar is refused: {what} asks for too much, must have {bound}", field="grammar")
