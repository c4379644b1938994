"""Test the HTTP server with the unmodified `openai` package."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any, Literal

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel, Field, StringConstraints
from shared_cluster import Cluster, until

from edge_agent import Client

CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n'
QUESTION: list[Any] = [{"role": "user", "content": "What is 6 times 7?"}]
TOKENS = 40


class Person(BaseModel):
    """What a structured answer is to be; bounded, since the small target might never end a string."""

    name: Annotated[str, StringConstraints(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]
    kind: Literal["red", "green"]


WEATHER: dict[str, Any] = {
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def test_completions_say_what_the_sdk_says_streamed_and_whole(openai: Any, client: Client) -> None:
    own = client.generate(CODE, max_tokens=TOKENS, temperature=0.8, seed=11)
    asked = {"model": openai.models.list().data[0].id, "prompt": CODE, "max_tokens": TOKENS}
    asked |= {"temperature": 0.8, "seed": 11}
    whole = openai.completions.create(**asked)
    assert whole.choices[0].text == own.text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        own.usage.prompt_tokens,
        own.usage.completion_tokens,
    )
    chunks = list(openai.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == own.text


def test_chats_are_the_same_streamed_and_whole_and_end_with_their_usage(openai: Any, client: Client) -> None:
    asked = {"model": "", "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0, "stop": ["\n\n"]}
    whole = openai.chat.completions.create(**asked)
    assert whole.choices[0].message.content == client.chat(QUESTION, max_tokens=TOKENS, stop="\n\n").text
    chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_choices_differ_and_come_side_by_side(openai: Any) -> None:
    asked = {"model": "", "prompt": CODE, "n": 3, "seed": 3, "max_tokens": 16, "temperature": 1.0}
    whole = [choice.text for choice in openai.completions.create(**asked).choices]
    assert len(set(whole)) == 3
    texts = ["", "", ""]
    for chunk in openai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def test_a_response_says_what_a_chat_says_and_continues_an_earlier_one(openai: Any) -> None:
    asked = {"model": "", "temperature": 0, "max_output_tokens": TOKENS}
    first = openai.responses.create(**asked, input=QUESTION[0]["content"])
    turns = [*QUESTION, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And 7?"}]
    answers = [
        openai.chat.completions.create(model="", messages=messages, max_tokens=TOKENS, temperature=0)
        for messages in (QUESTION, turns)
    ]
    assert first.output_text == answers[0].choices[0].message.content != ""
    assert first.usage.output_tokens == answers[0].usage.completion_tokens
    with openai.responses.stream(**asked, input="And 7?", previous_response_id=first.id) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answers[1].choices[0].message.content != ""


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_output_follows_the_schema_that_the_package_sends(openai: Any, temperature: float) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 200, "temperature": temperature, "seed": 3}
    asked |= {"messages": [{"role": "user", "content": "Invent a person, as JSON."}], "response_format": Person}
    whole = openai.chat.completions.parse(**asked).choices[0]
    assert isinstance(whole.message.parsed, Person) and whole.finish_reason == "stop"
    with openai.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.message.parsed
    response = openai.responses.parse(model="", input="Invent a person.", text_format=Person, temperature=temperature)
    assert isinstance(response.output_parsed, Person)
    with openai.responses.stream(
        model="", input="Invent a person.", text_format=Person, temperature=temperature
    ) as events:
        assert isinstance(events.get_final_response().output_parsed, Person)


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_an_output_follows_a_pattern(openai: Any, wish: dict[str, Any], pattern: str) -> None:
    asked = {"model": "", "prompt": "So ", "max_tokens": 50, "temperature": 0.9, "seed": 3}
    choice = openai.completions.create(**asked, extra_body={"structured_outputs": wish}).choices[0]
    assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("named", [False, True], ids=["any", "named"])
def test_a_function_is_called_with_what_its_schema_allows(openai: Any, temperature: float, named: bool) -> None:
    tools = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
    asked: dict[str, Any] = {"model": "", "max_tokens": 200, "temperature": temperature, "seed": 5, "tools": tools}
    asked["messages"] = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked["tool_choice"] = {"type": "function", "function": {"name": "weather"}} if named else "required"
    whole = openai.chat.completions.create(**asked).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls and whole.finish_reason == "tool_calls"
    for name, arguments in calls:
        assert name == "weather" or (name == "now" and not named)
        if name == "weather":
            given = json.loads(arguments)
            assert list(given) == ["city", "days"] and len(given["city"]) <= 12 and given["days"] <= 9
    with openai.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == calls


def test_responses_call_functions_too(openai: Any) -> None:
    tools = [{"type": "function", **WEATHER}]
    asked: dict[str, Any] = {"model": "", "input": "Rome?", "tools": tools, "tool_choice": "required"}
    response = openai.responses.create(**asked, max_output_tokens=400, temperature=0)
    assert response.output[0].type == "function_call" and response.output[0].name == "weather"
    with openai.responses.stream(**asked, max_output_tokens=400, temperature=0) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert done[0].arguments == response.output[0].arguments


def test_log_probabilities_of_answers_and_of_an_echoed_prompt_are_there(openai: Any) -> None:
    asked = {"model": "", "prompt": CODE, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    plain = openai.completions.create(**asked).choices[0].logprobs
    assert all(own == max(top.values()) <= 0 for own, top in zip(plain.token_logprobs, plain.top_logprobs, strict=True))
    echoed = openai.completions.create(**asked, echo=True).choices[0]
    assert echoed.text.startswith(CODE) and echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[-12:] == pytest.approx(plain.token_logprobs, abs=1e-3)


def test_errors_are_the_packages_own_and_say_what_is_wrong(openai: Any) -> None:
    with pytest.raises(NotFoundError):
        openai.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(BadRequestError) as caught:
        openai.completions.create(model="", prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    function = {"name": "f", "parameters": {"not": {}}, "strict": True}
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(model="", messages=QUESTION, tools=[{"type": "function", "function": function}])
    assert caught.value.param == "tools"
    with pytest.raises(BadRequestError, match="temperature"):
        openai.completions.create(model="", prompt="x", temperature=-1)


SLOW: dict[str, dict[str, Any]] = {
    "long array": {"type": "array", "minItems": 10**9},
    "many patterns": {"allOf": [{"pattern": f".*{number}.*"} for number in range(24)]},
    "long text": {"const": "a" * 60_000},
    "many choices": {"enum": [{"a": number, "b": [number]} for number in range(20_000)]},
    "no end": {"$ref": "#"},
}


@pytest.mark.parametrize("name", SLOW)
def test_a_schema_that_is_made_to_be_slow_is_answered_in_time_and_others_meanwhile(openai: Any, name: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SLOW[name]}}
    asked = {"model": "", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    with contextlib.suppress(BadRequestError):  # the server may refuse it
        openai.chat.completions.create(**asked, response_format=wanted, timeout=120)
    assert openai.chat.completions.create(**asked, timeout=120).choices[0].message.content


def test_a_client_that_goes_away_in_the_middle_frees_its_slots(cluster: Cluster, openai: Any) -> None:
    asked = {"model": "", "prompt": CODE, "n": 2, "max_tokens": 4000, "temperature": 1.2}
    stream = openai.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: len(cluster.sessions()) == 2)
    stream.close()
    until(cluster.at_rest)


def test_the_chat_page_and_the_state_of_the_server_are_served(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as web:
        page = web.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert web.get("/ready").status_code == web.get("/metrics").status_code == 200
        assert web.get("/v1/chat/completions").status_code == 405
        assert web.post("/v1/chat/completions", content=b"{").status_code == 400
        foreign = web.get("/v1/models", headers={"host": "evil.example"})  # another name of this machine: DNS rebinding
        assert foreign.status_code == 403
