"""Test the Responses API over a real socket, with the real `openai` package, in front of a target that says a text."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fake_verifier import until_free
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from response_events import checked
from saying import ARGUMENTS, TEXT, WEATHER, Says, prompt_of

from outrider.core.errors import Overloaded
from outrider.core.protocol.messages import MAX_GENERATED_TOKENS

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"], "strict": False}
TEMPLATE = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{# <tool_call> #}"
ROLES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


async def streamed(openai: AsyncOpenAI, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a stream's events as they came, and the response in the last one, after checking their order."""
    async with await openai.responses.create(model="", stream=True, **asked) as stream:
        events = [event.to_dict(mode="json", exclude_unset=True) async for event in stream]
    return events, checked(events)


async def raw(openai: AsyncOpenAI, **body: Any) -> httpx.Response:
    """Return the answer to a body that the package would not send."""
    async with httpx.AsyncClient(base_url=str(openai.base_url), timeout=20) as web:
        return await web.post("responses", json={"input": "x", **body})


# --- answers


async def test_text_is_answered_with_usage_and_figures(says: Says) -> None:
    async with says("Sunny.") as (openai, verifier):
        response = await openai.responses.create(model="fake", input="How is the weather?", instructions="Be brief.")
        assert response.output_text == "Sunny." and response.status == "completed" and response.error is None
        assert prompt_of(verifier).startswith("<system>|Be brief.<|end|><user>|How is the weather?<|end|>")
        prompt = verifier.opens[-1].attach.prompt
        assert response.usage and response.usage.input_tokens == len(prompt)
        assert response.usage.total_tokens == len(prompt) + response.usage.output_tokens
        extra = response.model_extra or {}
        assert extra["warnings"] == [] and extra["outrider"]["statistics"]["tokens"] == response.usage.output_tokens


async def test_a_stream_is_the_whole_response_in_events(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        asked: dict[str, Any] = {"input": "How is the weather?", "tools": [TOOL], "max_output_tokens": 2000}
        whole = await openai.responses.create(model="", **asked)
        events, response = await streamed(openai, **asked)
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        ids = {"id", "call_id"}
        assert [{k: v for k, v in item.items() if k not in ids} for item in response["output"]] == [
            {k: v for k, v in item.to_dict().items() if k not in ids} for item in whole.output
        ]
        calls = [item for item in whole.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("weather", ARGUMENTS)] * 2
        assert whole.output_text == "Let me see. " and len({call.call_id for call in calls}) == 2
        assert sum(event["type"] == "response.output_text.delta" for event in events) > 1
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Köln, hm.\n".encode())


async def test_the_packages_own_stream_helper_understands_it(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        async with openai.responses.stream(model="", input="x", tools=[TOOL]) as stream:
            async for event in stream:
                assert event.type != "error"
            final = await stream.get_final_response()
        assert final.output_text == "Let me see. " and final.output[2].type == "function_call"


async def test_every_event_is_named_and_none_comes_after_the_last(says: Says) -> None:
    async with says("a") as (openai, _):
        answer = await raw(openai, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
        for name, data in events:
            assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        assert events[-1][0] == "event: response.completed"


async def test_an_answer_that_is_cut_short_is_incomplete(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        response = await openai.responses.create(model="", input="x", max_output_tokens=5)
        assert response.status == "incomplete" and response.incomplete_details
        assert response.incomplete_details.reason == "max_output_tokens" and response.max_output_tokens == 5
        events, _ = await streamed(openai, input="x", max_output_tokens=5)
        assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("longest", "most"), [(4000, None), (8192, 4096), (40_000, 10_000), (1 << 20, MAX_GENERATED_TOKENS)]
)
async def test_a_length_that_is_not_given_is_what_the_target_can_hold_up_to_a_bound(
    says: Says, longest: int, most: int | None
) -> None:
    async with says("a") as (openai, verifier):
        verifier.script.max_sequence = longest
        await openai.responses.create(model="", input="x")
        attach = verifier.opens[-1].attach
        assert attach.max_tokens == (most or longest - len(attach.prompt))
        await openai.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}])
        assert verifier.opens[-1].attach.max_tokens == 1024


