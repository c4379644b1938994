"""Test that an answer's text becomes content, reasoning and tool calls, however the stream splits it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.http.parsing.formats import TOOL_FORMATS, AnswerFormat, AnswerParser, ToolFormat
from edge_agent.http.parsing.reader import Delta

TOOLS = ("weather", "add")
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
) -> Parsed:
    parser, runs = AnswerParser(AnswerFormat(tools, reasoning), names, prompt), list[tuple[str, int, str, str]]()

    def add(deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.text or delta.name
            if runs and runs[-1][:2] == (delta.kind, delta.index) and not delta.name:
                runs[-1] = (*runs[-1][:3], runs[-1][3] + delta.text)
            else:
                assert bool(delta.name) == (delta.kind == "tool_call")
                runs.append((delta.kind, delta.index, delta.name, delta.text))

    for piece in pieces:
        add(parser.feed(piece))
    add(parser.end())
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
        ("json", f'{CALL}, {{"name": "add", "arguments": {{"a"', [BOTH[0], called(1, "add", '{"a"')]),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_is_reported_as_unfinished(
    tools: ToolFormat, text: str, expected: list[tuple[str, int, str, str]]
) -> None:
    assert parsed(tools, [text]) == parsed(tools, text) == (expected, True)


def test_text_is_passed_on_at_once_unless_it_may_begin_a_marker() -> None:
    parser = AnswerParser(AnswerFormat("hermes", THINK), TOOLS)
    assert parser.feed("Hello <") == [Delta("content", "Hello ")]
    assert parser.feed("b> <tool") == [Delta("content", "<b> ")]
    assert parser.feed("s> x") == [Delta("content", "<tools> x")]
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"a') == [Delta("tool_call", '{"a', 0, "add")]
    assert parser.feed('": 1') == [Delta("tool_call", '": 1', 0)]
    assert parser.feed("}}</tool_call>") == [Delta("tool_call", "}", 0)]
    assert parser.end() == []
    parser = AnswerParser(AnswerFormat("json", None), TOOLS)
    assert parser.feed('{"name": "add"') == []
    assert parser.feed(', "b') == []
    assert parser.feed('"') == [Delta("content", '{"name": "add", "b"')]


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
    whole = parsed(tools, [text], prompt=prompt)
    assert parsed(tools, pieces, prompt=prompt) == whole
    assert parsed(tools, text, prompt=prompt) == whole


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize(
    "unit", ["<tool_call>{", '{"arguments": {"', "[TOOL_CALLS][", f"{ALL}{BEGIN}x", "<|start|>x", "<"]
)
def test_no_text_takes_long_to_read(tools: ToolFormat, unit: str) -> None:
    text, begun = unit * 800, time.process_time()
    parsed(tools, [text[place : place + 8] for place in range(0, len(text), 8)])
    assert time.process_time() - begun < 3.0


# --- the choice of a format
