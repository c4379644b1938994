"""Ask a running server through an unmodified client library, in an interpreter that has it: NAME URL.

Schemas are bounded, so that a target without sense ends its answers, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "pair"
QUESTION = "Order two apples. Answer in JSON."
MESSAGES = [{"role": "user", "content": QUESTION}]


class Order(BaseModel):
    """An order of fruit."""

    model_config = ConfigDict(extra="forbid")  # else an answer may have any number of fields
    fruit: Literal["apple", "pear", "plum"]
    count: Annotated[int, Field(ge=1, le=99)]


FUNCTION = {"name": "order", "description": "Order fruit.", "parameters": Order.model_json_schema()}
TOOL = {"type": "function", "function": FUNCTION}


def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from openai import LengthFinishReasonError

    for responses in (False, True):
        model = ChatOpenAI(
            base_url=url, api_key="none", model=MODEL, max_tokens=300, max_retries=0, use_responses_api=responses
        )
        for method, strict in (
            ("function_calling", None),
            ("function_calling", True),
            ("json_schema", None),
            ("json_schema", True),
        ):
            structured = model.with_structured_output(Order, method=method, strict=strict)
            assert isinstance(structured.invoke(QUESTION), Order), (responses, method, strict)
            assert isinstance(list(structured.stream(QUESTION))[-1], Order), (responses, method, strict)
        any_json = model.with_structured_output(None, method="json_mode", include_raw=True)
        with contextlib.suppress(LengthFinishReasonError):  # an object of any fields may have no end
            assert any_json.invoke(QUESTION)["raw"].content
        for choice, strict in (("auto", None), ("auto", True), ("required", None), ("required", True), ("order", None)):
            bound = model.bind_tools([TOOL], tool_choice=choice, strict=strict, parallel_tool_calls=False)
            whole = bound.invoke(QUESTION)
            streamed = functools.reduce(lambda one, other: one + other, bound.stream(QUESTION))
            if choice != "auto":
                for answer in (whole, streamed):
                    [call] = answer.tool_calls
                    Order.model_validate(call["args"])


def instructor(url: str) -> None:
    import instructor as package
    from openai import OpenAI

    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = package.from_openai(OpenAI(base_url=url, api_key="none"), mode=package.Mode[mode])
        asked = {"response_model": Order, "messages": MESSAGES, "model": MODEL, "max_tokens": 300, "max_retries": 0}
        assert isinstance(client.chat.completions.create(**asked), Order), mode
        assert list(client.chat.completions.create_partial(**asked))[-1].count, mode
    # The mode JSON tells the schema in the prompt alone, which the small target does not follow.
    client = package.from_openai(OpenAI(base_url=url, api_key="none"), mode=package.Mode.JSON)
    raw = client.client.chat.completions.create(
        messages=MESSAGES, model=MODEL, max_tokens=300, response_format={"type": "json_object"}
    )
    assert raw.choices[0].message.content.startswith("{")


def litellm(url: str) -> None:
    import litellm as package

    for provider in ("openai", "hosted_vllm"):
        asked = {
            "model": f"{provider}/{MODEL}",
            "api_base": url,
            "api_key": "none",
            "messages": MESSAGES,
            "max_tokens": 300,
        }
        called = {**asked, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        whole = package.completion(**called).choices[0]
        assert whole.finish_reason == "tool_calls", provider
        chunks = list(package.completion(stream=True, **called))
        for message in (whole.message, package.stream_chunk_builder(chunks).choices[0].message):
            Order.model_validate_json(message.tool_calls[0].function.arguments)
        formed = package.completion(response_format=Order, **asked)
        Order.model_validate_json(formed.choices[0].message.content)


def agents(url: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from agents.exceptions import MaxTurnsExceeded
    from openai import AsyncOpenAI

    @function_tool
    def order(fruit: Literal["apple", "pear", "plum"], many: bool) -> str:
        """Order fruit."""
        taken.append(fruit)
        return "done"

    async def turns(kind: type, streamed: bool) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300)
            agent = Agent(
                name="Shop",
                tools=[order],
                model=kind(MODEL, client),
                model_settings=settings,
                reset_tool_choice=False,
            )
            try:
                if streamed:
                    async for _ in Runner.run_streamed(agent, QUESTION, max_turns=3).stream_events():
                        pass
                else:
                    await Runner.run(agent, QUESTION, max_turns=3)
            except MaxTurnsExceeded:
                return
            raise AssertionError("it ended without a call")

    set_tracing_disabled(True)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for streamed in (False, True):
            taken: list[str] = []
            asyncio.run(turns(kind, streamed))
            assert len(taken) == 3, (kind, streamed)


if __name__ == "__main__":
    {"langchain": langchain, "instructor": instructor, "litellm": litellm, "agents": agents}[sys.argv[1]](sys.argv[2])
