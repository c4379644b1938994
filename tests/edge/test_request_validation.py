"""Test that values of wrong types are refused by name before anything is sent; convertible ones are taken."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent import AsyncClient, Timeout
from edge_agent.sdk.request import Request, check_messages, check_prompt
from outrider.core.errors import BadRequest
from outrider.core.sampling import SamplingParams, TypicalAcceptance


@pytest.fixture
def client() -> AsyncClient:
    """Return a client without a verifier: whatever it sends raises Unavailable."""
    return AsyncClient(verifier="127.0.0.1:1")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        pytest.param("temperature", 10**400, id="temperature of 401 digits"),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_p", Decimal("0.5")),
        ("seed", "a"),
        ("seed", 1.5),
        pytest.param("seed", 10**5000, id="seed of 5000 digits"),
        ("seed", 2**64),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", "ab"),
        ("stop", 5),
        ("stop", False),
        ("stop", [None]),
        ("stop", b"abc"),
        ("ignore_eos", "no"),
    ],
)
async def test_an_option_of_a_wrong_type_is_refused_by_name(client: AsyncClient, option: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=option) as caught:
        await client.generate("x", **{option: value})
    assert caught.value.field and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        (
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens is 0, must be greater than or equal to 1, or come with prompt_logprobs",
        ),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, must be greater than or equal to 0"),
        ({"max_tokens": True}, "max_tokens", "max_tokens is True, must be a valid integer"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot', must be a number"),
        ({"stop": 5}, "stop", "stop is 5, must be a text or a list of texts"),
        ({"stop": ["a", ""]}, "stop", "stop[1] is '', must have at least 1 character"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids", "stop_token_ids[0] is 1.5, must be a valid integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "a key of logit_bias is 'x', must be a valid integer"),
        ({"timeout": Timeout(first_token=-1)}, "timeout", "timeout.first_token is -1, must be greater than 0"),
        ({"offline": "maybe"}, "offline", "offline is 'maybe', must be 'raise' or 'draft_only'"),
        (
            {"acceptance_rule": "lossy"},
            "acceptance_rule",
            "acceptance_rule is 'lossy', must be 'coupled' or 'typical'",
        ),
        (
            {"acceptance_rule": "typical", "typical_epsilon": 2},
            "typical_epsilon",
            "typical_epsilon is 2.0, must be between 0.0 and 1.0",
        ),
        (
            {"typical_delta": 0.3},
            "typical_delta",
            'typical_delta is 0.3, must be left out without acceptance_rule="typical"',
        ),
        (
            {"traffic_class": "a b"},
            "traffic_class",
            "traffic_class is 'a b', must be at most 64 letters, digits, '.', '_' or '-'",
        ),
    ],
)
def test_a_refusal_says_what_was_wrong_what_was_got_and_what_it_must_be(options: Any, field: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Request.of(**options)
    assert (caught.value.field, str(caught.value)) == (field, message)


@pytest.mark.parametrize("prompt", [None, 5, b"abc", bytearray(b"abc"), ["a"], [1.5], [True], {1: 2}, {1, 2}, [[1]]])
async def test_a_prompt_of_a_wrong_type_is_refused(client: AsyncClient, prompt: Any) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        await client.generate(prompt)


@pytest.mark.parametrize("messages", ["hello", None, 5, [None], ["hi"], {"role": "user"}, [], [{"role": "user"}]])
async def test_messages_of_a_wrong_type_are_refused(client: AsyncClient, messages: Any) -> None:
    with pytest.raises(BadRequest, match="messages"):
        await client.chat(messages)


def test_typical_acceptance_has_defaults_and_no_other_rule_is_lossy() -> None:
    assert Request.of().sampling.typical is None
    assert Request.of(acceptance_rule="typical").sampling.typical == TypicalAcceptance(0.09, 0.3)
    some = Request.of(acceptance_rule="typical", typical_epsilon=0.2, typical_delta=1e9)
    assert some.sampling.typical == TypicalAcceptance(0.2, 1e9)


def test_what_stands_for_a_number_is_taken() -> None:
    request = Request.of(
        max_tokens=np.int64(4),
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int32(7),
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
    )
    assert (request.max_tokens, request.stop_token_ids) == (4, (1, 2))
    assert request.sampling == SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1)
    assert {type(value) for value in (request.max_tokens, request.sampling.seed, *request.stop_token_ids)} == {int}
    assert check_prompt(np.array([3, 4])) == check_prompt(iter([3, 4])) == (3, 4)
    assert len(check_messages([{"role": "user", "content": "x"}])) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"coordinator": 5}, {"verifier": b"a:1"}, {"target": 5}, {"target": "\ud800"}, {"draft": 5}, {"cache_dir": 5}],
)
def test_a_clients_argument_of_a_wrong_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        AsyncClient(**({} if "coordinator" in wrong else {"verifier": "127.0.0.1:1"}) | wrong)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", b"bytes"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(BadRequest, match="api_key") as caught:
        AsyncClient(verifier="127.0.0.1:1", api_key=key)
    assert "sch" not in str(caught.value) and "lines" not in str(caught.value) and "bytes" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "bound"),
    [("OUTRIDER_EDGE_MAX_SESSIONS", "0", "greater than or equal to 1"), ("OUTRIDER_EDGE_SILENCE_S", "x", "number")],
)
def test_a_variable_with_a_wrong_value_is_refused_by_name_value_and_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, bound: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadRequest, match=rf"{variable}: .*{bound}.*, got '{value}'"):
        AsyncClient(verifier="127.0.0.1:1", cache_dir=tmp_path)


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_k", 1.5), ("seed", True), ("min_p", None)])
def test_sampling_parameters_of_a_wrong_type_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=rf"^{field} is .*number between"):
        SamplingParams(**{field: value})
