"""Test that what a compiler would be busy with for long is refused before, and that refusals name their place."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.core.constraint import Grammars, grammars_of
from outrider.core.errors import BadRequest

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
TEXT = {"type": "string"}
PROPERTIES = {f"p{number}": TEXT for number in range(1_001)}
PATTERNS = [{"pattern": f".*{number}.*"} for number in range(24)]
CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(2_500)}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(TOKENIZER, 8192, (0,))


def refusal(grammars: Grammars, grammar: str) -> str:
    with pytest.raises(BadRequest) as caught:
        grammars.compile(grammar)
    assert caught.value.field == "grammar"
    return str(caught.value)


def processor_s(call: Callable[[], object]) -> float:
    """Return the least processor time of three calls, in all threads: those of earlier tests may take some of it."""
    took = []
    for _ in range(3):
        begun = time.process_time()
        call()
        took.append(time.process_time() - begun)
    return min(took)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"maxItems": 10**9}}, '"maxItems" at #/items asks for too much'),
        ({"type": "array", "minItems": 1e300}, '"minItems" at # asks for too much'),
        ({"prefixItems": [{"maxItems": 6_000}, {"maxItems": 6_000}]}, '"maxItems" at #/prefixItems/1'),
        ({"$defs": {"a/b~": {"multipleOf": 99_991}}, "$ref": "#/$defs/a~1b~0"}, '"multipleOf" at #/$defs/a~1b~0'),
        ({"allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17)]}, '"multipleOf" at #/allOf/3'),
        ({"anyOf": [{"multipleOf": 0.12347}]}, '"multipleOf" at #/anyOf/0'),
        ({"properties": PROPERTIES}, '"properties" at # asks for too much'),
        ({"items": {"anyOf": [TEXT] * 1_001}}, '"anyOf" at #/items asks for too much'),
        ({"enum": [[number] for number in range(1_001)]}, '"enum" at # asks for too much'),
        ({"allOf": PATTERNS}, '"allOf" at # asks for too much'),
        ({"allOf": [{"properties": {"a": one}} for one in PATTERNS]}, '"allOf" at # asks for too much'),
        (
            {"$defs": {f"d{i}": {**one, "$ref": f"#/$defs/d{i + 1}"} for i, one in enumerate(PATTERNS)}},
            '"$ref" at #/$defs/d0 asks for too much',
        ),
        (
            {"$defs": {f"d{i}": {"pattern": "a", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2_000)}},
            "shorter chains of references",
        ),
    ],
)
def test_a_schema_that_asks_for_too_much_is_refused_at_once(grammars: Grammars, schema: Any, place: str) -> None:
    grammar = f"start: %json {json.dumps(schema)}"
    assert place in refusal(grammars, grammar)
    assert processor_s(lambda: refusal(grammars, grammar)) < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": TEXT, "maxItems": 1_000},
        {"type": "object", "properties": dict(list(PROPERTIES.items())[:200])},
        {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES][:900], "additionalProperties": False},
        {"enum": [f"v{number}" for number in range(2_000)]},
        {"prefixItems": [{"multipleOf": 0.01}, {"multipleOf": 60}, {"multipleOf": 25}]},
        {"properties": {"maxItems": {"const": {"maxItems": 10**9}}, "enum": TEXT}, "examples": [{"maxItems": 10**9}]},
        {"properties": {f"p{i}": one for i, one in enumerate(PATTERNS)}, "allOf": [TEXT, {"maxLength": 8}]},
        {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
    ],
)
def test_usual_schemas_are_not(grammars: Grammars, schema: Any) -> None:
    grammars.compile(f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize("body", ["T{next} T{next}", 'T{next} | "b{this}"'])
def test_long_chains_of_terminals_are_refused_at_once(grammars: Grammars, body: str) -> None:
    rules = [f"T{i}: {body.format(this=i, next=i + 1)}" for i in range(1_000)]
    grammar = "\n".join(["start: T0", *rules, 'T1000: "a"'])
    assert "the terminal T999 asks for too much" in refusal(grammars, grammar)
    assert processor_s(lambda: refusal(grammars, grammar)) < 1
    grammars.compile("\n".join(["start: T995", *rules[995:], 'T1000: "a"']))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /" + "\\/" * 65_000,
        '"' * 131_000,
        "a" * 131_000,
        "a" + " " * 131_000 + "b",
        "a [" * 43_000,
        "%json {" * 18_000,
        '%json ["' * 16_000,
        "_" * 131_000,
        'start: %json {"maxItems": ' + 5_000 * "9" + "}",
    ],
)
def test_no_text_takes_long_to_look_into(grammars: Grammars, grammar: str) -> None:
    assert processor_s(lambda: refusal(grammars, grammar)) < 1


def test_a_long_chain_of_references_does_not_overflow_the_stack() -> None:
    """An overflow would end the process, so this one is another."""
    program = f"""
import pathlib, threading
from outrider.core.constraint import grammars_of
grammars = grammars_of(pathlib.Path({str(TOKENIZER)!r}), 8192, (0,))
grammar = {f"start: %json {json.dumps({'$defs': {**CHAIN, 'd2500': TEXT}, '$ref': '#/$defs/d0'})}"!r}
thread = threading.Thread(target=lambda: print(grammars.compile(grammar)))
thread.start()
thread.join()
print(threading.stack_size())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "None\n0\n"), done.stderr


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"x": {"items": {"not": {}}}}}, '"not" at #/properties/x/items: Unimplemented keys: ["not"]'),
        ({"properties": {"not": {"if": {}, "then": {}}}}, '"if" at #/properties/not: Unimplemented keys'),
        ({"anyOf": [TEXT, {"type": "objekt"}]}, '"type" at #/anyOf/1: Invalid type: objekt'),
        ({"items": {"format": "iri"}}, '"format" at #/items: Unknown format: iri'),
        ({"items": {"$ref": "http://localhost/x"}}, '"$ref" at #/items: Resource'),
        ({"properties": {"b": {"$ref": "#/$defs/x"}}}, '"$ref" at #/properties/b: Pointer'),
        ({"properties": {"a": {"pattern": "b"}, "c": {"pattern": "x(?=a)b"}}}, '"pattern" at #/properties/c: regex'),
        ({"items": {"minimum": -1e300}}, '"minimum" at #/items: Failed'),
        ({"allOf": [{"oneOf": [TEXT, {"minLength": 2}]}]}, '"oneOf" at #/allOf/0: oneOf constraints'),
        ({"items": {"maxLength": 2.5}}, "\"maxLength\" at #/items: Expected positive integer for 'maxLength'"),
        ({"allOf": [TEXT, False]}, "false at #/allOf/1: Unsatisfiable"),
        ({"type": "array", "items": {"enum": []}, "minItems": 1}, '"items" at #: Unsatisfiable'),
        ({"enum": []}, '"enum" at #: Unsatisfiable'),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, '"$ref" at #: '),
        (False, "false at #: Unsatisfiable"),
    ],
)
def test_a_refusal_names_keyword_and_place(grammars: Grammars, schema: Any, place: str) -> None:
    assert f"the grammar is refused: {place}" in refusal(
        grammars, f'start: %json {{"type": "null"}} %json {json.dumps(schema)}'
    )
