"""Test that answers follow their grammar in the format of each family of models, with markers as tokens and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from small_pair import TOKENIZER

from edge_agent.http.answer_grammar import chat_grammar, text_grammar
from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.parsing.reader import Delta
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest
from outrider.core.constraint import Grammars, grammars_of

VOCABULARY, EOS = 8192, 0
MARKERS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<arg_value>",
        "</arg_value>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
    ),
    "｜DSML｜",
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
AT = '{"city": "Köln"}'
CALLS: dict[str, tuple[str, str, str]] = {
    "hermes": (
        "<think></think>",
        f'<tool_call>\n{{"name": "weather", "arguments": {AT}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3": ("", f'{{"name": "weather", "parameters": {AT}}}', '; {"name": "now", "parameters": {}}'),
    "json": ("", f'{{"name": "weather", "arguments": {AT}}}', ""),
    "mistral": ("", f'[TOOL_CALLS][{{"name": "weather", "arguments": {AT}}}]', ""),
    "mistral with names": ("[ARGS]", f"[TOOL_CALLS]weather[ARGS]{AT}", "[TOOL_CALLS]now[ARGS]{}"),
    "deepseek": (
        "```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{AT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "deepseek with bare arguments": (
        "<think></think>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{AT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "qwen3-coder": (
        "<think></think>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm": (
        "",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>",
        "\n<tool_call>now\n</tool_call>",
    ),
    "minimax": (
        "<think></think>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "",
    ),
    "gemma": (
        "<|tool_call>",
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
    ),
    "deepseek with marks around parameters": (
        "function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
    ),
    "harmony": ("", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{AT}", ""),
}
"""format -> what the template's source has, a call, and what makes two of it ("" where one is all that is tried)"""
BARE = ("json", "llama3")
"""Formats in which text that begins with a brace is a call."""
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def plain() -> tuple[Grammars, Mapping[str, int]]:
    """Return a tokenizer to which all markers are text."""
    return grammars_of(TOKENIZER, VOCABULARY, (EOS,)), {}


@pytest.fixture(scope="module")
def marked() -> tuple[Grammars, Mapping[str, int]]:
    """Return a tokenizer to which all markers are tokens of their own."""
    data, ids = json.loads(TOKENIZER.read_text()), {}
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for at, text in enumerate(MARKERS, start=VOCABULARY):
        data["added_tokens"].append({"id": at, "content": text, **rest})
        ids[text] = at
    return Grammars(json.dumps(data), VOCABULARY + len(MARKERS), (EOS,)), ids


def accepts(known: tuple[Grammars, Mapping[str, int]], grammar: str, text: str) -> bool:
    """Return whether a grammar accepts a text, written in markers and single bytes but for what it forces."""
    grammars, special = known
    state, left = grammars.begin(grammar), text
    while left:
        marker = next((one for one in special if left.startswith(one)), None)
        pieces = [special[marker]] if marker else _bytes(grammars, left[0])
        for token in pieces:
            if not state._matcher.validate_tokens([token]):
                return False
            state.commit([token])
        left = left[len(marker or left[0]) :]
    state.check()
    return state._matcher.is_accepting()


def _bytes(grammars: Grammars, letter: str) -> list[int]:
    decode = grammars.tokenizer.decode_bytes
    return [next(i for i in range(300) if decode([i]) == bytes([byte])) for byte in letter.encode()]