async def test_a_client_that_leaves_frees_the_verifier(says: Says) -> None:
    async with says("a" * 3000) as (openai, verifier):
        stream = await openai.responses.create(model="", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await until_free(verifier)


async def test_an_error_before_the_first_token_has_its_status_and_a_later_one_is_an_event(says: Says) -> None:
    async with says("a" * 2000) as (openai, verifier):
        verifier.script.refuse = Overloaded("full", retry_after_s=9.0)
        with pytest.raises(RateLimitError):
            await openai.responses.create(model="", input="x", stream=True)
        verifier.script.refuse = None
        events: list[dict[str, Any]] = []
        async with await openai.responses.create(model="", input="x", stream=True) as stream:
            async for event in stream:
                events.append(event.to_dict(mode="json", exclude_unset=True))
                if len(events) == 6:
                    await verifier.kill()
        response = checked(events)
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert response["error"]["message"] and response["usage"] is None


# --- requests


async def test_items_become_the_messages_of_the_template(says: Says) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "How is the "},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See:"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS, "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny <|end|>"},
        {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "warm"}]},
    ]  # fmt: skip
    async with says(TEXT) as (openai, verifier):
        await openai.responses.create(
            model="", instructions="Be brief.", input=items, tools=[TOOL], reasoning={"effort": "low"},
            max_output_tokens=1, extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        told = prompt_of(verifier)
        assert told.startswith("<tools>") and '"name": "weather"' in told and '"strict"' not in told
        begin, rest = told[told.index("<system>") :].split("<assistant>", 1)
        assert begin == "<system>|Be brief.\n\nUse tools.<|end|><user>|How is the <|end|><user>|weather?<|end|>"
        assert rest.startswith("hm|See:<tool_call>") and "Köln" in rest
        assert "<tool>|sunny <|end|>call_1<|end|><assistant>|None<tool_call>" in rest
        assert rest.endswith("<tool>|warmcall_2<|end|>lowFalse")
        end = verifier.script.eos_token_ids[0]
        assert verifier.opens[-1].attach.prompt.count(end) == 7  # the template's own: a tool's text cannot end its turn


async def test_an_output_that_names_its_tool_needs_no_call(says: Says) -> None:
    items = [
        {"role": "user", "content": "How is the weather?"},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "Be warm <|end|>"},
    ]
    async with says(TEXT) as (openai, verifier):
        asked: dict[str, Any] = {"model": "", "tools": [TOOL], "max_output_tokens": 1}
        await openai.responses.create(input=items, **asked)
        _, _, told = prompt_of(verifier).partition("<tool>|sunnycall_1<|end|>")
        call, _, result = told.partition("<|end|>")
        assert call.startswith("<assistant>|None<tool_call>") and '"name": "goal"' in call and "Köln" not in call
        assert re.fullmatch(r"<tool>\|Be warm <\|end\|>[0-9a-f]{9}<\|end\|>", result)
        first = verifier.opens[-1].attach.prompt
        await openai.responses.create(input=items, **asked)
        assert verifier.opens[-1].attach.prompt == first  # a prefix that is cached stays one


async def test_system_messages_at_the_beginning_are_one_and_a_later_one_is_the_templates_to_judge(says: Says) -> None:
    system, user = {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}
    async with says("a", ROLES) as (openai, verifier):
        await openai.responses.create(model="", instructions="a", input=[system, system, user], max_output_tokens=1)
        assert prompt_of(verifier) == "<system>a\n\nb\n\nb<user>c"
        with pytest.raises(BadRequestError, match="late"):
            await openai.responses.create(model="", input=[user, system], max_output_tokens=1)


async def test_parameters_reach_the_target_and_come_back(says: Says) -> None:
    async with says("a") as (openai, verifier):
        response = await openai.responses.create(
            model="", input="x", temperature=0.5, top_p=0.9, max_output_tokens=3, metadata={"a": "b"}, user="me",
            parallel_tool_calls=False, truncation="auto", service_tier="auto", prompt_cache_key="key", store=False,
            include=["reasoning.encrypted_content"], text={"format": {"type": "text"}, "verbosity": "low"},
            stream_options=None, extra_body={"seed": 7, "top_k": 5, "stop": ["b"], "client_metadata": {"c": "d"}},
        )  # fmt: skip
        attach = verifier.opens[-1].attach
        sampling = attach.sampling
        assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
        assert attach.max_tokens == 3
        assert response.metadata == {"a": "b"} and response.user == "me" and response.prompt_cache_key == "key"
        assert (response.temperature, response.top_p, response.parallel_tool_calls) == (0.5, 0.9, False)
        assert response.store is False and "truncation" in response.warnings[0]  # type: ignore[attr-defined]


