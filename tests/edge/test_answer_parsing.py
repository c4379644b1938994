"""Test that an answer's text becomes content, reasoning and tool calls, however the stream splits it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import TOOL_FORMATS, AnswerFormat, ToolFormat
from edge_agent.http.parsing.reader import Delta

TOOLS = ("weather", "add")
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/count"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "rain": {"type": ["boolean", "null"]},
            "at": {"type": "object"},
            "p": {"type": "number"},
            "kind": {"enum": ["1", "two"]},
            "cities": {"type": "array"},
        },
        "$defs": {"count": {"type": "integer"}},
    }
}
THINK = ("<think>", "</think>")
Parsed = tuple[list[tuple[str, int, str, str]], bool]
"""(kind, index of the call, function's name, text) of each run of deltas, and whether the last call is unfinished."""


def parsed(
    tools: ToolFormat | None,
    pieces: Iterable[str],
    *,
    reasoning: tuple[str, str] | None = THINK,
    names: Sequence[str] = TOOLS,
    prompt: str = "",
    stops: Sequence[str] = (),
) -> Parsed:
    parser = AnswerParser(AnswerFormat(tools, reasoning), {name: SCHEMAS.get(name) for name in names}, prompt, stops)
    runs = list[tuple[str, int, str, str]]()

    def add(deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.text or delta.name
            if runs and runs[-1][:2] == (delta.kind, delta.index) and not delta.name:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + delta.text)
            else:
                assert bool(delta.name) == (delta.kind == "tool_call")
                runs.append((delta.kind, delta.index, delta.name, delta.text))

    for piece in pieces:
        assert parser.feed(piece) == piece
        add(parser.taken())
    assert parser.flush() == ""
    add(parser.taken())
    return runs, parser.unfinished


def content(text: str) -> tuple[str, int, str, str]:
    return "content", 0, "", text


def reasoned(text: str) -> tuple[str, int, str, str]:
    return "reasoning", 0, "", text


def called(index: int, name: str, arguments: str) -> tuple[str, int, str, str]:
    return "tool_call", index, name, arguments


WEATHER = '{"city": "Köln }\\" </tool_call>", "days": [1, 2]}'
CALL = f'{{"name": "weather", "arguments": {WEATHER}}}'
ADD = '{"name": "add", "parameters": {}}'
BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
QWEN3_CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nKöln "}\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>\n</tool_call>"
)
ADDED = "\n<tool_call>\n<function=add>\n</function>\n</tool_call>"
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Köln</parameter>\n<parameter name="days">3</parameter>\n</invoke>'
)
DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
COLOGNE = [called(0, "weather", '{"city": "Köln", "days": 3}'), called(1, "add", "{}")]
BOTH = [called(0, "weather", WEATHER), called(1, "add", "{}")]
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        ("hermes", f"<think>\nhm\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
         [reasoned("hm\n"), *BOTH]),
        ("hermes", f'Wait. <tool_call>{{"arguments": {WEATHER}, "name": "weather"}}</tool_call> So.',
         [content("Wait. "), BOTH[0], content("So.")]),
        ("llama3", f"{CALL}; {ADD}", BOTH),
        ("llama3", f"Let me see.<|python_tag|>{CALL}", [content("Let me see."), BOTH[0]]),
        ("llama3", f'{{"type": "function", {CALL[1:]}', BOTH[:1]),
        ("mistral", f"Hm.[TOOL_CALLS] [{CALL}, {ADD}]", [content("Hm."), *BOTH]),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{{}}", BOTH),
        ("mistral", f"[TOOL_CALLS]weather{WEATHER}", BOTH[:1]),
        ("deepseek", f"{ALL}{BEGIN}function{SEPARATOR}weather\n```json\n{WEATHER}\n```{END}\n{BEGIN}function{SEPARATOR}"
         f"add\n```json\n{{}}\n```{END}{ALL_END}", BOTH),
        ("deepseek", f"<think>x</think>Hm.{ALL}{BEGIN}weather{SEPARATOR}{WEATHER}{END}{BEGIN}add{SEPARATOR}{{}}{END}"
         f"{ALL_END}", [reasoned("x"), content("Hm."), *BOTH]),
        ("harmony", "<|channel|>analysis<|message|>so <b>...<|end|><|start|>assistant<|channel|>commentary<|message|>"
         "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
         f"{WEATHER}<|call|>", [reasoned("so <b>..."), content("I look it up."), BOTH[0]]),
        ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{WEATHER}<|call|>", BOTH[:1]),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Yes.<|return|>",
         [reasoned("Hm."), content("Yes.")]),
        ("json", f"\n[{CALL}, {ADD}]\n", BOTH),
        *((name, f"[{CALL}, {ADD}]", BOTH) for name in ("hermes", "llama3", "mistral", "deepseek")),
        ("qwen3-coder", f"Hm.\n{QWEN3_CODER}{ADDED}",
         [content("Hm.\n"), called(0, "weather", '{"city": "Köln \\"}\\n", "days": 3}'), called(1, "add", "{}")]),
        ("qwen3-coder", QWEN3_CODER[len("<tool_call>\n"):].replace("\n</parameter>", "</parameter>"),
         [called(0, "weather", '{"city": "Köln \\"}", "days": 3}')]),
        ("qwen3-coder", QWEN3_CODER.replace("\n</parameter>", "") + ADDED,
         [called(0, "weather", '{"city": "Köln \\"}\\n", "days": 3}'), called(1, "add", "{}")]),
        ("qwen3-coder", QWEN3_CODER.replace("</function>", "<parameter=city>\nUlm\n</parameter>\n</function>") + ADDED,
         [called(0, "weather", '{"city": "Köln \\"}\\n", "days": 3}'), called(1, "add", "{}")]),
        ("hermes", GLM, COLOGNE[:1]),
        ("glm", GLM.replace("</arg_value>", ""), COLOGNE[:1]),
        ("glm", f"<think>x</think>{GLM}\n<tool_call>add\n</tool_call>", [reasoned("x"), *COLOGNE]),
        ("glm", GLM.replace("\n", ""), COLOGNE[:1]),
        ("minimax", f'<minimax:tool_call>\n{INVOKE}\n<invoke name="add">\n</invoke>\n</minimax:tool_call>', COLOGNE),
        ("minimax", INVOKE, COLOGNE[:1]),
        *((
            "deepseek",
            f"Hm.<｜DSML｜{name}>\n{DSML}\n</｜DSML｜{name}>",
            [content("Hm."), called(0, "weather", '{"city": "3", "days": 3}')],
        ) for name in ("function_calls", "tool_calls")),
        ("gemma", 'Hm.<|tool_call>call:weather{city:<|"|>K{ö"ln<|"|>,days:3,at:{x:[1,true,<|"|>b<|"|>]}}<tool_call|>'
         "<|tool_call>call:add{}<tool_call|>",
         [content("Hm."), called(0, "weather", '{"city": "K{ö\\"ln", "days": 3, "at": {"x": [1, true, "b"]}}'),
          called(1, "add", "{}")]),
        ("gemma", "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>",
         COLOGNE[:1]),
        ("hermes", f"<tool_call>\n{{{CALL}}}\n</tool_call>", BOTH[:1]),
        ("json", CALL, BOTH[:1]),
        ("json", '{"name": "add", "arguments": null}', [called(0, "add", "{}")]),
        ("json", '{"name": "add", "arguments": "{\\"a\\": 1}"}', [called(0, "add", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_calls_of_each_family_are_recognised(
    tools: ToolFormat, text: str, expected: list[tuple[str, int, str, str]]
) -> None:
    assert parsed(tools, [text]) == (expected, False)
    assert parsed(tools, text) == (expected, False)  # letter by letter


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "a <tool_call> tag, <tool_cal and </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "{"x" * 200}", "arguments": {{}}}}'),
        ("hermes", f"<tool_call>{' ' * 1000}{CALL}"),
        ("hermes", "<tool_call>nobody</tool_call> <function=add or <tool_call>add, then"),
        ("glm", "<tool_call>weather is a tool</tool_call>"),
        ("minimax", '<invoke name="weather"> runs it'),
        ("gemma", "<|tool_call>call: nobody"),
        ("llama3", '{"name": "Bob", "parameters": {}} and <|python_tag|>print(1)'),
        ("mistral", "[TOOL_CALLS] of [TOOL_CALLS][1, 2] and [TOOL"),
        ("deepseek", f"{ALL}{BEGIN}function{SEPARATOR}add\n```python\n"),
        ("harmony", "Hello <|end|> <|start|> <|message|>x"),
        ("json", '{"name": "Bob", "age": 3}'),
        ("json", '{"name": "nobody", "arguments": {}}'),
        ("json", '{"name": "\\ud800", "arguments": {}}'),
    ],
)
def test_what_only_looks_like_a_call_is_content(tools: ToolFormat, text: str) -> None:
    assert parsed(tools, [text]) == parsed(tools, text) == ([content(text)], False)


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ', [called(0, "add", '{"a": ')]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "', [called(0, "add", '{"a": "')]),
        ("deepseek", f"{ALL}{BEGIN}add{SEPARATOR}{{", [called(0, "add", "{")]),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{", [called(0, "add", "{")]),
        ("qwen3-coder", QWEN3_CODER[:QWEN3_CODER.index('ln "')], [called(0, "weather", '{"city": "Kö')]),
        ("glm", GLM[:GLM.index("3</arg")], [called(0, "weather", '{"city": "Köln", "days": ')]),
        ("minimax", INVOKE[:INVOKE.index("ameter name=\"days")], [called(0, "weather", '{"city": "Köln"')]),
        ("gemma", '<|tool_call>call:weather{city:<|"|>Köln<|', [called(0, "weather", '{"city": "Köln<|')]),
        ("json", f'{CALL}, {{"name": "add", "arguments": {{"a"', [BOTH[0], called(1, "add", '{"a"')]),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_is_reported_as_unfinished(
    tools: ToolFormat, text: str, expected: list[tuple[str, int, str, str]]
) -> None:
    assert parsed(tools, [text]) == parsed(tools, text) == (expected, True)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", '"Ulm"', '"Ulm"'),
        ("city", " two\nlines\n", " two\nlines\n"),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("days", "3.5", "3.5"),
        ("days", "3.0", 3),
        ("p", "0.5", 0.5),
        ("p", "3", 3),
        ("p", "NaN", "NaN"),
        ("note", "null", None),
        ("note", "3", "3"),
        ("rain", "true", True),
        ("rain", "False", False),
        ("rain", "None", None),
        ("at", '{"x": [1, {"y": null}]}', {"x": [1, {"y": None}]}),
        ("at", "[1]", "[1]"),
        ("at", "{'x': [True, None, 'it\\'s']}", {"x": [True, None, "it's"]}),
        ("at", "{1, 2}", "{1, 2}"),
        ("cities", "['Köln', 1.5]", ["Köln", 1.5]),
        ("cities", "[Köln]", "[Köln]"),
        ("kind", "1", "1"),
        ("unknown", "3", 3),
        ("unknown", "x", "x"),
    ],
)
@pytest.mark.parametrize(
    ("tools", "written"),
    [
        ("qwen3-coder", "<function=weather>\n<parameter={}>\n{}\n</parameter>\n</function>"),
        ("glm", "<tool_call>weather\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("minimax", '<invoke name="weather">\n<parameter name="{}">{}</parameter>\n</invoke>'),
    ],
)
def test_a_value_has_the_type_that_the_schema_gives_it(
    tools: ToolFormat, written: str, key: str, text: str, value: object
) -> None:
    (run,), unfinished = parsed(tools, [written.format(key, text)])
    assert json.loads(run[3]) == {key: value} and not unfinished


THOUGHT = "<think>\nI think four.\n\nYes.\n</think>\n\n"


def test_a_stop_counts_once_so_many_tokens_have_come() -> None:
    parser = AnswerParser(AnswerFormat(None, THINK), stops=["one"], min_tokens=7)
    for token in ("<think>", "one", "</think>", "one", " and", " one", " and", " one", " more"):
        parser.feed(token)
    assert parser.hit and [one.text for one in parser.taken()] == ["one", "one and one and "]


@pytest.mark.parametrize("stop", ["four", "\n\n", "think", "</think>", "Köln", "arguments", ". M", "More.x"])
def test_a_stop_is_looked_for_in_the_content_alone(stop: str) -> None:
    text = f"{THOUGHT}It is 4, four. More.<tool_call>\n{CALL}\n</tool_call>"
    said = "It is 4, four. More."
    rest = [content(said.split(stop)[0]), *(BOTH[:1] if stop not in said else [])]
    expected = [reasoned("I think four.\n\nYes.\n"), *rest], False
    assert parsed("hermes", [text], stops=[stop]) == parsed("hermes", text, stops=[stop]) == expected


def test_text_is_passed_on_at_once_unless_it_may_begin_a_marker() -> None:
    parser = AnswerParser(AnswerFormat("hermes", THINK), dict.fromkeys(TOOLS))

    def read(text: str) -> list[Delta]:
        parser.feed(text)
        return parser.taken()

    assert read("Hello <") == [Delta("content", "Hello ")]
    assert read("b> <tool") == [Delta("content", "<b> ")]
    assert read("s> x") == [Delta("content", "<tools> x")]
    assert read('<tool_call>{"name": "add", "arguments": {"a') == [Delta("tool_call", '{"a', 0, "add")]
    assert read('": 1') == [Delta("tool_call", '": 1', 0)]
    assert read("}}</tool_call>") == [Delta("tool_call", "}", 0)]
    parser.flush()
    assert parser.taken() == []
    parser = AnswerParser(AnswerFormat("json", None), dict.fromkeys(TOOLS))
    assert read('{"name": "add"') == []
    assert read(', "a') == []
    assert read("b") == [Delta("content", '{"name": "add", "ab')]


PARTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(ALL, BEGIN, SEPARATOR, END, ALL_END, "```json", "```", "<|start|>assistant", "<|channel|>", "<|message|>"),
    *(
        "<|constrain|>json",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "analysis",
        "commentary",
        "final",
        " to=functions.add ",
    ),
    *(CALL, ADD, WEATHER, "{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "add", "weather", "function", "id9"),
    *("<function=", "weather>", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="city', "call:add{"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<escape>", QWEN3_CODER, GLM, INVOKE, DSML),
    *('"name": "add"', '"arguments": ', '"parameters": {', '"type": "function"', "null", "é🙂", "\u2581", "<", "｜"),
]
TEXTS = st.lists(
    st.sampled_from(PARTS)
    | st.builds(lambda part, cut: part[:cut], st.sampled_from(PARTS), st.integers(1, 20))
    | st.text(max_size=4),
    max_size=12,
).map("".join)
PROMPTS = st.sampled_from(["", "<think>\n"])


@pytest.mark.parametrize("tools", [*TOOL_FORMATS, None])
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=20), prompt=PROMPTS)
@settings(max_examples=60)
def test_every_split_of_a_stream_says_what_the_whole_says(
    tools: ToolFormat | None, text: str, cuts: list[int], prompt: str
) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = parsed(tools, [text], prompt=prompt, stops=["id9", "\n<"])
    assert parsed(tools, pieces, prompt=prompt, stops=["id9", "\n<"]) == whole
    assert parsed(tools, text, prompt=prompt, stops=["id9", "\n<"]) == whole


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        "<function=x>\n<parameter=",
        "<tool_call>{",
        '{"arguments": {"',
        "[TOOL_CALLS][",
        f"{ALL}{BEGIN}x",
        "<|start|>x",
        "<",
    ],
)
def test_no_text_takes_long_to_read(tools: ToolFormat, unit: str) -> None:
    text, begun = unit * 800, time.process_time()
    parsed(tools, [text[place : place + 8] for place in range(0, len(text), 8)])
    assert time.process_time() - begun < 3.0


# --- the choice of a format


@pytest.mark.parametrize(
    ("template", "tools", "call"),
    [
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3-coder", "<function="),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm", ""),
        ("{% set begin = '<minimax:tool_call>' %}", "minimax", '<invoke name="'),
        ("'<|tool_call>call:' + name", "gemma", "call:"),
        ("<start_function_call>", "gemma", "call:"),
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", ""),
        ("{% set dsml = '｜DSML｜' %}<{{ dsml }}tool_calls>", "deepseek", '<｜DSML｜invoke name="'),
        ("<｜tool▁calls▁begin｜>", "deepseek", BEGIN),
        ("[TOOL_CALLS]name[ARGS]", "mistral", ""),
        ("<|im_start|>", "json", ""),
    ],
)
def test_the_template_tells_the_format(template: str, tools: ToolFormat, call: str) -> None:
    form = AnswerFormat.of(template)
    assert (form.tools, form.call.before_name) == (tools, call)
    assert AnswerFormat.of(template, "hermes").tools == "hermes"
    assert AnswerFormat.of(template, "none").tools is None
