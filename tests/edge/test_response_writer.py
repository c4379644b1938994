"""Test that a response's events come in their order and say what the whole says, however the stream is split."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from response_events import checked
from saying import CALL, TEXT
from scripted import tokenizer_json

from edge_agent.http.errors import ApiError
from edge_agent.http.parsing.formats import AnswerFormat, ToolFormat
from edge_agent.http.responses_api.request import ResponseRequest
from edge_agent.http.responses_api.writer import ResponseWriter, status_of
from edge_agent.sdk.types import Completion, FinishReason
from edge_agent.session.statistics import Statistics, Usage
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.tokenizer import TargetTokenizer

THINK = ("<think>", "</think>")
TOOLS = [{"type": "function", "name": name} for name in ("weather", "add")]
BUNDLE = cast(
    TargetBundle,
    SimpleNamespace(
        description=SimpleNamespace(target=SimpleNamespace(name="fake")), tokenizer=TargetTokenizer(tokenizer_json())
    ),
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Köln"}<|call|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>'
)
ANSWERS: list[tuple[ToolFormat | None, str]] = [
    ("hermes", TEXT),
    ("hermes", f"{CALL} and {CALL}."),
    ("hermes", "<think>only this"),
    ("hermes", ""),
    ("hermes", CALL[:-25]),
    ("hermes", "a <tool_call>{no call"),
    ("harmony", HARMONY),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'),
    ("json", '[{"name": "add", "arguments": {"a": 1}}]'),
    (None, TEXT),
]


def completion(text: str, finish: FinishReason = "eos") -> Completion:
    statistics = Statistics()
    return Completion(text, (1,) * 9, (False,) * 9, True, None, finish, Usage(7, 9), 5, "session", statistics)


def written(
    form: ToolFormat | None, pieces: Iterable[str], finish: FinishReason = "eos", **more: Any
) -> list[dict[str, Any]]:
    """Return the events of an answer that comes in these pieces."""
    body = ResponseRequest.model_validate({"input": "x", "tools": TOOLS, **more})
    writer = ResponseWriter(body, body.chat(), BUNDLE, AnswerFormat(form, THINK), "")
    events, pieces = list(writer.begin()), list(pieces)
    for piece in pieces:
        events += writer.feed(piece)
    ended = completion("".join(pieces), finish)
    events += writer.finish(ended)
    return [*events, writer.last(writer.response(status_of(ended), ended))]


def said(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the items of a response without their ids, after checking its events."""
    return [
        (item["type"], item["status"], item.get("name"), item.get("arguments"), item.get("content"))
        for item in checked(events)["output"]
    ]


def text_of(item: tuple[Any, ...]) -> str:
    return item[3] if item[0] == "function_call" else item[4][0]["text"]


@pytest.mark.parametrize(("form", "text"), ANSWERS)
def test_every_split_in_two_and_in_letters_says_what_the_whole_says(form: ToolFormat | None, text: str) -> None:
    whole = said(written(form, [text]))
    assert said(written(form, text)) == whole
    for cut in range(len(text)):
        assert said(written(form, [text[:cut], text[cut:]])) == whole


@given(st.sampled_from(ANSWERS), st.data())
@settings(max_examples=300, deadline=None)
def test_any_split_of_any_beginning_says_what_the_whole_says(
    answer: tuple[ToolFormat | None, str], data: st.DataObject
) -> None:
    form, text = answer[0], answer[1][: data.draw(st.integers(0, len(answer[1])))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    finish = data.draw(st.sampled_from(["eos", "length"]))
    assert said(written(form, pieces, finish)) == said(written(form, [text], finish))


def test_items_are_reasoning_messages_and_calls_in_the_order_of_the_text() -> None:
    events = written("hermes", TEXT)
    assert [item[:3] for item in said(events)] == [
        ("reasoning", "completed", None),
        ("message", "completed", None),
        ("function_call", "completed", "weather"),
        ("function_call", "completed", "weather"),
    ]
    assert [text_of(item) for item in said(events)] == ["Köln, hm.\n", "Let me see. ", *['{"city": "Köln"}'] * 2]
    response = checked(events)
    assert response["status"] == "completed" and response["incomplete_details"] is None
    reasoning_tokens = len(BUNDLE.tokenizer.encode_plain("Köln, hm.\n"))
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": min(9, reasoning_tokens)},
        "total_tokens": 16,
    }
    assert len({item["id"] for item in response["output"]}) == 4


def test_without_parallel_calls_the_first_one_is_told_alone_and_whole() -> None:
    items = said(written("hermes", TEXT[: -len('n"}}\n</tool_call>')], parallel_tool_calls=False))
    assert [item[:2] for item in items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
    ]


@pytest.mark.parametrize(
    ("text", "finish", "items"),
    [
        ("abc", "length", [("message", "incomplete")]),
        ("<think>abc", "length", [("reasoning", "incomplete")]),
        ("<think>abc", "eos", [("reasoning", "completed"), ("message", "completed")]),
        (CALL[:-25], "length", [("function_call", "incomplete")]),
        (CALL[:-25], "eos", [("function_call", "incomplete")]),
        (CALL, "length", [("function_call", "completed")]),
        ("", "length", [("message", "incomplete")]),
    ],
)
def test_what_is_cut_short_says_so(text: str, finish: FinishReason, items: list[tuple[str, str]]) -> None:
    events = written("hermes", [text], finish)
    assert [item[:2] for item in said(events)] == items
    response = checked(events)
    status = "completed" if finish == "eos" else "incomplete"
    assert response["status"] == status
    assert response["incomplete_details"] == (None if finish == "eos" else {"reason": "max_output_tokens"})


def test_a_failure_ends_the_stream_with_what_had_ended_before() -> None:
    body = ResponseRequest.model_validate({"input": "x", "tools": TOOLS})
    writer = ResponseWriter(body, body.chat(), BUNDLE, AnswerFormat("hermes", THINK), "")
    events = [*writer.begin(), *writer.feed("<think>hm</think>abc")]
    for status, code in ((503, "server_error"), (429, "rate_limit_exceeded")):
        response = writer.response("failed", error=ApiError(status, "no verifier", code="unavailable"))
        assert response["error"] == {"code": code, "message": "no verifier"}
    response = checked([*events, writer.last(response)])
    assert [item["type"] for item in response["output"]] == ["reasoning"] and response["usage"] is None