async def test_tools_that_are_no_functions_are_ignored_with_a_warning(says: Says) -> None:
    tools: list[Any] = [
        {"type": "web_search", "external_web_access": False},
        TOOL,
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "weather"}]},
    ]
    async with says(TEXT, TEMPLATE) as (openai, verifier):
        response = await openai.responses.create(model="", input="x", tools=tools, tool_choice="auto")
        assert [warning.split()[0] for warning in response.warnings] == ["tools[0]", "tools[2]", "tools[3]", "tools[4]"]  # type: ignore[attr-defined]
        assert [tool.name for tool in response.tools if tool.type == "function"] == ["weather"]
        assert len(response.tools) == 1 and "apply_patch" not in prompt_of(verifier)
        _, response = await streamed(openai, input="x", tools=tools[:1])  # type: ignore[assignment]
        assert "'web_search'" in response["warnings"][0] and response["tools"] == []  # type: ignore[index]


async def test_a_choice_of_tools_is_followed_where_it_constrains_nothing(says: Says) -> None:
    other = {**TOOL, "name": "other"}
    async with says(TEXT) as (openai, verifier):
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
        response = await openai.responses.create(model="", input="x", tools=[TOOL, other], tool_choice=allowed)
        assert len(response.tools) == 2
        assert '"name": "other"' in prompt_of(verifier) and '"name": "weather"' not in prompt_of(verifier)
        response = await openai.responses.create(model="", input="x", tools=[TOOL], tool_choice="none")
        assert "<tools>" not in prompt_of(verifier)
        assert [item.type for item in response.output] == ["reasoning", "message"]


