"""Test `outrider-edge serve` as a process, in front of the real cluster, with the unmodified `openai` package."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
import pytest_asyncio
import torch
import transformers
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field, StringConstraints
from serving_process import NOTHING, ready_server, server, taken, until_live
from system import ROOT, System
from tokenizers import Tokenizer

from edge_agent import AsyncClient, Client, TimedOut

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'
TOKENS = 40
TARGET = ROOT / "models" / "target"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def url(system: System, folder: Path) -> AsyncIterator[str]:
    async with ready_server(system, folder) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="session")
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0) as made:
        yield made


async def test_what_it_says_is_what_the_sdk_says(settled: System, openai: AsyncOpenAI, folder: Path) -> None:
    model = (await openai.models.list()).data[0].id
    asked = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 11}
    answer = await openai.completions.create(model=model, prompt=PROMPT, **asked)  # type: ignore[call-overload]
    async with AsyncClient(coordinator=settled.cluster.address, cache_dir=folder / "cache") as client:
        own = await client.generate(PROMPT, max_tokens=TOKENS, temperature=0.8, seed=11)
    assert answer.choices[0].text == own.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        own.usage.prompt_tokens,
        own.usage.completion_tokens,
    )
    assert answer.choices[0].outrider["statistics"]["accepted"] > 0
    again = await openai.completions.create(model=model, prompt=PROMPT, **asked)  # type: ignore[call-overload]
    assert again.choices[0].text == own.text


async def test_streams_are_the_whole_answer_in_pieces(settled: System, openai: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    asked = {"model": "", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stop": ["\n\n"]}
    whole = await openai.chat.completions.create(**asked)  # type: ignore[call-overload]
    stream = await openai.chat.completions.create(  # type: ignore[call-overload]
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    # The package's own helper understands it, too; it takes the end by length for an error, so this one stops.
    asked = {**asked, "model": whole.model, "stop": [text[8:10]]}
    async with openai.chat.completions.stream(**asked) as helped:  # type: ignore[arg-type]
        final = await helped.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[8:10])]


async def test_a_response_says_what_a_chat_says_and_continues_an_earlier_one(
    settled: System, openai: AsyncOpenAI
) -> None:
    asked = {"model": "", "temperature": 0, "max_output_tokens": TOKENS}
    chat = await openai.chat.completions.create(
        model="", messages=[{"role": "user", "content": "What is 6 times 7?"}], max_tokens=TOKENS, temperature=0
    )
    first = await openai.responses.create(**asked, input="What is 6 times 7?")  # type: ignore[call-overload]
    assert first.output_text == chat.choices[0].message.content != ""
    assert first.usage.output_tokens == chat.usage.completion_tokens  # type: ignore[union-attr]
    assert first.outrider["statistics"]["accepted"] > 0
    async with openai.responses.stream(**asked, input="And 7 times 7?", previous_response_id=first.id) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    chat = await openai.chat.completions.create(
        model="",
        messages=[
            {"role": "user", "content": "What is 6 times 7?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And 7 times 7?"},
        ],
        max_tokens=TOKENS,
        temperature=0,
    )
    assert "".join(deltas) == chat.choices[0].message.content != ""
    items = await openai.responses.input_items.list(first.id)
    assert [item.type for item in items.data] == ["message"]


class Person(BaseModel):
    """What an answer is to be."""

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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_an_output_follows_what_the_package_asks_for(
    settled: System, openai: AsyncOpenAI, temperature: float
) -> None:
    messages: Any = [{"role": "user", "content": "Invent a person, as JSON."}]
    asked: Any = {"model": "", "max_tokens": 200, "temperature": temperature, "seed": 3}
    parsed = await openai.chat.completions.parse(messages=messages, response_format=Person, **asked)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].outrider["statistics"]["accepted"] > 0
    async with openai.chat.completions.stream(messages=messages, response_format=Person, **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    asked_of_responses: Any = {"model": "", "temperature": temperature, "extra_body": {"seed": 3}}
    response = await openai.responses.parse(input="Invent a person.", text_format=Person, **asked_of_responses)
    assert isinstance(response.output_parsed, Person)
    for wish, pattern in (
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ):
        text = await openai.completions.create(prompt="So ", extra_body={"structured_outputs": wish}, **asked)
        assert re.fullmatch(pattern, text.choices[0].text)
        assert text.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_function_is_called_with_what_its_schema_allows(
    settled: System, openai: AsyncOpenAI, temperature: float
) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    tools: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
    asked: Any = {"model": "", "max_tokens": 200, "temperature": temperature, "seed": 5, "messages": messages}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", {"weather", "now"}), (named, {"weather"})):
        answer = await openai.chat.completions.create(tools=tools, tool_choice=choice, **asked)
        assert answer.choices[0].finish_reason == "tool_calls"
        calls = answer.choices[0].message.tool_calls
        assert calls and {call.function.name for call in calls} <= names
        async with openai.chat.completions.stream(tools=tools, tool_choice=choice, **asked) as stream:
            final = await stream.get_final_completion()
        assert [call.function.arguments for call in final.choices[0].message.tool_calls or ()] == [
            call.function.arguments for call in calls
        ]
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "now" or (list(arguments) == ["city", "days"] and arguments["days"] <= 9)
    function = {"type": "function", **WEATHER}
    called: Any = {"model": "", "input": "Rome?", "tools": [function], "tool_choice": "required"}
    response = await openai.responses.create(**called, max_output_tokens=400, temperature=temperature)
    kinds = [item.type for item in response.output]
    # A call that the limit cuts off before its arguments begin is text.
    whole = kinds if response.status == "completed" else kinds[:-1]
    assert kinds[0] == "function_call" and whole == ["function_call"] * len(whole)


async def test_log_probabilities_are_those_of_the_target_and_the_greedy_token_is_the_likeliest(
    settled: System, openai: AsyncOpenAI
) -> None:
    answer = await openai.completions.create(model="", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top and own == max(top.values()) <= 0.0
    assert "".join(logprobs.tokens).startswith(answer.choices[0].text)  # an end token is no text


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_that_is_echoed_has_the_log_probabilities_of_transformers(
    settled: System, openai: AsyncOpenAI, max_tokens: int
) -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, 40 * PROMPT, "x = 1\n")]
    answer = await openai.completions.create(
        model="", prompt=prompts, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    )
    module = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        with torch.inference_mode():
            truth = module(torch.tensor([prompt])).logits[0].log_softmax(-1)
        known = choice.logprobs
        assert known and known.token_logprobs and known.top_logprobs and known.tokens
        assert len(known.tokens) == len(prompt) + max_tokens and known.token_logprobs[0] is None
        for at, token in enumerate(prompt[1:]):
            assert known.token_logprobs[at + 1] == pytest.approx(float(truth[at, token]), abs=1e-3)
            assert max(known.top_logprobs[at + 1].values()) == pytest.approx(float(truth[at].max()), abs=1e-3)
        if max_tokens:
            assert known.token_logprobs[-1] == pytest.approx(float(truth[-1].max()), abs=1e-3)


async def test_the_blocking_package_and_several_choices(settled: System, url: str) -> None:
    def ask() -> list[str]:
        with OpenAI(base_url=f"{url}v1", api_key="none") as openai:
            answer = openai.completions.create(model="", prompt=PROMPT, n=3, seed=3, max_tokens=16)
            texts: dict[int, str] = {}
            for chunk in openai.completions.create(model="", prompt=PROMPT, n=3, seed=3, max_tokens=16, stream=True):
                index = chunk.choices[0].index
                texts[index] = texts.get(index, "") + chunk.choices[0].text
            assert [texts[i] for i in range(3)] == [choice.text for choice in answer.choices]
            return [choice.text for choice in answer.choices]

    assert len(set(await asyncio.to_thread(ask))) == 3


async def test_errors_are_the_packages_own(settled: System, openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError):
        await openai.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(BadRequestError) as caught:
        await openai.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}],
        )
    assert caught.value.param == "tools" and 'Unimplemented keys: ["not"]' in str(caught.value)
    with pytest.raises(BadRequestError) as caught:
        await openai.completions.create(model="", prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"


async def test_schemas_that_are_made_to_be_slow_are_refused_in_time(settled: System, openai: AsyncOpenAI) -> None:
    """Each one alone would end a process, fill its memory or keep it busy for minutes, without the limits."""
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1_100)}
    slow: dict[str, Any] = {
        "maxItems": {"type": "array", "maxItems": 10**9},
        "allOf": {"allOf": [{"pattern": f".*{number}.*"} for number in range(24)]},
        "multipleOf": {"type": "integer", "multipleOf": 215_656_441},
        "tokens at once": {"const": "a" * 60_000},
        "1000 choices": {"enum": [{"a": number, "b": [number]} for number in range(2_000)]},
        "nothing may follow": {"$ref": "#"},
    }

    async def ask(schema: dict[str, Any]) -> str | None:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        answer = await openai.chat.completions.create(  # type: ignore[call-overload]
            model="",
            messages=[{"role": "user", "content": "x"}],
            response_format=wanted,
            max_tokens=8,
            timeout=20,
            temperature=0,
        )
        return answer.choices[0].message.content  # type: ignore[no-any-return]

    for problem, schema in slow.items():
        with pytest.raises(BadRequestError, match=problem) as caught:
            await ask(schema)
        assert caught.value.param == "response_format", problem
    assert await ask({"$defs": {**chain, "d1100": {}}, "$ref": "#/$defs/d0", "type": "object"})


async def test_a_client_that_goes_away_frees_its_place_at_the_verifier(settled: System, openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(
        model="", prompt=PROMPT, n=2, max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await until_live(settled, 1)
    await stream.close()
    assert await taken(settled) == NOTHING


async def test_a_request_of_the_sdk_that_is_left_or_runs_out_of_time_or_is_cancelled_frees_its_place(
    settled: System, folder: Path
) -> None:
    def ask() -> None:
        with Client(coordinator=settled.cluster.address, cache_dir=folder / "cache") as client:
            client.prepare()
            for _ in client.stream(PROMPT, max_tokens=600, ignore_eos=True):
                break

    await asyncio.to_thread(ask)
    assert await taken(settled) == NOTHING
    async with AsyncClient(coordinator=settled.cluster.address, cache_dir=folder / "cache") as client:
        await client.prepare()
        running = asyncio.create_task(client.generate(PROMPT, max_tokens=1_500, ignore_eos=True, timeout=1.0))
        await until_live(settled, 1)
        with pytest.raises(TimedOut):
            await running
        assert await taken(settled) == NOTHING
        running = asyncio.create_task(client.generate(PROMPT, max_tokens=1_500, ignore_eos=True))
        await until_live(settled, 1)
        running.cancel()
        assert await taken(settled) == NOTHING


async def test_a_key_is_read_from_the_environment(settled: System, folder: Path) -> None:
    async with (
        server(settled, folder, OUTRIDER_EDGE_SERVE_API_KEY="sesame") as (address, _),
        httpx.AsyncClient(base_url=address, timeout=30) as web,
    ):
        assert (await web.get("v1/models")).status_code == 401
        answer = await web.get("v1/models", headers={"authorization": "Bearer sesame"})
        assert answer.status_code == 200


async def output(system: System, folder: Path, *command: str) -> str:
    """Return the output of a program that finds the cluster in its environment."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={
            **os.environ,
            "OUTRIDER_EDGE_COORDINATOR": system.cluster.address,
            "OUTRIDER_EDGE_CACHE_DIR": str(folder / "cache"),
        },
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("complete", "accepted of"),
        ("provenance", "by the draft"),
        ("likely", "of b'"),
        ("skeleton", "not what chat() would say"),
        ("openai_chat", "tokens"),
    ],
)
async def test_an_example_runs(settled: System, url: str, folder: Path, module: str, said: str) -> None:
    where = [f"{url}v1"] if module == "openai_chat" else []
    assert said in await output(settled, folder, "-m", f"examples.{module}", *where)
