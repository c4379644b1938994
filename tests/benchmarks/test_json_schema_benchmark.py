"""Test the comparison with the JSON Schema test suite on cases of its shape, and that it finds a wrong grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import json_schema
from benchmarks.json_schema import Case, Judge, Judged, judge, judge_all, names_place, writings
from edge_agent.sdk import grammars
from outrider.core.errors import BadRequest

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
PAIR = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def instance(data: Any, valid: bool) -> dict[str, Any]:
    return {"description": f"{data}", "data": data, "valid": valid}


CASES = {
    "properties.json": (PAIR, [instance({"b": "x", "a": 1}, True), instance({"b": "x"}, False), instance([2], True)]),
    "const.json": ({"const": 1}, [instance(1, True), instance(1.0, True), instance(True, False)]),
    "additional.json": (
        {"type": "object", "properties": {"a": {"type": "null"}}},
        [instance({"a": None, "c": 3}, True), instance({"a": 3}, False)],
    ),
    "format.json": ({"format": "ipv4"}, [instance("1.2.3.4", True), instance("x", True)]),
    "not.json": ({"items": {"not": {"type": "string"}}}, [instance([1], True), instance(["x"], False)]),
    "false.json": (False, [instance(None, False)]),
    "optional/date.json": ({"format": "date"}, [instance("2021-02-28", True), instance("2021-02-29", False)]),
}
"""File -> its schema and instances."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for file, (schema, tests) in CASES.items():
        path = tmp_path / "tests" / "draft2020-12" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([{"description": "a case", "schema": schema, "tests": tests}]))
    return tmp_path


@pytest.fixture(scope="module")
def ask() -> Judge:
    return Judge(TOKENIZER.read_text())


def case(file: str, schema: Any, *tests: dict[str, Any]) -> Case:
    return Case("draft2020-12", file, "a case", schema, tests)


def test_each_case_is_counted_by_what_became_of_it(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_schema.main(["--smoke", "--suite", str(suite)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["schemas"], last["followed"], last["refused"], last["unnamed"]) == (6, 4, 2, 0)
    assert (last["right"], last["wrong"], last["not_written"]) == (8, 0, 2)
    assert last["reasons"] == {"number form": 1, "format": 1}
    assert (last["optional"]["right"], last["optional"]["wrong"]) == (1, 1)
    assert (last["lenient"]["followed"], last["lenient"]["refused"], last["lenient"]["wrong"]) == (5, 1, 0)
    assert last["closed"]["reasons"] == {"number form": 1, "format": 1, "extra properties": 1}
    assert last["slowest_compile_ms"] > 0 and last["memory_mib"] >= 0


def test_a_grammar_that_admits_too_much_is_wrong(ask: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    """The grammar is that of a looser schema, as if a keyword were ignored."""
    one = case("required.json", PAIR, instance({"a": 1, "b": "x"}, True), instance({"b": "x"}, False))
    judged = Judged()
    assert judge(one, grammars.json_schema({"properties": PAIR["properties"]}), judged, ask)
    assert (judged.right, judged.wrong) == (1, 1)
    assert "WRONG strict draft2020-12/required.json: a case: {'b': 'x'}" in capsys.readouterr().out


def test_a_run_that_finds_something_wrong_fails(
    suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(json_schema.grammars, "json_schema", lambda *_, **__: "start: %json {}")
    with pytest.raises(SystemExit, match="invalid instances that a grammar admits, strict: 5, wanted 0, NOT MET"):
        json_schema.main(["--smoke", "--suite", str(suite)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] == 5


def test_a_refusal_without_its_place_is_counted(ask: Judge) -> None:
    judged = Judged()
    assert not judge(case("not.json", {"not": {}}), 'start: %json {"if": {}}', judged, ask)
    assert (judged.refused, judged.unnamed) == (1, 1)
    schema = {"properties": {"a/b": {"not": {}}}, "allOf": [{}, False]}
    assert names_place('refused: "not" at #/properties/a~1b: Unimplemented', schema)
    assert names_place("refused: false at #/allOf/1: no", schema)
    for wrong in ('"not" at #: no', '"not" at #/properties/a: no', "false at #/allOf/0", '"not" is unknown'):
        assert not names_place(wrong, schema)


def test_an_instance_is_written_in_every_order_of_its_properties() -> None:
    assert [*writings({"a": [1, {"b": "é", "c": None}]})] == [
        '{"a": [1, {"b": "é", "c": null}]}',
        '{"a":[1,{"b":"é","c":null}]}',
        '{"a": [1, {"c": null, "b": "é"}]}',
        '{"a":[1,{"c":null,"b":"é"}]}',
    ]
    assert len([*writings({str(i): i for i in range(30)})]) == json_schema.MOST_WRITINGS


def test_what_the_strict_grammar_refuses_is_not_judged_when_keywords_are_ignored(ask: Judge) -> None:
    found = judge_all([case("not.json", {"not": {"type": "string"}}, instance("x", False))], ask)
    assert (found["strict"].refused, found["lenient"].followed, found["lenient"].wrong) == (1, 1, 0)


def test_a_folder_without_the_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="must be a checkout of JSON-Schema-Test-Suite with tests/draft2020-12"):
        json_schema.cases_of(tmp_path, ["draft2020-12"])
