"""Test tools and reasoning in chats, with the real `openai` package, in front of a target that says a given text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, omit
from saying import ARGUMENTS, CALL, QWEN, TEXT, WEATHER, Says, prompt_of
from scripted import tokenizer_json

from edge_agent.http.requests import ChatCompletionRequest
from edge_agent.target.chat_template import ChatTemplate
from edge_agent.target.tokenizer import TargetTokenizer

ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Köln?"}]


async def whole(openai: AsyncOpenAI, **more: Any) -> Any:
    """Return the one choice of a whole answer."""
    asked = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 2000, **more}
    return (await openai.chat.completions.create(model="", **asked)).choices[0]


async def streamed(openai: AsyncOpenAI, **more: Any) -> tuple[dict[str, Any], str]:
    """Return the message that a stream's deltas add up to, and the finish reason."""
    asked = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 2000, **more}
    said: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    async for chunk in await openai.chat.completions.create(model="", stream=True, **asked):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        for name in ("content", "reasoning", "reasoning_content"):
            said[name] += getattr(delta, name, None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(said["calls"]) and call.type == "function"
                said["calls"].append([call.id, call.function.name, ""])
            said["calls"][call.index][2] += call.function.arguments
    assert reason is not None
    return said, reason


def schema(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"properties": found}
    return found


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


# --- answers


async def test_calls_and_reasoning_are_told_apart_from_the_content(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        choice = await whole(openai)
        message = choice.message
        assert choice.finish_reason == "tool_calls" and message.content == "Let me see. "
        assert message.reasoning_content == "Köln, hm.\n" and not hasattr(message, "reasoning")
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("weather", ARGUMENTS)
        ] * 2
        assert len({call.id for call in message.tool_calls}) == 2
        said, reason = await streamed(openai)
        assert reason == "tool_calls" and [call[1:] for call in said["calls"]] == [["weather", ARGUMENTS]] * 2
        assert said["content"] == message.content
        assert said["reasoning_content"] == message.reasoning_content and not said["reasoning"]
        said, _ = await streamed(openai, extra_body={"reasoning_format": "parsed"})
        assert said["reasoning"] == message.reasoning_content and not said["reasoning_content"]


QWEN3_CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


async def test_parameters_between_marks_become_json_by_the_schema_and_a_call_can_be_required(says: Says) -> None:
    forecast = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": forecast}}]
    async with says(QWEN3_CODER, QWEN + "{# <function= #}") as (openai, verifier):
        choice = await whole(openai, tools=tools)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Köln", "days": 3}'
        said, reason = await streamed(openai, tools=tools, tool_choice="required")
        assert reason == "tool_calls" and said["calls"][0][1:] == ["weather", '{"city": "Köln", "days": 3}']
        assert "<function=weather>" in verifier.opens[-1].attach.sampling.grammar


@pytest.mark.parametrize(
    ("stop", "content"),
    [("four", "It is 4, "), ("Köln", None)],
)
async def test_a_stop_ends_the_content_and_leaves_reasoning_and_calls_whole(
    says: Says, stop: str, content: str | None
) -> None:
    said = CALL if content is None else "It is 4, four. " + CALL
    async with says(f"<think>\nI think four.\n\nKöln.\n</think>\n\n{said}") as (openai, _):
        choice = await whole(openai, stop=stop)
        assert choice.message.content == content and choice.message.reasoning_content == "I think four.\n\nKöln.\n"
        assert choice.finish_reason == ("stop" if stop == "four" else "tool_calls")
        assert stop == "four" or choice.message.tool_calls[0].function.arguments == ARGUMENTS
        streamed_said, reason = await streamed(openai, stop=stop)
        assert (streamed_said["content"] or None, reason) == (content, choice.finish_reason)
        assert streamed_said["reasoning_content"] == choice.message.reasoning_content
        function: Any = {"type": "function", **WEATHER["function"]}
        response = await openai.responses.create(model="", input="x", tools=[function], extra_body={"stop": stop})
        assert response.output_text == (content or "")


LOOKING_AHEAD = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?=K).*$"}}}


async def test_what_a_schema_cannot_be_followed_in_is_ignored_and_named(says: Says) -> None:
    async with says('{"city": "Köln"}') as (openai, verifier):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOKING_AHEAD, "strict": False}}
        asked = {"model": "", "messages": ASKED, "response_format": form, "max_tokens": 4}
        raw = await openai.chat.completions.with_raw_response.create(**asked)
        assert "pattern" in raw.headers["x-outrider-ignored"] and "look-ahead" in raw.parse().warnings[0]
        grammar = verifier.opens[-1].attach.sampling.grammar
        assert "city" in grammar and "(?=K)" not in grammar
        form["json_schema"]["strict"] = True
        with pytest.raises(BadRequestError, match="look-ahead"):
            await openai.chat.completions.create(**asked)


