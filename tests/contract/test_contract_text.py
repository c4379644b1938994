"""Test that texts are the target's own, by a reference that shares no code with the product, and what shapes them."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from independent_reference import Reference, Sampling, uniform
from shared_cluster import KEYS, NAME, Cluster, Program, until
from small_pair import DRAFT, NARROW

import edge_agent
from edge_agent import AsyncClient, BadRequest, Client

CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n'
SUM = "Question: A baker fills 6 trays with 12 rolls each and sells 40. How many rolls are left?\nAnswer:"
TOKENS = 48
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
DRAFTS = {"offered": "auto", "several": [str(DRAFT), str(NARROW)], "n-grams": "ngram", "none": None}


@pytest.mark.parametrize(
    ("seed", "prompt", "position", "token", "value"),
    [
        (0, [], 0, 0, "0x1.7d8503cc6cb08p-1"),
        (42, [1, 2, 3], 131071, 151935, "0x1.0a37bc659f408p-1"),
        (9223372036854775808, [50256], 17, 7, "0x1.952c224617bc0p-8"),
        (18446744073709551615, [0, 4294967295], 1000, 128000, "0x1.e7877ccf2d642p-1"),
    ],
)
def test_the_reference_has_the_published_values_of_the_noise(
    seed: int, prompt: list[int], position: int, token: int, value: str
) -> None:
    assert float(uniform(seed, prompt, position, np.array([token], np.uint64))[0]).hex() == value


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_is_the_targets_own_whatever_drafts(
    cluster: Cluster, reference: Reference, draft: str, options: dict[str, Any]
) -> None:
    with cluster.client(draft=DRAFTS[draft]) as client:
        for prompt in (CODE, SUM):

            def drafted(prompt: str = prompt) -> bool:
                got = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **options)
                assert reference.differences(reference.ids(prompt), got.token_ids, Sampling(**options)) == []
                assert len(got.token_ids) == TOKENS and got.finish_reason == "length" and got.verified
                assert got.text == reference.tokenizer.decode(got.token_ids, skip_special_tokens=True)
                return got.statistics.evaluated > 0

            if draft == "none":
                assert not drafted()
            else:
                until(drafted)  # on a busy machine drafts may come too late for a whole text


def test_a_greedy_text_is_what_transformers_generates(client: Client, reference: Reference) -> None:
    expected = reference.greedy(reference.ids(CODE), TOKENS)

    def drafted() -> bool:
        got = client.generate(CODE, max_tokens=TOKENS)
        assert list(got.token_ids) == expected
        return got.statistics.accepted > 0 and got.statistics.steps < TOKENS

    until(drafted)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"top_k": 5, "temperature": 1.2, "seed": 3},
        {"top_p": 0.7, "temperature": 1.2, "seed": 3},
        {"min_p": 0.1, "temperature": 1.2, "seed": 3},
        {"logit_bias": {262: -100.0, 13: 4.0}, "temperature": 0.5, "seed": 1},
        {"repetition_penalty": 1.1, "top_k": 40, "top_p": 0.9, "temperature": 0.8, "seed": 9},
    ],
    ids=lambda options: "+".join(options),
)
def test_penalties_filters_and_biases_are_those_of_the_protocol(
    client: Client, reference: Reference, options: dict[str, Any]
) -> None:
    got = client.generate(SUM, max_tokens=TOKENS, ignore_eos=True, **options)
    assert reference.differences(reference.ids(SUM), got.token_ids, Sampling(**options)) == []


def test_a_seed_gives_the_same_text_at_every_verifier_also_at_one_that_drafts_itself(
    cluster: Cluster, plain: Client, alone: Program
) -> None:
    with Client(verifier=alone.ready, draft=None, cache_dir=cluster.folder / "alone") as other:
        for options in ({}, SAMPLED):
            here = plain.generate(CODE, max_tokens=TOKENS, **options).token_ids

            def drafted(here: tuple[int, ...] = here, options: dict[str, Any] = options) -> bool:
                there = other.generate(CODE, max_tokens=TOKENS, **options)
                assert there.token_ids == here
                return there.statistics.steps < TOKENS  # its own draft tokens were accepted

            until(drafted)
    with Client(verifier=alone.ready, cache_dir=cluster.folder / "alone") as other:
        without = other.generate(CODE, max_tokens=TOKENS, speculation=False)
        assert without.token_ids == plain.generate(CODE, max_tokens=TOKENS).token_ids
        assert (without.statistics.steps, without.statistics.drafted) == (TOKENS, 0)
    one, two, again = (plain.generate(CODE, max_tokens=8, temperature=1.0, seed=seed) for seed in (1, 2, 1))
    assert one.token_ids == again.token_ids != two.token_ids


def test_sessions_side_by_side_do_not_touch_one_another(client: Client) -> None:
    prompts = [CODE, SUM, "import os\n", "class Stack:\n", "Question: 7 + 8?\nAnswer:", "x = 1\n"]

    def generate(prompt: str) -> tuple[int, ...]:
        return client.generate(prompt, max_tokens=TOKENS, **SAMPLED).token_ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(generate, prompts))
    assert together == [generate(prompt) for prompt in prompts]


def test_a_stream_is_the_whole_text_in_pieces_and_tells_what_was_drafted(client: Client) -> None:
    whole = client.generate(CODE, max_tokens=TOKENS, **SAMPLED)

    def drafted() -> bool:
        stream = client.stream(CODE, max_tokens=TOKENS, **SAMPLED)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        assert stream.completion.usage == whole.usage
        several = len(chunks) < TOKENS
        return several and {kind for chunk in chunks for kind in chunk.provenance} == {"draft", "target"}

    until(drafted)


def test_the_asynchronous_client_says_the_same(cluster: Cluster, client: Client) -> None:
    async def generate() -> tuple[str, str]:
        where = {"coordinator": cluster.address, "target": NAME, "api_key": KEYS["acme"]}
        async with AsyncClient(**where, cache_dir=cluster.folder / "cache") as other:
            whole, stream = await asyncio.gather(
                other.generate(CODE, max_tokens=TOKENS, **SAMPLED), other.stream(CODE, max_tokens=TOKENS, **SAMPLED)
            )
            async with stream:
                return whole.text, "".join([chunk.text async for chunk in stream])

    assert set(asyncio.run(generate())) == {client.generate(CODE, max_tokens=TOKENS, **SAMPLED).text}


def test_every_public_name_of_the_sdk_is_there() -> None:
    assert all(getattr(edge_agent, name) for name in edge_agent.__all__)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_stop_strings_stop_ids_and_least_lengths_end_a_text_where_they_say(
    client: Client, sampling: dict[str, Any]
) -> None:
    whole = client.generate(CODE, max_tokens=TOKENS, ignore_eos=True, **sampling)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    stopped = client.generate(CODE, max_tokens=TOKENS, ignore_eos=True, stop=["never said", stop], **sampling)
    assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"
    ending = whole.token_ids[10]
    first = whole.token_ids.index(ending)
    ended = client.generate(CODE, max_tokens=TOKENS, stop_token_ids=[ending], **sampling)
    assert ended.token_ids[: first + 1] == whole.token_ids[: first + 1] and ended.finish_reason == "eos"
    later = client.generate(CODE, max_tokens=TOKENS, stop_token_ids=[ending], min_tokens=first + 3, **sampling)
    assert len(later.token_ids) >= first + 3 and ending not in later.token_ids[: first + 2]


def test_log_probabilities_are_the_targets(client: Client, reference: Reference) -> None:
    prompt = reference.ids(CODE)
    got = client.generate(CODE, max_tokens=24, logprobs=3, **SAMPLED)
    truth = reference.log_probs([*prompt, *got.token_ids])[len(prompt) - 1 : -1]
    assert got.logprobs is not None
    for token, known, row in zip(got.token_ids, got.logprobs, truth, strict=True):
        assert known.logprob == pytest.approx(row[token], abs=1e-3)
        assert sorted(dict(known.top).values(), reverse=True) == pytest.approx(np.sort(row)[::-1][:3], abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_probabilities_of_a_prompt_are_the_targets(client: Client, reference: Reference, max_tokens: int) -> None:
    prompt = reference.ids(30 * SUM)
    got = client.generate(prompt, max_tokens=max_tokens, prompt_logprobs=1).prompt_logprobs
    assert got is not None and len(got) == len(prompt) and got[0] is None
    truth = reference.log_probs(prompt)
    for at, known in enumerate(got[1:]):
        assert known is not None and known.logprob == pytest.approx(truth[at, prompt[at + 1]], abs=1e-3)
        assert max(dict(known.top).values()) == pytest.approx(truth[at].max(), abs=1e-3)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_grammars_hold_and_speculation_changes_nothing_about_them(
    client: Client, plain: Client, temperature: float
) -> None:
    for grammar, holds in (
        (r"start: /[a-f]{3}-[0-9]{2}/", lambda text: re.fullmatch("[a-f]{3}-[0-9]{2}", text)),
        ('start: "positive" | "negative"', lambda text: text in ("positive", "negative")),
        (f"start: %json {json.dumps(SCHEMA)}", lambda text: list(json.loads(text)) == ["city", "days"]),
    ):
        asked = {"grammar": grammar, "max_tokens": 200, "temperature": temperature, "seed": 5}
        drafted, streamed = (one.generate("So ", **asked) for one in (client, plain))
        assert holds(drafted.text) and drafted.finish_reason == "eos"
        assert drafted.token_ids == streamed.token_ids


def test_a_chat_uses_the_targets_template(client: Client, reference: Reference) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    ids = list(reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    stream = client.stream_chat(messages, max_tokens=TOKENS)
    answer = stream.drain()
    assert list(stream.prompt_token_ids) == ids and answer.usage.prompt_tokens == len(ids)
    assert reference.differences(ids, answer.token_ids, Sampling()) == []


def test_typical_acceptance_needs_the_operators_permission_and_its_text_is_labelled(
    cluster: Cluster, client: Client, alone: Program
) -> None:
    typical: dict[str, Any] = {"acceptance_rule": "typical", "max_tokens": TOKENS, "temperature": 1.0, "seed": 2}
    with pytest.raises(BadRequest, match="acceptance_rule"):
        client.generate(CODE, **typical)
    with Client(verifier=alone.ready, cache_dir=cluster.folder / "alone") as allowed:
        got = allowed.generate(CODE, **typical)
        assert got.lossy and got.acceptance_rule == "typical" and got.token_ids
        assert not allowed.generate(CODE, max_tokens=8).lossy


def test_a_skeleton_has_the_points_of_its_outline(client: Client) -> None:
    asked = [{"role": "user", "content": "Write a Python function `mean`. Return the mean of a list of numbers."}]
    options: dict[str, Any] = {"points": 4, "max_tokens": 24, **SAMPLED}
    skeleton = client.skeleton(asked, **options)
    lines = [line.strip() for line in skeleton.outline.text.splitlines()]
    points = [f"{point.number}. {point.title}" for point in skeleton.points]
    assert 0 < len(points) <= 4 and points == lines[: len(points)]
    assert skeleton.verified and skeleton.changes_answer
    assert all(point.text in skeleton.text for point in skeleton.points)
    apart = client.skeleton(asked, parallel=1, **options)
    assert apart.text == skeleton.text
