"""Test what a grammar and a least length allow, at the end of a sequence and along paths below it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_pair import TOKENIZER

from cloud_verifier.engine.sampling import Sampler
from outrider.core.constraint import Constraint, Grammars, GrammarState, constraint_of, grammars_of
from outrider.core.errors import BadRequest
from outrider.core.sampling import SamplingParams

VOCABULARY, EOS = 8192, 0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "kind": {"enum": ["red", "green"]}},
    "required": ["name", "n", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
OBJECT = f"start: %json {json.dumps(SCHEMA)}"
TOOLS = f"""start: TEXT ("<tool_call>" %json {json.dumps(SCHEMA)} "</tool_call>")*
TEXT: /[^<]*/"""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(TOKENIZER, VOCABULARY, (EOS,))


def ids_of(grammars: Grammars, text: str) -> list[int]:
    return grammars.tokenizer.tokenize_str(text)


def allowed_after(state: GrammarState, path: list[int]) -> set[int]:
    return set(np.flatnonzero(state.mask(path)).tolist())


@pytest.mark.parametrize("grammar", [OBJECT, 'start: %json {"type": "array"}', "start: /([a-c]{2}|é|[0-9]+ )*/", TOOLS])
def test_places_may_be_asked_about_in_any_order(grammars: Grammars, grammar: str) -> None:
    """Compare one state that jumps between paths with a new one for each."""
    rng = np.random.default_rng(3)
    paths: list[list[int]] = [[]]
    walker = grammars.begin(grammar)
    for _ in range(60):
        path = paths[rng.integers(len(paths))]
        ids = [token for token in allowed_after(walker, path) if token != EOS]
        if ids:
            paths.append([*path, ids[rng.integers(len(ids))]])
    for index in rng.permutation(len(paths)):
        path, fresh = paths[index], grammars.begin(grammar)
        fresh.commit(path)
        assert allowed_after(walker, path) == allowed_after(fresh, [])
        assert walker.forced(path) == fresh.forced([])
        allowed = allowed_after(fresh, [])
        for token in (*range(0, VOCABULARY, 61), *path, *sorted(allowed)[:100]):
            assert walker.allows(token, path) == (token in allowed)
    walker.commit(paths[-1][:2])
    fresh = grammars.begin(grammar)
    fresh.commit(paths[-1])
    assert allowed_after(walker, paths[-1][2:]) == allowed_after(fresh, [])


def test_a_sequence_ends_only_where_the_grammar_may(grammars: Grammars) -> None:
    state = grammars.begin(OBJECT)
    whole = ids_of(grammars, '{"name":"Ada","n":36,"kind":"red"}')
    assert not any(state.allows(EOS, whole[:count]) for count in range(len(whole)))
    assert state.allows(EOS, whole)
    assert state.forced(whole) == [EOS]
    state = grammars.begin("start: /a*/")
    assert state.allows(EOS, [])
    assert EOS in allowed_after(state, [])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.sampled_from([0, 3]),
    steps=st.integers(0, 12),
)
def test_the_token_is_the_one_of_the_masked_distribution(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    min_tokens: int,
    steps: int,
) -> None:
    """Compare the sampler, which masks only where it must, with one without a grammar on masked logits."""
    rng = np.random.default_rng(seed)
    grammar = 'start: ("ab" | /[a-z]{1,5}/ | %json {"type": "integer"} | " ")*'
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=seed
    )
    known = grammars_of(TOKENIZER, VOCABULARY, (EOS,))
    constraint = constraint_of(known.begin(grammar), {EOS}, min_tokens, [])
    sampler, plain = Sampler(params, [5, 6], constraint=constraint), Sampler(params, [5, 6])
    reference = known.begin(grammar)
    path: list[int] = []
    for position in range(steps):
        logits = (3 * rng.normal(size=VOCABULARY)).astype(np.float32)
        logits[rng.integers(VOCABULARY, size=3)] += 12
        allowed = reference.mask([]).copy()
        if position < min_tokens:
            allowed[EOS] = False
        expected = plain.choose(np.where(allowed, logits, np.float32(-np.inf)), position, [])
        token = sampler.choose(logits, position, path)
        assert token == expected
        if token == EOS:
            break
        plain.commit([token])
        reference.commit([token])
        path.append(token)
        if rng.random() < 0.4:
            sampler.commit(path)
            path = []


def test_ends_wait_for_the_least_length_unless_nothing_else_is_left(grammars: Grammars) -> None:
    constraint = Constraint(None, {3, 5}, 2)
    logits = np.arange(8, dtype=np.float32)
    assert np.flatnonzero(np.isinf(constraint.masked(logits, 1, []))).tolist() == [3, 5]
    assert constraint.binds(1) and not constraint.binds(2)
    assert [constraint.allows(token, 1, []) for token in (3, 4)] == [False, True]
    constraint = Constraint(grammars.begin('start: "a"'), {EOS, 5}, 9)
    only = ids_of(grammars, "a")
    assert np.flatnonzero(np.isfinite(constraint.masked(np.zeros(VOCABULARY, np.float32), 1, only))).tolist() == [EOS]


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("start: a", "unknown name"),
        ("no grammar", "refused"),
        ('start: %json {"type": "objekt"}', "Invalid type: objekt"),
        ('start: %json {"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ('start: %json {"$ref": "http://localhost/x"}', "does not fetch resources"),
        ("start: /a(/", "unclosed group"),
        ("start: /a(?=b)b/", "look-around, including look-ahead and look-behind, is not supported"),
        ("start: start", "nothing may follow"),
        ('start: %json {"$ref": "#"}', "nothing may follow"),
        ("start: " + json.dumps("hello world " * 5_000), "tokens at once, must be at most 1024"),
        ("start: /(((a{900}){1000}){1000})/", "no choice for"),
        ('start: "a"{1,2000000000000}', "refused"),
        ("start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "deeply nested"),
        ("start: \x00", "refused"),
    ],
)
def test_a_wrong_grammar_is_refused_by_what_is_wrong(grammars: Grammars, grammar: str, problem: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammars.begin(grammar)
    assert problem in str(caught.value)
    assert caught.value.field == "grammar"
    assert not grammars.knows(grammar)


def test_a_session_that_exceeds_the_limits_leaves_the_next_one_all_of_them(grammars: Grammars) -> None:
    grammar = "start: /(?s:.*)a(?s:.){200}b/"
    rng = np.random.default_rng(1)
    with pytest.raises(BadRequest, match="too many states"):
        for _ in range(50):
            state = grammars.begin(grammar)
            for _ in range(150):
                state.commit([int(rng.choice(np.flatnonzero(state.mask([]))[1:]))])
    assert not grammars.knows(grammar)
    state = grammars.begin(grammar)
    state.commit(ids_of(grammars, "banana and more"))
    state.mask([])


def test_a_sequence_that_the_grammar_forbids_is_refused_when_it_is_resumed(grammars: Grammars) -> None:
    with pytest.raises(BadRequest, match="grammar"):
        constraint_of(grammars.begin(OBJECT), {EOS}, 0, ids_of(grammars, "[1]"))
    constraint = constraint_of(grammars.begin(OBJECT), {EOS}, 0, ids_of(grammars, '{"name'))
    assert constraint is not None
    constraint.commit(ids_of(grammars, "[1]"))
    with pytest.raises(BadRequest, match="grammar"):
        constraint.masked(np.zeros(VOCABULARY), 9, [])
