"""Test the grammars that callers make, and that a device proposes only what they allow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_pair import TOKENIZER

from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.sdk import grammars
from edge_agent.sdk.request import Request
from edge_agent.sdk.skeleton import outline_grammar
from outrider.core.constraint import Grammars, grammars_of
from outrider.core.errors import BadRequest
from outrider.core.proposals import CERTAIN, Proposal

VOCABULARY, EOS = 8192, 0
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": '^a/[0-9]+"$'}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def compiled() -> Grammars:
    return grammars_of(TOKENIZER, VOCABULARY, (EOS,))


def accepts(compiled: Grammars, grammar: str, text: str) -> bool:
    """Return whether a grammar accepts a text, written in single bytes where it has a choice."""
    state, left = compiled.begin(grammar), text.encode()
    table = compiled.tokenizer
    while left:
        forced = state.forced([])
        found = forced[0] if forced else next(i for i in range(300) if table.decode_bytes([i]) == left[:1])
        piece = table.decode_bytes([found])
        if not left.startswith(piece) or not state.allows(found, []):
            return False
        state.commit([found])
        left = left[len(piece) :]
    return state.allows(EOS, [])


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            outline_grammar(2),
            ["1. Boil the water\n", "1. Boil the water\n2. Add it\n", f"1. {80 * 'x'}\n"],
            ["", "1. Boil\n\n", "2. Add it\n", "1. a\n", "1. ab\n2. cd\n3. ef\n", "1.  ab\n", f"1. {81 * 'x'}\n"],
        ),
        (
            grammars.json_schema(PERSON),
            ['{"name": "a/12\\"", "age": 5}', '{"name":"a/1\\"","age":-3}'],
            ['{"name": "b", "age": 5}', '{"name":  "a/1\\"","age":3}', "{}", '{\n"name": "a/1\\"","age":3}'],
        ),
        (grammars.json_object(), ['{"x": [1, 2.5e3, {"y": null}], "é": "ß"}', "{}"], ["[1]", '{"x": 1, }', "{} "]),
        (grammars.json_schema(True), ["[1, true]", '"x"', "{}"], ["", "x"]),
        (grammars.regex("a/b\\/[0-9]{2}\n(x|é)"), ["a/b/12\nx", "a/b/99\né"], ["a/b/1\nx", "a/b/123\nx", ""]),
        (grammars.choice(['say "yes" \\ é\n', "no", "nothing"]), ['say "yes" \\ é\n', "no", "nothing"], ["not", ""]),
        (grammars.gbnf('root ::= "a" [0-9]+ ("b" | "c")*'), ["a1", "a12bcb"], ["a", "ab", "a1d"]),
        (grammars.gbnf('start: "x"+'), ["x", "xxx"], ["", "y"]),
    ],
)
def test_a_grammar_takes_what_it_should(compiled: Grammars, grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiled, grammar, text)] == []
    assert [text for text in bad if accepts(compiled, grammar, text)] == []


def test_a_keyword_that_cannot_be_followed_is_refused_or_ignored_as_the_caller_wants(compiled: Grammars) -> None:
    schema = {"type": "object", "not": {"required": ["x"]}}
    with pytest.raises(BadRequest, match=r'Unimplemented keys: \["not"\]'):
        compiled.begin(grammars.json_schema(schema))
    compiled.begin(grammars.json_schema(schema, lenient=True))
    compiled.begin(grammars.json_schema({**schema, "x-guidance": {"lenient": False}}, lenient=True))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: grammars.json_schema([1]), "must be an object"),  # type: ignore[arg-type]
        (lambda: grammars.json_schema({"const": float("nan")}), "no JSON"),
        (lambda: grammars.json_schema({"const": object()}), "no JSON"),
        (lambda: grammars.choice([]), "at least one"),
        (lambda: grammars.choice("yes"), "a list of texts"),
        (lambda: grammars.choice(["a", ""]), "none of them empty"),
        (lambda: grammars.gbnf('root ::= "a'), "cannot be read"),
    ],
)
def test_what_makes_no_grammar_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        make()


def began(compiled: Grammars, grammar: str, *prompt: int, received: tuple[int, ...] = ()) -> NgramSource:
    source = NgramSource()
    task = DraftTask(prompt, received, ends=frozenset({EOS}), grammar=lambda: compiled.begin(grammar))
    source.begin(task)
    return source


def proposed(source: NgramSource, position: int, *path: int) -> list[Proposal]:
    return source.expand([NodeContext(len(path), 0, path[-1] if path else -1, position, path)])[0]


def test_n_grams_propose_what_must_follow_and_nothing_that_may_not(compiled: Grammars) -> None:
    ids = compiled.tokenizer.tokenize_str
    grammar = grammars.json_schema(
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    )
    forced = compiled.begin(grammar).forced([])
    source = began(compiled, grammar, 1, 2, 3)
    for count in range(len(forced)):
        assert proposed(source, count, *forced[:count]) == [Proposal(forced[count], 0, CERTAIN)]
    # After these tokens the text says "x", which is no integer, and then 7, which is one.
    five, x, seven = ids("5")[0], ids("x")[0], ids("7")[0]
    source = began(compiled, "start: /[0-9]+/", five, five, x)
    source.advance((), (five, five))
    assert [one.token for one in proposed(source, 2)] == [five]
    source = began(compiled, "start: /[0-9]+/", five, five, seven, received=(five, five))
    assert seven in {one.token for one in proposed(source, 2)}


def test_n_grams_propose_no_end_before_the_least_length() -> None:
    source = NgramSource()
    source.begin(DraftTask((4, 5, EOS, 4), (5,), ends=frozenset({EOS}), min_tokens=3))
    assert proposed(source, 2) == []
    source.begin(DraftTask((4, 5, EOS, 4), (5,), ends=frozenset({EOS}), min_tokens=1))
    assert [one.token for one in proposed(source, 2)] == [EOS]


def test_options_that_contradict_a_grammar_are_refused() -> None:
    with pytest.raises(BadRequest, match="ignore_eos is True, must be False with a grammar"):
        Request.of(grammar=grammars.json_object(), ignore_eos=True)
    with pytest.raises(BadRequest, match="min_tokens is 9, must be at most max_tokens, which is 8"):
        Request.of(min_tokens=9, max_tokens=8)
    with pytest.raises(BadRequest, match="grammar is 5, must be a valid string"):
        Request.of(grammar=5)  # type: ignore[typeddict-item]
    assert (
        json.loads(Request.of(grammar=grammars.json_object()).sampling.grammar.split("%json ")[1])["type"] == "object"
    )
