"""Test that a response's events come in their order and say what the whole says, however the stream is split."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from response_events import checked
from saying import CALL, TEXT
from scripted import tokenizer_json

from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import AnswerFormat, ToolFormat
from edge_agent.http.responses_api import routes
from edge_agent.http.responses_api.request import ResponseRequest
from edge_agent.http.responses_api.routes import ResponseStore
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
    parser = AnswerParser(AnswerFormat(form, THINK), body.chat().parameters)
    writer = ResponseWriter(body, body.chat(), BUNDLE, parser)
    events, pieces = list(writer.begin()), list(pieces)
    for piece in pieces:
        parser.feed(piece)
        events += writer.grow()
    parser.flush()
    events += writer.grow()
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


@given(st.sampled_from(ANSWERS), st.data())
@settings(max_examples=100)
def test_any_split_of_any_beginning_says_what_the_whole_says(
    answer: tuple[ToolFormat | None, str], data: st.DataObject
) -> None:
    form, text = answer[0], answer[1][: data.draw(st.integers(0, len(answer[1])))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    finish = data.draw(st.sampled_from(["eos", "length"]))
    assert said(written(form, pieces, finish)) == said(written(form, [text], finish))


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


# --- the store


def test_the_bytes_of_all_are_bounded_and_one_that_is_too_large_drops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_STORED_BYTES", 100)
    kept = ResponseStore()
    size = len(json.dumps({"text": "x" * 28}, separators=(",", ":")))
    for name in "abcd":
        kept.keep(name, {"text": "x" * 28})
        assert kept.bytes <= 100
    assert kept.bytes == size * (100 // size) and kept.get("d") is not None and kept.get("a") is None
    kept.keep("e", {"text": "x" * 200})
    assert kept.get("e") is None and kept.get("d") is not None
    kept.keep("d", {})
    assert kept.get("d") == {} and kept.bytes == size + 2


def test_what_is_too_old_is_gone_and_its_bytes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(routes, "STORED_S", 60.0)
    kept = ResponseStore(lambda: now)
    kept.keep("a", {})
    now = 50.0
    kept.keep("b", {})
    now = 61.0
    assert kept.get("a") is None and kept.get("b") == {} and len(kept) == 1 and kept.bytes == 2