async def test_a_function_whose_schema_cannot_be_followed_is_named_and_spoils_no_other(says: Says) -> None:
    tools = [WEATHER, tool(parameters=LOOKING_AHEAD), {"type": "function", "function": {"name": "g", "parameters": {
        "type": "object", "properties": {"a": {"$ref": "https://elsewhere.example/a"}}}}}]  # fmt: skip
    async with says(CALL) as (openai, verifier):
        asked = {"model": "", "messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 4}
        raw = await openai.chat.completions.with_raw_response.create(**asked, stream=True)
        assert "f: 'pattern'" in raw.headers["x-outrider-ignored"] and "g: '$ref'" in raw.headers["x-outrider-ignored"]
        grammar = verifier.opens[-1].attach.sampling.grammar
        assert all(text in grammar for text in ('"weather', "city", '"f', '"g'))
        tools[1]["function"]["strict"] = True
        with pytest.raises(BadRequestError, match=r"'f'.*look-ahead") as caught:
            await openai.chat.completions.create(**asked)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}])
async def test_without_tools_a_call_is_text(says: Says, more: dict[str, Any]) -> None:
    async with says(TEXT) as (openai, verifier):
        choice = await whole(openai, **more)
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == TEXT[TEXT.index("Let") :] and "<tools>" not in prompt_of(verifier)


