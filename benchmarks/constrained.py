"""Measure outputs that follow a grammar: what a token costs, and whether they are right, with drafts and without.

One user on a core beside the verifier's asks for an object by a JSON schema, a list, a text by a regular expression and
one of some texts, and for free text, greedily and at temperature 0.8. `undrafted_ms` and `drafted_ms` are milliseconds
by token after the first delivery. `ended` counts outputs that ended by themselves within the limit, of both ways;
`invalid` counts those of them that do not follow their grammar. `differing` counts texts that are not, token for token,
the same with drafts and without.

`--suite DIR` adds grammars of the schemas in a checkout of the JSON-Schema-Test-Suite. A schema is `followed`, or
`refused` as one that cannot be followed. Instances of followed ones are written as JSON, with the properties in the
order of the schema. `wrong` counts invalid ones that the grammar admits, `not_written` valid ones that it does not.

Caveat: a small target writes values without sense, which an accurate draft predicts less well than usual text.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.support import harness
from benchmarks.support.harness import Pair, rounded, say
from edge_agent.bench.users import GREEDY, SAMPLED
from edge_agent.sdk import grammars
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion
from outrider.core.constraint import Grammars
from outrider.core.errors import BadRequest

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
STEPS = r"[a-z]{2,8}( [a-z]{2,8}){4,9}"
ANSWERS = ["positive", "negative", "neither of both"]
FREE = "free text"
DRAFTS_OF_SUITE = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""Folder of the suite -> the `$schema` of its schemas."""


def _is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == PERSON["required"]
        and len(person["name"]) <= 16
        and 0 <= person["age"] <= 120
        and person["kind"] in PERSON["properties"]["kind"]["enum"]
        and len(person["tags"]) <= 3
    )


def _is_list(text: str) -> bool:
    return all(isinstance(one, int) for one in json.loads(text))


KINDS: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    FREE: ("", lambda text: True),
    "object": (grammars.json_schema(PERSON), _is_person),
    "list": (grammars.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 12}), _is_list),
    "regular expression": (grammars.regex(STEPS), lambda text: re.fullmatch(STEPS, text) is not None),
    "choice": (grammars.choice(ANSWERS), ANSWERS.__contains__),
}
"""Name -> a grammar, and whether a text follows it."""


def follows(kind: str, text: str) -> bool:
    try:
        return KINDS[kind][1](text)
    except (ValueError, LookupError, TypeError):
        return False


def token_ms(outputs: Sequence[Completion]) -> float | None:
    """Return the milliseconds by token after each text's first delivery; None where none came after it."""
    counts = [one.statistics for one in outputs]
    seconds = sum((one.last_token_s or 0.0) - (one.first_token_s or 0.0) for one in counts)
    tokens = sum(one.tokens_per_s * ((one.last_token_s or 0.0) - (one.first_token_s or 0.0)) for one in counts)
    return 1e3 * seconds / tokens if tokens else None


def row(kind: str, undrafted: Sequence[Completion], drafted: Sequence[Completion]) -> dict[str, Any]:
    """Return the row of a kind."""
    ended = [one for one in (*undrafted, *drafted) if one.finish_reason == "eos"]
    for one in ended:
        if not follows(kind, one.text):
            say(f"invalid, {kind}: {one.text!r}")
    return {
        "kind": kind,
        "texts": len(undrafted),
        "ended": len(ended),
        "invalid": sum(not follows(kind, one.text) for one in ended),
        "differing": sum(a.token_ids != b.token_ids for a, b in zip(undrafted, drafted, strict=True)),
        "tokens_per_text": rounded(sum(len(one.token_ids) for one in drafted) / len(drafted), 1),
        "undrafted_ms": rounded(token_ms(undrafted)),
        "drafted_ms": rounded(token_ms(drafted)),
        "acceptance_length": rounded(
            sum(one.statistics.tokens for one in drafted) / sum(one.statistics.steps for one in drafted)
        ),
    }