def grammar_of(
    name: str, template: str, special: Mapping[str, int], prompt: str = "", **wishes: Any
) -> tuple[str, AnswerFormat]:
    form = AnswerFormat.of(template, name.split()[0])
    body = ChatCompletionRequest(messages=[], **{"tools": TOOLS, **wishes})
    return chat_grammar(body, form, special, prompt)[0], form


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_calls_follow_their_schemas(request: pytest.FixtureRequest, name: str, kind: str) -> None:
    known = request.getfixturevalue(kind)
    template, call, more = CALLS[name]
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    wrong, json_text, free = call.replace("city", "town"), final + '{"a": 5}', final + "Hello <b>there</b>.\n"
    for wishes, one, two, other in (
        ({"tool_choice": "required"}, True, True, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, False, False),
        ({"tool_choice": NAMED}, True, False, False),
        ({}, True, True, True),
        ({"parallel_tool_calls": False}, True, False, True),
        ({"response_format": SCHEMA}, True, True, False),
    ):
        grammar, form = grammar_of(name, template, known[1], **wishes)
        assert accepts(known, grammar, call) is one
        assert not accepts(known, grammar, wrong)
        if more:
            assert accepts(known, grammar, call + more) is two
        assert accepts(known, grammar, free) is other
        assert accepts(known, grammar, json_text) is ("response_format" in wishes or (other and name not in BARE))
        assert not accepts(known, grammar, final + '{"b": 5}') or (other and name not in BARE)
        parser = AnswerParser(form, {"weather": WEATHER, "now": None})
        told = read(parser, call)
        assert [delta.name for delta in told if delta.name] == ["weather"]
        assert json.loads("".join(delta.text for delta in told if delta.kind == "tool_call")) == {"city": "Köln"}


def read(parser: AnswerParser, text: str) -> list[Delta]:
    """Return what a whole answer says."""
    parser.feed(text)
    parser.flush()
    return parser.taken()


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_the_grammar_begins_after_the_reasoning(request: pytest.FixtureRequest, kind: str) -> None:
    known = request.getfixturevalue(kind)
    thought = 'hm {"b"\n</think>\n\n'
    begun, _ = grammar_of("hermes", "<think></think>", known[1], "<think>\n", response_format=SCHEMA, tools=[])
    assert accepts(known, begun, thought + '{"a": 5}')
    assert not accepts(known, begun, '{"a": 5}')
    assert not accepts(known, begun, thought + '{"b": 5}')
    free, _ = grammar_of("hermes", "<think></think>", known[1], "</think>\n", response_format=SCHEMA, tools=[])
    assert accepts(known, free, "<think>" + thought + '{"a": 5}')
    assert accepts(known, free, '{"a": 5}')
    assert not accepts(known, free, thought + '{"a": 5}')
    harmony, _ = grammar_of("harmony", "", known[1], response_format=SCHEMA, tools=[])
    if kind == "marked":
        thought = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
        assert not accepts(known, harmony, thought)  # <|end|> is the shipped target's own end here
    assert accepts(known, harmony, '<|channel|>final <|constrain|>json<|message|>{"a": 5}')


@pytest.mark.parametrize(
    ("wish", "good", "bad"),
    [
        ({"structured_outputs": {"regex": "[a-z]+/[0-9]"}}, "ab/1", "ab"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "not"),
        ({"structured_outputs": {"json": NUMBER}}, '{"a": 5}', "{}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]+/'}}, "a12", "a"),
        ({"guided_json": NUMBER}, '{"a": 5}', "{}"),
        ({"response_format": {"type": "json_object"}}, '{"x": [null]}', "[]"),
        ({"response_format": {"type": "json_object", "schema": None}}, '{"x": [null]}', "[]"),
        ({"response_format": SCHEMA}, '{"a":5}', "{}"),
    ],
)
def test_what_an_output_is_to_follow_is_said_in_many_ways(
    plain: tuple[Grammars, Mapping[str, int]], wish: dict[str, Any], good: str, bad: str
) -> None:
    field = next(iter(wish))
    grammar, named = text_grammar(CompletionRequest(prompt="x", **wish))
    assert named == field
    chat, _ = grammar_of("json", "", {}, tools=[], **wish)
    for text in (grammar, chat):
        assert accepts(plain, text, good) and not accepts(plain, text, bad)


LIST = {"type": "object", "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}}}
ITEM = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "accepted"),
    [
        (ITEM, '{"n": 1}', True),
        (ITEM, '{"n": 1, "m": 1}', False),
        ({**LIST, "$defs": {"item": ITEM}}, '{"items": [{"m": 1}]}', False),
        ({**ITEM, "additionalProperties": True}, '{"n": 1, "m": 1}', True),
        ({**ITEM, "required": ["m"]}, '{"m": 1}', True),
        (
            {"allOf": [ITEM, {"type": "object", "properties": {"m": {"type": "integer"}}, "required": ["m"]}]},
            '{"n": 1, "m": 1}',
            True,
        ),
    ],
)
def test_an_object_has_only_the_properties_that_its_schema_lists_unless_it_says_more(
    plain: tuple[Grammars, Mapping[str, int]], schema: dict[str, Any], text: str, accepted: bool
) -> None:
    output = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar, _ = text_grammar(CompletionRequest(prompt="", response_format=output))
    assert accepts(plain, grammar, text) is accepted
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    if "type" in schema:
        grammar, _ = grammar_of("hermes", "", {}, tools=[tool], tool_choice="required")
        call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
        assert accepts(plain, grammar, call) is accepted