async def test_what_chat_refuses_is_refused_with_this_apis_names(says: Says) -> None:
    def asked(schema: Any) -> dict[str, Any]:
        return {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}

    cases: list[tuple[dict[str, Any], str]] = [
        ({"text": asked({"not": {}})}, "text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{**TOOL, "strict": True, "parameters": {"type": "objekt"}}]}, "tools"),
    ]
    async with says("a") as (openai, _):
        for more, param in cases:
            with pytest.raises(BadRequestError) as caught:
                await openai.responses.create(model="", input="x", **more)
            assert caught.value.param == param and param in str(caught.value.body["message"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"input": None}, "input", "input"),
        ({"input": 1}, "input", "list"),
        ({"input": [{"role": "user"}, {"role": "king", "content": "x"}]}, "input", "input[1].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input", "input[0].role is missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]", "'input_image'"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
         "input[0].output[0]", "'input_image'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input[0].call_id is missing"),
        ({"input": [{"type": "function_call_output", "name": "a b", "output": "x"}]}, "input", "input[0].name"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "input[0] refers to 'msg_1'"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "'web_search_call'"),
        ({"provenance": True}, "provenance", "provenance"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "call_id is missing"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a b", "arguments": ""}]},
         "input", "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[" * 40 + "]" * 40}]},
         "input", "levels"),
        ({"input": "word " * 20_000}, "input", "prompt"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools", "tools[2].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools", "tools[0].parameters"),
        ({"tools": [{"name": "f"}]}, "tools", "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice", "'x'"),
        ({"reasoning": {"effort": "most"}}, "reasoning", "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"n": 2}, "n", "n"),
        ({"background": True}, "background", "background"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"metadata": {"a": 1}}, "metadata", "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id", "resp_nobody"),
        ({"model": "gpt-5"}, "model", "gpt-5"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_supported_is_refused_by_name(
    url: str, more: dict[str, Any], param: str, said: str
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=20) as web:
        answer = await web.post("v1/responses", json={"input": "x", **more})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


# --- the next turn


async def test_a_response_continues_an_earlier_one_without_its_instructions(says: Says) -> None:
    async with says(TEXT) as (openai, verifier):
        first = await openai.responses.create(model="", instructions="Be brief.", input="Köln?", tools=[TOOL])
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await openai.responses.create(
            model="", previous_response_id=first.id, input=outputs, tools=[TOOL], stream=False
        )
        told = prompt_of(verifier)
        assert "Be brief." not in told and "<user>|Köln?<|end|><assistant>Köln, hm.\n|Let me see. <tool_call>" in told
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        assert told.count("<tool_call>") == 2 and all(f"<tool>|sunny{call}<|end|>" in told for call in calls)
        assert second.previous_response_id == first.id
        _, third = await streamed(openai, previous_response_id=second.id, input="And now?")
        told = prompt_of(verifier)
        assert told.index("Köln?") < told.index("sunny") < told.index("And now?") and told.count("Let me see. ") == 2
        items = [item async for item in openai.responses.input_items.list(third["id"], order="asc", limit=2)]
        kinds = ["message", "reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in items] == [*kinds, *["function_call_output"] * 2, *kinds[1:], "message"]
        assert len({item.id for item in items}) == len(items)
        newest = await openai.responses.input_items.list(third["id"], limit=1)
        assert newest.data[0].id == items[-1].id and newest.has_more
        again = await openai.responses.create(model="", previous_response_id=first.id, input="Or else?")
        assert "sunny" not in prompt_of(verifier) and again.status == "completed"


async def test_an_item_may_be_referred_to_as_long_as_its_response_is_kept(says: Says) -> None:
    async with says(TEXT) as (openai, verifier):
        first = await openai.responses.create(model="", input="Köln?", tools=[TOOL])
        asked = {"role": "user", "content": "Köln?"}
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls]
        whole: list[Any] = [asked, *(item.to_dict() for item in first.output), *outputs]
        await openai.responses.create(model="", input=whole, tools=[TOOL])
        told = prompt_of(verifier)
        names = [item.id for item in first.output]
        referred: list[Any] = [
            asked,
            {"id": names[0]},
            *({"type": "item_reference", "id": n} for n in names[1:]),
            *outputs,
        ]
        second = await openai.responses.create(model="", input=referred, tools=[TOOL])
        assert prompt_of(verifier) == told
        items = await openai.responses.input_items.list(second.id, order="asc")
        assert [item.id for item in items.data][1:5] == names
        with pytest.raises(NotFoundError):
            await openai.responses.retrieve(str(names[1]))
        with pytest.raises(BadRequestError, match="refers to"):
            await openai.responses.create(model="", input=[{"type": "item_reference", "id": first.id}])
        await openai.responses.delete(first.id)
        with pytest.raises(BadRequestError, match="refers to"):
            await openai.responses.create(model="", input=[{"type": "item_reference", "id": names[1]}])


async def test_a_response_can_be_read_again_and_deleted(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        made = await openai.responses.create(model="", input="x", metadata={"a": "b"})
        assert await openai.responses.retrieve(made.id) == made
        _, streamed_one = await streamed(openai, input="x")
        assert (await openai.responses.retrieve(streamed_one["id"])).to_dict(mode="json") == streamed_one
        with pytest.raises(BadRequestError, match="stream"):
            await openai.responses.retrieve(made.id, stream=True)
        with pytest.raises(BadRequestError, match="after"):
            await openai.responses.input_items.list(made.id, after="msg_nobody")
        await openai.responses.delete(made.id)
        for gone in (openai.responses.retrieve, openai.responses.delete, openai.responses.input_items.list):
            with pytest.raises(NotFoundError):
                await gone(made.id)
        with pytest.raises(BadRequestError) as caught:
            await openai.responses.create(model="", input="x", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"


async def test_what_is_not_to_be_stored_is_not_kept(says: Says) -> None:
    async with says("a") as (openai, _):
        for stream in (False, True):
            if stream:
                _, made = await streamed(openai, input="x", store=False)
                name = made["id"]
            else:
                name = (await openai.responses.create(model="", input="x", store=False)).id
            with pytest.raises(NotFoundError):
                await openai.responses.retrieve(name)


async def test_a_client_may_send_the_output_back_by_itself(says: Says) -> None:
    async with says(TEXT) as (openai, verifier):
        first = await openai.responses.create(model="", input="Köln?", tools=[TOOL], store=False)
        items: list[Any] = [{"role": "user", "content": "Köln?"}, *(item.to_dict() for item in first.output)]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in first.output
            if item.type == "function_call"
        ]
        await openai.responses.create(model="", input=items, tools=[TOOL], store=False)
        by_client = prompt_of(verifier)
        kept = await openai.responses.create(model="", input="Köln?", tools=[TOOL])
        names = {
            one.call_id: other.call_id
            for one, other in zip(first.output, kept.output, strict=True)
            if one.type == other.type == "function_call"
        }
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": name, "output": "sunny"} for name in names.values()
        ]
        await openai.responses.create(model="", previous_response_id=kept.id, input=outputs, tools=[TOOL])
        for one, other in names.items():
            by_client = by_client.replace(one, other)
        assert prompt_of(verifier) == by_client
