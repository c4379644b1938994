"""Test that answers follow their grammar in the format of each family of models, with markers as tokens and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from small_pair import TOKENIZER

from edge_agent.http.answer_grammar import chat_grammar, text_grammar
from edge_agent.http.parsing.formats import AnswerFormat, AnswerParser
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
    return chat_grammar(body, form, template, special, prompt)[0], form


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
        parser = AnswerParser(form, ["weather", "now"])
        told = [*parser.feed(call), *parser.end()]
        assert [delta.name for delta in told if delta.name] == ["weather"]
        assert json.loads("".join(delta.text for delta in told if delta.kind == "tool_call")) == {"city": "Köln"}


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