FORECAST = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 8},
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "maximum": 9},
        "kind": {"enum": ["now", "later"]},
        "at": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}},
        },
    },
    "required": ["city", "kind"],
    "$defs": {"city": {"type": "string"}},
}
MARKED = {
    "qwen3-coder": (
        "<tool_call>\n<function=forecast>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm": ("<tool_call>forecast\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
}


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"city": "Köln\n<b>", "kind": "now"}, True),
        ({"city": "Köln", "kind": "later", "note": "wet", "days": 3, "at": {"lat": 5.5, "tags": ["a"]}}, True),
        ({"city": "Köln", "kind": "soon"}, False),
        ({"city": "Köln"}, False),
        ({"city": "Köln", "kind": "now", "days": 12}, False),
        ({"city": "Köln", "kind": "now", "note": "far too long"}, False),
        ({"city": "Köln", "kind": "now", "other": "x"}, False),
    ],
)
def test_parameters_between_marks_follow_their_schema_and_are_read_as_what_they_are(
    request: pytest.FixtureRequest, name: str, kind: str, given: dict[str, Any], accepted: bool
) -> None:
    known = request.getfixturevalue(kind)
    tools = [{"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]
    grammar, form = grammar_of(name, "", known[1], tools=tools, tool_choice="required")
    begin, pair, end = MARKED[name]
    text = begin + "".join(pair.format(k, v if isinstance(v, str) else json.dumps(v)) for k, v in given.items()) + end
    assert accepts(known, grammar, text) is accepted
    parser = AnswerParser(form, {"forecast": FORECAST})
    assert json.loads("".join(delta.text for delta in read(parser, text))) == given


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ('{city:<|"|>Köln<|"|>,kind:<|"|>now<|"|>}', True),
        ('{city:<|"|>K<|"|>,kind:<|"|>now<|"|>,days:3,at:{lat:5.5,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}}', True),
        ('{city:<|"|>Köln<|"|>,kind:<|"|>soon<|"|>}', False),
        ('{city:<|"|>Köln<|"|>}', False),
        ('{city:Köln,kind:<|"|>now<|"|>}', False),
        ('{city:<|"|>K<|"|>,kind:<|"|>now<|"|>,at:{lat:<|"|>5<|"|>}}', False),
    ],
)
def test_an_object_with_bare_keys_follows_its_schema(
    request: pytest.FixtureRequest, kind: str, arguments: str, accepted: bool
) -> None:
    known = request.getfixturevalue(kind)
    tools = [{"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]
    grammar, _ = grammar_of("gemma", "<|tool_call>", known[1], tools=tools, tool_choice="required")
    assert accepts(known, grammar, f"<|tool_call>call:forecast{arguments}<tool_call|>") is accepted


HELD = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": r"^[A-Z]{2}/\d+$", "maxLength": 6},
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
        "word": {"type": "string", "pattern": "b|^c"},
        "none": {"anyOf": [{"type": "string", "pattern": "^x+$"}, {"type": "null"}]},
        "kind": {"type": ["string", "null"], "enum": ["now", "later", None]},
        "some": {"type": ["string", "integer"], "pattern": "x"},
        "day": {"type": "string", "format": "date"},
        "long": {"type": "string", "pattern": "(^a|b)", "maxLength": 4096},
    },
}
WRITTEN = {
    "qwen3-coder": ("", "<tool_call>\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"),
    "glm": ("", "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    "minimax": (
        "",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="{}">{}</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "gemma": ("", '<|tool_call>call:f{{{}:<|"|>{}<|"|>}}<tool_call|>'),
    "deepseek": (
        "function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="{}" string="true">{}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
}
"""format -> what the template's source has, and a call of `f` with one argument"""


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_between_marks_has_its_length_and_pattern_and_what_it_is_not_held_to_is_noted(
    request: pytest.FixtureRequest, name: str, kind: str
) -> None:
    known = request.getfixturevalue(kind)
    source, call = WRITTEN[name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": HELD}}]
    body = ChatCompletionRequest(messages=[], tools=tools, tool_choice="required")
    grammar, _ = chat_grammar(body, AnswerFormat.of(source, name), known[1], "")
    right = {"code": ("AB/1", "AB/123"), "name": ("ab", "Köln", "</p"), "word": ("ab", "c", "b\n")}
    wrong = {"code": ("AB/", "AB/1234", "ab/1", "", "xAB/1"), "name": ("a", "Köln ", ""), "word": ("a", "ac", "")}
    right |= {"none": ("x", "xx"), "kind": ("now", "later")}
    wrong |= {"none": ("y", ""), "kind": ("soon", "")}
    null = call.replace('<|"|>', "") if name == "gemma" else call
    assert all(accepts(known, grammar, null.format(key, "null")) for key in ("none", "kind"))
    for key, texts in right.items():
        assert all(accepts(known, grammar, call.format(key, text)) for text in texts), key
    for key, texts in wrong.items():
        assert not any(accepts(known, grammar, call.format(key, text)) for text in texts), key
    ignored = {f"tools: f: {one!r} is ignored in a text between marks" for one in ("pattern", "format", "maxLength")}
    assert set(body.notes) == ignored


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm", "gemma"])
def test_a_function_that_takes_any_object_takes_any_member(
    plain: tuple[Grammars, Mapping[str, int]], name: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    grammar, _ = grammar_of(name, "<|tool_call>", {}, tools=tools, tool_choice="required")
    call = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>',
        "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "gemma": "<|tool_call>call:f{a:[1],b:{c:true}}<tool_call|>",
    }[name]
    assert accepts(plain, grammar, call)


SHORT = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["now", "later"]},
        "at": {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city", "kind"],
}
KINDS = {"city": str, "days": int, "kind": str, "at": dict, "tags": list}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "harmony"])
@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_whatever_the_grammar_lets_a_target_write_is_read_as_a_call_by_the_schema(
    request: pytest.FixtureRequest, name: str, kind: str
) -> None:
    grammars, special = request.getfixturevalue(kind)
    markers, chosen = {token: text for text, token in special.items()}, np.random.default_rng(3)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SHORT}}]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    grammar, form = grammar_of(name, CALLS[name][0].replace("</think>", ""), special, **asked)
    for _ in range(8):
        state, written = grammars.begin(grammar), b""
        while not state._matcher.is_accepting():
            ids = np.flatnonzero(state.mask([]))
            token = int(chosen.choice(ids))
            state.commit([token])
            written += markers[token].encode() if token in markers else grammars.tokenizer.decode_bytes([token])
        said = written.decode(errors="replace")
        parser = AnswerParser(form, {"f": SHORT})
        deltas = read(parser, said)
        assert {delta.kind for delta in deltas} == {"tool_call"} and not parser.unfinished, said
        arguments = json.loads("".join(delta.text for delta in deltas))
        assert {"city", "kind"} <= arguments.keys() and arguments["kind"] in ("now", "later"), said
        assert all(type(value) is KINDS[key] for key, value in arguments.items()), said
