"""Test that the chat page and the server agree, without a browser: what its script asks, reads and may do."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_verifier import FakeVerifier
from reciter import TEXT


@pytest.fixture
async def web(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as made:
        yield made


async def test_the_page_runs_its_own_script_alone_and_asks_nobody_but_this_server(web: httpx.AsyncClient) -> None:
    answer = await web.get("")
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"], policy["form-action"]) == ("'none'", "'self'", "'none'")
    assert policy["script-src"].startswith("'sha256-") and "unsafe" not in " ".join(policy.values())
    assert "//" not in re.sub(r"(?m)^//.*$", "", answer.text)  # no address of anybody's
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", answer.text)


async def test_what_the_script_sends_is_honoured_and_what_it_reads_comes(
    web: httpx.AsyncClient, verifier: FakeVerifier
) -> None:
    page = (await web.get("")).text
    (model,) = (await web.get("v1/models")).json()["data"]
    assert model["id"] == "fake" and model["draft"]
    sent = re.search(r"return \{ messages: messages\(\), (.*?),\s*\.\.\.", page)
    fields = re.search(r"const given = \[(.*?)\]", page)
    assert sent is not None and fields is not None
    body = {name: value == "true" for name, value in re.findall(r"(\w+): (\w+)", sent[1])}
    assert body == {"stream": True, "provenance": True}
    settings = {"temperature": 0, "top_p": 1, "max_tokens": 150, "seed": 7}
    assert re.findall(r'"(\w+)"', fields[1]) == [*settings]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    answer = await web.post("v1/chat/completions", json={"messages": messages, **body, **settings})
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert done == "[DONE]" and choices[-1]["finish_reason"] == "length"
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    tokens = [token for choice in choices for token in choice.get("outrider", {}).get("tokens", [])]
    assert text.startswith(TEXT) and bytes(b for token in tokens for b in token["bytes"]).startswith(TEXT.encode())
    assert {token["provenance"] for token in tokens} == {"draft", "target"}
    ending = choices[-1]["outrider"]
    assert ending["seed"] == 7 and verifier.opens[-1].attach.sampling.seed == 7
    assert set(re.findall(r"\bfigures\.(\w+)", page)) <= ending["statistics"].keys()
