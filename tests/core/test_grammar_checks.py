"""Test that a grammar that would take all time or memory is refused, while usual ones are not."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from small_pair import TOKENIZER

from outrider.core import constraint
from outrider.core.constraint import Grammars, grammars_of
from outrider.core.errors import BadRequest

TEXT = {"type": "string"}
PROPERTIES = {f"p{number}": TEXT for number in range(1_001)}
PATTERNS = [{"pattern": f".*{number}.*"} for number in range(24)]
CHAIN = {f"d{i}": {**one, "$ref": f"#/$defs/d{i + 1}"} for i, one in enumerate(PATTERNS)} | {"d24": TEXT}
REFERENCES = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(2_500)} | {"d2500": TEXT}
TERMINALS = ("T{next} T{next}", 'T{next} | "b{this}"')


def nested(patterns: list[dict[str, str]]) -> dict[str, Any]:
    return {**patterns[0], "anyOf": [nested(patterns[1:])]} if len(patterns) > 1 else {**patterns[0]}


SCHEMAS: list[Any] = [
    {"items": {"maxItems": 10**9}},
    {"items": {"max\\u0049tems": 10**9}},
    {"type": "array", "minItems": 1e300},
    {"prefixItems": [{"maxItems": 6_000}, {"maxItems": -6_000}, {"maxItems": 6_000}]},
    {"multipleOf": 10**400},
    {"allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17)]},
    {"allOf": PATTERNS},
    {"allOf": [{"properties": {"a": one}} for one in PATTERNS]},
    {"$defs": CHAIN, "$ref": "#/$defs/d0"},
    nested(PATTERNS),
]
ASKING_TOO_MUCH = [
    *(f"start: %json {json.dumps(schema)}".replace("\\\\u", "\\u") for schema in SCHEMAS),
    'start: "a" %json {"maxItems": ' + 5_000 * "9" + "}",
    *("%json {" * 18_000, '%json ["' * 16_000),
    *(
        "\n".join(["start: T0", *(f"T{i}: {body.format(this=i, next=i + 1)}" for i in range(1_000)), 'T1000: "a"'])
        for body in TERMINALS
    ),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(TOKENIZER, 8192, (0,))


@pytest.mark.parametrize("grammar", ASKING_TOO_MUCH, ids=range(len(ASKING_TOO_MUCH)))
def test_a_grammar_that_asks_for_too_much_is_refused_before_it_is_compiled(grammars: Grammars, grammar: str) -> None:
    begun = time.thread_time()
    with pytest.raises(BadRequest, match="the grammar is refused") as caught:
        grammars.compile(grammar)
    assert caught.value.field == "grammar" and time.thread_time() - begun < 1


def test_compiling_without_end_is_given_up_and_holds_nobody_up(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(constraint, "COMPILE_S", 0.01)
    with pytest.raises(BadRequest, match="longer than"):
        constraint._with_deep_stack(ended.wait)
    monkeypatch.undo()
    grammars.compile('start: "a neighbour"')
    ended.set()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": TEXT, "maxItems": 1_000},
        {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES][:900], "additionalProperties": False},
        {"enum": [f"v{number}" for number in range(2_000)]},
        {"prefixItems": [{"multipleOf": 0.01}, {"multipleOf": 60}, {"multipleOf": 25}]},
        {"properties": {"maxItems": {"const": {"maxItems": 10}}, "enum": TEXT}, "examples": [{"maxItems": 10}]},
        {"properties": {f"p{i}": one for i, one in enumerate(PATTERNS)}},
        {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
        {"$defs": REFERENCES, "$ref": "#/$defs/d0"},  # overflows a usual stack
    ],
)
def test_usual_schemas_are_compiled(grammars: Grammars, schema: Any) -> None:
    grammars.compile(f"start: %json {json.dumps(schema)}")