async def rows_of(pair: Pair, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """Return the rows of all kinds."""
    found: dict[str, list[list[Completion]]] = {kind: [] for kind in KINDS}
    async with harness.one_verifier(pair, "--dtype", "float32") as cluster:
        for draft in (None, "auto"):
            async with AsyncClient(coordinator=cluster.address, draft=draft, timeout=None) as client:
                await client.generate(prompts[0], max_tokens=tokens)
                for kind, (grammar, _) in KINDS.items():
                    found[kind].append(
                        [
                            await client.generate(prompt, max_tokens=tokens, grammar=grammar, **sampling)
                            for prompt in prompts
                            for sampling in (GREEDY, SAMPLED)
                        ]
                    )
    return [row(kind, *outputs) for kind, outputs in found.items()]


# --- the suite of JSON schemas


class Asker:
    """Asks grammars about texts, in the ids of the target."""

    def __init__(self, target: Path) -> None:
        config = AutoConfig.from_pretrained(target).get_text_config()
        named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        ends = [token for token in named if token is not None and token < config.vocab_size] or [0]
        self._end = ends[0]
        self._grammars = Grammars((target / "tokenizer.json").read_text(encoding="utf-8"), config.vocab_size, ends)
        self._tokenizer = self._grammars.tokenizer
        pieces = ((self._tokenizer.decode_bytes([token]), token) for token in range(self._tokenizer.vocab_size))
        self._bytes = {piece[0]: token for piece, token in pieces if len(piece) == 1}

    def refuses(self, grammar: str) -> bool:
        try:
            self._grammars.compile(grammar)
        except BadRequest:
            return True
        return False

    def admits(self, grammar: str, text: str) -> bool:
        """Return whether the grammar admits a text, spelt in single bytes where it leaves a choice."""
        state, left = self._grammars.begin(grammar), text.encode("utf-8", "surrogatepass")
        while left:
            token = next(iter(state.forced(())), self._bytes.get(left[0], self._end))
            piece = self._tokenizer.decode_bytes([token])
            if token == self._end or not left.startswith(piece) or not state.allows(token, ()):
                return False
            state.commit((token,))
            left = left[len(piece) :]
        return state.allows(self._end, ())


def ordered(value: Any, schema: Any) -> Any:
    """Return an instance with the properties of its objects in the schema's order, those it does not list at the end.

    An example with two levels:

    >>> ordered({"b": 1, "a": {"d": 2, "c": 3}}, {"properties": {"a": {"properties": {"c": {}, "d": {}}}, "b": {}}})
    {'a': {'c': 3, 'd': 2}, 'b': 1}
    """
    known = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [ordered(one, known.get("items")) for one in value]
    if not isinstance(value, dict):
        return value
    listed = known.get("properties")
    properties = listed if isinstance(listed, dict) else {}
    names = [*(name for name in properties if name in value), *(name for name in value if name not in properties)]
    return {name: ordered(value[name], properties.get(name)) for name in names}


def judge_suite(suite: Path, target: Path) -> dict[str, int]:
    """Return the counts of the suite's required tests. Raises BadRequest for a folder that is no checkout of it."""
    ask, counts = Asker(target), Counter(dict.fromkeys(("schemas", "followed", "refused", "right", "wrong"), 0))
    counts["not_written"] = 0
    for draft, dialect in DRAFTS_OF_SUITE.items():
        for path in sorted((suite / "tests" / draft).glob("*.json")):
            for case in json.loads(path.read_text(encoding="utf-8")):
                schema = {"$schema": dialect, **case["schema"]} if isinstance(case["schema"], dict) else case["schema"]
                grammar = grammars.json_schema(schema)
                refused = ask.refuses(grammar)
                counts.update({"schemas": 1, "refused": refused, "followed": not refused})
                for test in () if refused else case["tests"]:
                    text = json.dumps(ordered(test["data"], schema), ensure_ascii=False)
                    admitted = ask.admits(grammar, text)
                    counts["right" if admitted == test["valid"] else "wrong" if admitted else "not_written"] += 1
                    if admitted and not test["valid"]:
                        say(f"wrong, {draft}/{path.name}, {case['description']}: {test['description']}")
    if not counts["schemas"]:
        raise BadRequest(f"--suite {suite} has no tests/{next(iter(DRAFTS_OF_SUITE))}/*.json", field="suite")
    return dict(counts)


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    count, tokens = (2, 48) if options.quick else (12, 64)
    suite = {"suite": judge_suite(options.suite, pair.target)} if options.suite else {}
    prompts = list(harness.prompts(options, pair, count).values())
    rows = await rows_of(pair, prompts, tokens)
    for one in rows:
        say(one)
    setting = f"One user, {count} prompts, greedy and at temperature 0.8, at most {tokens} tokens, target in float32."
    harness.finish(options, setting, rows, **suite)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("constrained", __doc__)
    parser.add_argument("--suite", type=Path, metavar="DIR", help="a checkout of JSON-Schema-Test-Suite")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
