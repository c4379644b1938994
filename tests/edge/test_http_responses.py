"""Test the Responses API over a real socket, with the real `openai` package, in front of a target that says a text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from response_events import checked
from saying import ARGUMENTS, CALL, TEXT, WEATHER, Says, prompt_of

from outrider.core.errors import Overloaded

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"], "strict": False}


async def streamed(openai: AsyncOpenAI, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a stream's events as they came, and the response in the last one, after checking their order."""
    async with await openai.responses.create(model="", stream=True, **asked) as stream:
        events = [event.to_dict(mode="json", exclude_unset=True) async for event in stream]
    return events, checked(events)


# --- answers


async def test_an_error_before_the_first_token_has_its_status_and_a_later_one_is_an_event(says: Says) -> None:
    async with says("a" * 2000) as (openai, verifier):
        verifier.script.refuse = Overloaded("full", retry_after_s=0.1)
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
        assert "<tool>|sunny <|end|>call_1<|end|><assistant>|<tool_call>" in rest
        assert rest.endswith("<tool>|warmcall_2<|end|>lowFalse")
        end = verifier.script.eos_token_ids[0]
        assert (
            list(verifier.opens[-1].attach.prompt).count(end) == 7
        )  # the template's own: a tool's text cannot end its turn


async def test_tools_that_are_no_functions_are_ignored_with_a_warning(says: Says) -> None:
    tools: list[Any] = [
        {"type": "web_search", "external_web_access": False},
        TOOL,
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "web_search"}]},
    ]
    async with says(TEXT) as (openai, verifier):
        response = await openai.responses.create(model="", input="x", tools=tools, tool_choice="auto")
        assert [warning.split()[0] for warning in response.warnings] == [
            *(f"tools[{i}]" for i in (0, 2, 3)),
            "tools[4].tools[0]",
        ]  # type: ignore[attr-defined]
        assert [tool.name for tool in response.tools if tool.type == "function"] == ["weather"]
        assert len(response.tools) == 2 and "apply_patch" not in prompt_of(verifier)
        _, response = await streamed(openai, input="x", tools=tools[:1])  # type: ignore[assignment]
        assert "'web_search'" in response["warnings"][0] and response["tools"] == []  # type: ignore[index]


async def test_a_chats_fields_are_followed_and_those_without_effect_named(
    says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    ignored = {"temprature": 0, "logprobs": True, "max_tool_calls": 3, "text": {"verbosity": "low"}}
    followed = {"max_completion_tokens": 7, "reasoning_effort": "low", "background": False}
    async with says("four") as (openai, verifier):
        for stream, thought in ((False, {"enable_thinking": False}), (True, {"thinking": {"type": "disabled"}})):
            asked: dict[str, Any] = {"input": "x", "extra_body": {**ignored, **followed, **thought}, "stream": stream}
            raw = await openai.responses.with_raw_response.create(model="", **asked)
            names = raw.headers["x-outrider-ignored"]
            assert set(names.split(", ")) == {"temprature", "logprobs", "max_tool_calls", "text.verbosity"}
            assert caplog.text.count(names) == 1 and (stream or names in raw.parse().warnings[0])
            assert verifier.opens[-1].attach.max_tokens == 7 and prompt_of(verifier).endswith("lowFalse")
        items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}, "strict": True}}
        more = {"continue_final_message": True, "response_format": form}
        raw = await openai.responses.with_raw_response.create(model="", input=items, extra_body=more)
        assert "x-outrider-ignored" not in raw.headers and prompt_of(verifier).endswith("|It is")
        assert "integer" in verifier.opens[-1].attach.sampling.grammar


NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__sky",
    "description": "What is above.",
    "tools": [{"name": "weather", **{key: value for key, value in TOOL.items() if key != "name"}}],
}


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "weather", "namespace": "mcp__sky"}]
)
async def test_functions_of_a_namespace_are_called_by_their_own_names(says: Says, choice: Any) -> None:
    async with says(CALL.replace('"weather"', '"mcp__sky__weather"')) as (openai, verifier):
        asked: dict[str, Any] = {"tools": [NAMESPACE], "tool_choice": choice, "parallel_tool_calls": False}
        response = await openai.responses.create(model="", input="x", **asked)
        call = response.output[0].to_dict()
        assert (call["name"], call["namespace"], call["arguments"]) == ("weather", "mcp__sky", ARGUMENTS)
        assert response.warnings == [] and "mcp__sky__weather" in prompt_of(verifier)  # type: ignore[attr-defined]
        grammar = verifier.opens[-1].attach.sampling.grammar
        assert ("mcp__sky__weather" in grammar) == (choice != "auto")
        _, streamed_response = await streamed(openai, input="x", **asked)
        assert streamed_response["output"][0]["namespace"] == "mcp__sky"
        items: list[Any] = [{"role": "user", "content": "x"}, call]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
        await openai.responses.create(model="", input=items, **asked)
        assert '{"name": "mcp__sky__weather", "arguments"' in prompt_of(verifier)


async def test_what_is_wrong_or_not_supported_is_refused_by_name(url: str) -> None:
    def item(**more: Any) -> dict[str, Any]:
        return {"input": [more]}

    image = {"type": "input_image", "image_url": "x"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": 1}, "input", "list"),
        (item(role="king", content="x"), "input", "input[0].role"),
        (item(role="user", content=[image]), "input[0].content[0]", "'input_image'"),
        (item(type="function_call_output", output="x"), "input", "input[0].call_id is missing"),
        (item(type="item_reference", id="msg_1"), "input", "input[0] refers to 'msg_1'"),
        (item(type="web_search_call", id="ws_1"), "input[0].type", "'web_search_call'"),
        (item(type="function_call", call_id="1", name="f", arguments="[" * 40 + "]" * 40), "input", "levels"),
        ({"input": "word " * 20_000}, "input", "100015 characters, must be at most"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "'yaml'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"background": True}, "background", "background"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id", "resp_nobody"),
        ({"model": "gpt-5"}, "model", "gpt-5"),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=60) as web:
        for more, param, said in cases:
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


async def test_an_item_is_no_response_to_continue(says: Says) -> None:
    async with says(TEXT) as (openai, _):
        first = await openai.responses.create(model="", input="Köln?", tools=[TOOL])
        with pytest.raises(BadRequestError, match="does not keep"):
            await openai.responses.create(model="", previous_response_id=first.output[0].id or "", input="And now?")


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
        unkept = await openai.responses.create(model="", input="x", store=False)
        with pytest.raises(NotFoundError):
            await openai.responses.retrieve(unkept.id)
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