async def test_an_unfinished_call_does_not_end_as_a_call(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        tokens = len(TargetTokenizer(tokenizer_json()).encode_plain(TEXT[: TEXT.index('Köln"}')]))
        choice = await whole(openai, max_tokens=tokens)
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls[0].function.arguments == '{"city": "'
        assert (await streamed(openai, max_tokens=tokens))[1] == "length"
    async with says(TEXT[: TEXT.index('Köln"}')]) as (openai, _):
        assert (await whole(openai)).finish_reason == "stop"


async def test_a_marker_that_is_a_special_token_is_seen(says: Says) -> None:
    call = f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'
    template = "{{ tools }}{{ messages }}{# <|python_tag|> #}"
    async with says(f"So.{call}", template, special="<|python_tag|>") as (openai, _):
        choice = await whole(openai)
        assert choice.message.content == "So." and choice.message.tool_calls[0].function.arguments == ARGUMENTS
        assert (await whole(openai, tools=[])).message.content == f"So.{call[len('<|python_tag|>') :]}"


# --- requests


async def test_a_grammar_ends_the_answer_of_a_client_that_ignores_ends(says: Says) -> None:
    async with says("{}") as (openai, verifier):
        forced = {"extra_body": {"ignore_eos": True}, "tools": omit}
        choice = await whole(openai, response_format={"type": "json_object"}, **forced)
        assert choice.message.content == "{}" and choice.finish_reason == "stop"
        attach = verifier.opens[-1].attach
        assert attach.sampling.grammar and not attach.ignore_eos
        await whole(openai, **{**forced, "max_tokens": 4})
        attach = verifier.opens[-1].attach
        assert not attach.sampling.grammar and attach.ignore_eos
        own = {"type": "json_object", "schema": {"type": "object", "required": ["city"]}}
        await whole(openai, response_format=own, **{**forced, "max_tokens": 4})
        assert "city" in verifier.opens[-1].attach.sampling.grammar


async def test_tools_calls_results_and_variables_reach_the_template(says: Says) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny <|end|>"}]},
    ]
    async with says(TEXT) as (openai, verifier):
        kwargs = {"enable_thinking": False}
        await whole(
            openai, messages=messages, reasoning_effort="low", extra_body={"chat_template_kwargs": kwargs}, max_tokens=1
        )
        told = prompt_of(verifier)
        assert told.startswith(f"<tools>{json.dumps(WEATHER, ensure_ascii=False)}</tools>")
        function = json.dumps({"name": "weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
        assert f"<assistant>hm|<tool_call>{function}Kölnas text {ARGUMENTS}<|end|>" in told
        assert "<tool>|sunny <|end|>call_1<|end|>lowFalse" in told
        end = verifier.script.eos_token_ids[0]
        # The template's own control tokens are three; those of the tool's text and of its result are spelt out.
        assert list(verifier.opens[-1].attach.prompt).count(end) == len(messages)
        assert told.count("<|end|>") == len(messages) + 2


@pytest.mark.parametrize(
    "off", [{"reasoning_effort": "none"}, {"enable_thinking": False}, {"thinking": {"type": "disabled"}}]
)
async def test_thinking_is_switched_off_by_any_of_its_names(says: Says, off: dict[str, Any]) -> None:
    async with says(TEXT) as (openai, verifier):
        await whole(openai, messages=ASKED, extra_body=off, max_tokens=1)
        assert prompt_of(verifier).endswith("False")


async def test_the_last_message_is_continued(says: Says) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    async with says(TEXT) as (openai, verifier):
        await whole(openai, messages=messages, extra_body={"continue_final_message": True}, max_tokens=1)
        assert prompt_of(verifier).endswith("|It is")
        for wrong in (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            {"messages": ASKED},
        ):
            with pytest.raises(BadRequestError, match="continue_final_message"):
                asked = {"messages": messages, "extra_body": {"continue_final_message": True}, **wrong}
                await whole(openai, **asked)


async def test_a_template_that_knows_no_tools_is_told_in_words(says: Says) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    template = (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}"
        "{% endif %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}"
    )
    said = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    async with says(said, template) as (openai, verifier):
        choice = await whole(openai, messages=messages)
        assert choice.message.content is None and choice.message.tool_calls[0].function.arguments == ARGUMENTS
        told = prompt_of(verifier)
        assert told.startswith("<system>Be brief.\n\nYou can call functions.") and '"name": "weather"' in told
        assert f"<assistant>{said}<|end|><user>sunny\nwarm<|end|>" in told


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": {"a": 1}}, {"arguments": '{"a": 1}'}])
def test_arguments_of_a_call_may_come_as_an_object_or_not_at_all(given: dict[str, Any]) -> None:
    messages = [*ASKED, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", **given}}]}]
    tools = [tool(description=None)]
    body = ChatCompletionRequest.model_validate({"messages": messages, "tools": tools})
    call = body.template_messages()[1]["tool_calls"][0]
    assert call == {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": call["function"]["arguments"]},
    }
    assert call["function"]["arguments"] == ('{"a": 1}' if given.get("arguments") else "")
    assert body.template_variables()["tools"] == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("kind", [None, ["object", "null"], ["null", "object"]])
def test_parameters_that_may_be_an_object_are_one(kind: Any) -> None:
    tools = [tool(parameters={"type": kind, "properties": {}})]
    body = ChatCompletionRequest.model_validate({"messages": ASKED, "tools": tools})
    body.refuse_unsupported()
    assert body.functions[0].parameters == {"type": "object", "properties": {}}


def test_any_tool_must_be_called_and_of_allowed_ones_no_other_is_known() -> None:
    tools = [tool(), {"type": "function", "function": {"name": "g"}}]
    of_g = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    for choice, names in (("any", ["f", "g"]), ({"type": "allowed_tools", "allowed_tools": of_g}, ["g"])):
        body = ChatCompletionRequest.model_validate({"messages": ASKED, "tools": tools, "tool_choice": choice})
        body.refuse_unsupported()
        assert body.must_call and [one.name for one in body.functions] == names


def test_the_one_call_of_an_older_client_and_the_text_of_a_refusal_reach_the_template() -> None:
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ARGUMENTS}},
        {"role": "function", "name": "f", "content": "sunny"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
    ]
    body = ChatCompletionRequest.model_validate({"messages": messages})
    text = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
    ).render(body.template_messages())
    assert text == f"{ASKED[0]['content']}call_1{ARGUMENTS}call_1sunnyNo.Never."


async def test_what_is_beyond_the_bounds_is_refused_by_name(url: str) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 40 + "]" * 40}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": [tool()] * 2}, "tools", "two functions"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [tool(name="a b")]}, "tools", "tools[0].function.name"),
        ({"tools": [tool(parameters=schema(40))]}, "tools", "levels"),
        ({"tools": [tool(parameters={"x": "y" * 70_000})]}, "tools", "bytes"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice", "'g'"),
        ({"tool_choice": {"type": "function", "function": {"name": []}}, "tools": [tool()]}, "tool_choice", "'[]'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [tool()]}, "tools": []}, "tool_choice", "'f'"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools", "the type of f's parameters is 'string'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "an object with a schema"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "the target has no token that ends a sequence"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "a list of texts, at least one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "several things at once"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "Rule 'x' not found"),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs", "too large"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "messages", "levels"),
        ({"messages": [{"role": "user", "content": "<|end|>" * 5000}]}, "messages", "4096 control tokens"),
    ]
    async with httpx.AsyncClient(base_url=url) as web:
        for more, param, said in cases:
            answer = await web.post("v1/chat/completions", json={"messages": ASKED, **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param) and said in error["message"], error
