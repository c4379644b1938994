"""Test that values of wrong types are refused by name before anything is sent; convertible ones are taken."""

from __future__ import annotations

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


async def test_an_option_of_a_wrong_type_is_refused_by_name(client: AsyncClient) -> None:
    wrong: list[tuple[str, Any]] = [
        *(("temperature", value) for value in ("hot", None, True, 10**400, float("nan"), -1.0)),
        *(("top_k", 1.5), ("top_p", 0.0)),
        *(("seed", value) for value in ("a", 1.5, 10**5000, 2**64, -1)),
        *(("max_tokens", value) for value in (True, 2.0)),
        *(("stop_token_ids", value) for value in (5, None, [1.5], "ab")),
        *(("stop", value) for value in (5, False, [None], b"abc", [""])),
        *(("ignore_eos", "no"), ("traffic_class", 7), ("traffic_class", "x" * 65)),
        *(("timeout", value) for value in (0, -1.0, "1", float("nan"), Timeout(total=-1.0), True)),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, 1.5, True)),
    ]
    for option, value in wrong:
        with pytest.raises(BadRequest, match=option) as caught:
            await client.generate("x", **{option: value})
        assert caught.value.field and len(str(caught.value)) < 300


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
        logit_bias={3: 1},
    )
    assert (request.max_tokens, request.stop_token_ids) == (4, (1, 2))
    assert request.sampling == SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1, logit_bias=((3, 1.0),))
    assert {type(value) for value in (request.max_tokens, request.sampling.seed, *request.stop_token_ids)} == {int}
    assert (
        check_prompt(np.array([3, 4])) == check_prompt(list(np.array([3, 4]))) == check_prompt(iter([3, 4])) == (3, 4)
    )
    assert Request.of(logit_bias={np.int64(3): np.float32(0.5)}).logit_bias == {3: 0.5}  # type: ignore[dict-item]
    assert len(check_messages([{"role": "user", "content": "x"}])) == 1


def test_contents_may_be_lists_of_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    refused = {"role": "assistant", "refusal": "No."}
    assert len(check_messages([{"role": "user", "content": parts}, called, refused])) == 3
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"content": [*parts, {"type": "image_url"}]}, r"messages\[0\]\.content\[2\]"),
        ({"content": [{"type": "text", "text": 3}]}, r"messages\[0\]\.content\[0\]"),
        ({"content": ["a"]}, r"messages\[0\]\.content\[0\]"),
        ({"content": None}, r"messages\[0\]\.content"),
        ({"content": "a", "refusal": 3}, r"messages\[0\]\.refusal"),
        ({"function_call": {"arguments": "{}"}}, r"messages\[0\]\.function_call"),
    ]
    for message, said in wrong:
        with pytest.raises(BadRequest, match=said):
            check_messages([{"role": "assistant", **message}])


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", b"bytes"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(BadRequest, match="api_key") as caught:
        AsyncClient(verifier="127.0.0.1:1", api_key=key)
    assert "sch" not in str(caught.value) and "lines" not in str(caught.value) and "bytes" not in str(caught.value)
