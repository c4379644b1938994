"""Compare grammars of JSON Schemas with the JSON-Schema-Test-Suite: what is followed, refused by name, or wrong.

`--suite` is a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Each of its schemas becomes a
grammar, as for a request; one that names no draft gets the `$schema` of its folder, since it would count as 2020-12. A
schema is `followed`, or refused with a message that has one of its keywords and the keyword's place. Each instance of a
followed schema is written as JSON in every order of its properties (96 at most), with a space after commas and colons
and without. It is `right` if the grammar admits some writing of a valid instance, or none of an invalid one. A valid
one that it does not admit is `not_written`, by reason: `number form` (1.0 where the grammar writes 1), `format` (which
the grammar asserts, and the suite takes for a note), or the keyword whose file it stands in. An invalid one that it
admits is `wrong`, and none is wanted.

`optional` counts the suite's optional tests apart, where other answers are allowed: a grammar knows no leap years, for
example. `lenient` are schemas whose unknown keywords are ignored: what the strict grammar follows must stay right.
`closed` are strict schemas as the HTTP server has them, whose objects have only what they list: the reason `extra
properties` is that an instance has others. `slowest_compile_ms` is CPU time, and `memory_mib` what the process has
grown by.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Criterion, Pair, Size
from edge_agent.http.answer_grammar import output_expression
from edge_agent.http.requests import RequestBody
from edge_agent.sdk import grammars
from outrider.core.constraint import Grammars
from outrider.core.errors import BadRequest

IDS, END = 8192, 0
"""Number of the shipped target's ids, and the one that ends a text."""
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
"""Folder of the suite -> the `$schema` of its schemas."""
SEPARATORS = ((", ", ": "), (",", ":"))
MOST_WRITINGS = 96
COMPILE_S, MEMORY_MIB = 1.0, 512
"""Most CPU time of a compilation, and most memory of the process, that are wanted."""
_PLACED = re.compile(r'(?:"(?P<keyword>[^"]+)"|false) at (?P<place>#\S*?)(?=:? |:?$)')


@dataclass(frozen=True)
class Case:
    """One schema of the suite, with its instances."""

    draft: str
    file: str
    name: str
    schema: Any
    tests: Sequence[Mapping[str, Any]]

    @property
    def optional(self) -> bool:
        return self.file.startswith("optional/")


@dataclass
class Judged:
    """Counts of one way to make grammars."""

    schemas: int = 0
    followed: int = 0
    refused: int = 0
    unnamed: int = 0
    """Refusals without keyword and place."""
    right: int = 0
    wrong: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why valid instances are not written -> their number."""

    def result(self) -> dict[str, Any]:
        """Return the counts, the reasons after their sum."""
        return {**vars(self), "not_written": self.reasons.total(), "reasons": dict(self.reasons.most_common())}


def cases_of(suite: Path, drafts: Sequence[str]) -> list[Case]:
    """Return the suite's cases of some drafts. Raises BadRequest for a folder that has none."""
    cases = []
    for draft in drafts:
        folder = suite / "tests" / draft
        for path in sorted(folder.rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[draft], **schema}
                name = str(path.relative_to(folder))
                cases.append(Case(draft, name, group["description"], schema, group["tests"]))
    if not cases:
        wanted = ", ".join(f"tests/{draft}" for draft in drafts)
        raise BadRequest(
            f"--suite is {suite}, must be a checkout of JSON-Schema-Test-Suite with {wanted}", field="suite"
        )
    return cases


def writings(value: Any) -> Iterator[str]:
    """Yield the texts of an instance: orders of its properties, as many as `MOST_WRITINGS`, each with both spacings."""
    for ordered in itertools.islice(_orders(value), MOST_WRITINGS // len(SEPARATORS)):
        for separators in SEPARATORS:
            yield json.dumps(ordered, ensure_ascii=False, separators=separators)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from map(list, _combined([_orders(member) for member in value]))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for members in _combined([_orders(value[name]) for name in names]):
                yield dict(zip(names, members, strict=True))
    else:
        yield value


def _combined(several: Sequence[Iterator[Any]]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*(tuple(itertools.islice(one, MOST_WRITINGS)) for one in several))


class Judge:
    """Makes grammars of schemas and asks them about texts."""

    def __init__(self, tokenizer_json: str) -> None:
        self._grammars = Grammars(tokenizer_json, IDS, (END,))
        table = ((token, self._grammars.tokenizer.decode_bytes([token])) for token in range(IDS))
        self._bytes = {text[0]: token for token, text in reversed([*table]) if len(text) == 1}
        self.slowest: tuple[float, str] = (0.0, "")
        """Most CPU seconds of a compilation, and the schema that took them."""

    def compile(self, grammar: str, name: str) -> str:
        """Return the message of a refusal, empty for a grammar that is accepted."""
        begun = time.process_time()
        try:
            self._grammars.compile(grammar)
        except BadRequest as error:
            return str(error)
        finally:
            self.slowest = max(self.slowest, (time.process_time() - begun, name))
        return ""

    def admits(self, grammar: str, value: Any) -> bool:
        """Return whether the grammar admits some writing of a value."""
        return any(self.admits_text(grammar, text) for text in writings(value))

    def admits_text(self, grammar: str, text: str) -> bool:
        """Return whether the grammar admits a text, spelt in single bytes where it leaves a choice."""
        state, left = self._grammars.begin(grammar), text.encode("utf-8", "surrogatepass")
        while left:
            forced = state.forced(())
            token = forced[0] if forced else self._bytes.get(left[0], END)
            piece = self._grammars.tokenizer.decode_bytes([token])
            if token == END or not left.startswith(piece) or not state.allows(token, ()):
                return False
            state.commit((token,))
            left = left[len(piece) :]
        return state.allows(END, ())


def judge(case: Case, grammar: str, judged: Judged, ask: Judge, *, mode: str = "", opened: str = "") -> bool:
    """Compare one schema's grammar with the suite's verdicts on its instances; return whether it is followed.

    opened: the grammar of the same schema whose objects may have further properties, if that is another one.
    """
    name = f"{mode or 'strict'} {case.draft}/{case.file}: {case.name}"
    judged.schemas += 1
    if refusal := ask.compile(grammar, name):
        judged.refused += 1
        if not names_place(refusal, case.schema):
            judged.unnamed += 1
            print(f"UNNAMED {name}: {refusal}")
        return False
    judged.followed += 1
    for test in case.tests:
        admitted = ask.admits(grammar, test["data"])
        if admitted == test["valid"]:
            judged.right += 1
        elif admitted:
            judged.wrong += 1
            print(f"{'WRONG' if mode != 'optional' else 'ADMITTED'} {name}: {test['description']}")
        else:
            judged.reasons[_reason(case, grammar, test["data"], ask, opened)] += 1
    return True


def names_place(refusal: str, schema: Any) -> bool:
    """Return whether a message names a keyword, or a schema that is false, and the place where the schema has it."""
    found = _PLACED.search(refusal)
    if found is None:
        return False
    node = schema
    for step in found["place"].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(step)] if step.isdigit() and int(step) < len(node) else None
        else:
            node = node.get(step) if isinstance(node, dict) else None
    return node is False if found["keyword"] is None else isinstance(node, dict) and found["keyword"] in node


def _reason(case: Case, grammar: str, value: Any, ask: Judge, opened: str) -> str:
    """Return why a valid value is not written."""
    if opened and opened != grammar and ask.admits(opened, value):
        return "extra properties"
    if ask.admits(grammar, _with_integers(value)):
        return "number form"
    if isinstance(case.schema, dict) and "format" in case.schema:
        bare = grammars.json_schema({key: member for key, member in case.schema.items() if key != "format"})
        if ask.admits(bare, value):
            return "format"
    return Path(case.file).stem


def _with_integers(value: Any) -> Any:
    """Return a value in which numbers without a fraction are integers."""
    if isinstance(value, dict):
        return {key: _with_integers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_with_integers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def closed_grammar(schema: Any) -> str:
    """Return the grammar of a strict schema as the HTTP server makes it."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    return f"start: {output_expression(RequestBody(response_format=wanted))[0]}"


def judge_all(cases: Sequence[Case], ask: Judge) -> dict[str, Judged]:
    """Judge all cases in every way; the ways are the keys."""
    found = {mode: Judged() for mode in ("strict", "optional", "lenient", "closed")}
    for case in cases:
        strict = grammars.json_schema(case.schema)
        if case.optional:
            judge(case, strict, found["optional"], ask, mode="optional")
            continue
        followed = judge(case, strict, found["strict"], ask)
        judge(case, closed_grammar(case.schema), found["closed"], ask, mode="closed", opened=strict)
        # Where a keyword is ignored the suite's verdicts do not apply.
        alike = case if followed else replace(case, tests=())
        judge(alike, grammars.json_schema(case.schema, lenient=True), found["lenient"], ask, mode="lenient")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("json_schema", __doc__)
    parser.add_argument("--suite", type=Path, required=True, help="folder of a checkout of JSON-Schema-Test-Suite")
    options = parser.parse_args(argv)
    size: Size = options.size
    drafts = [*DRAFTS][: size.pick(smoke=1, quick=3, full=len(DRAFTS))]
    cases = cases_of(options.suite, drafts)
    ask = Judge((Pair.in_folder(options.models).target / "tokenizer.json").read_text(encoding="utf-8"))
    before = _memory_mib()
    found = judge_all(cases, ask)
    grown = _memory_mib() - before
    seconds, slowest = ask.slowest
    print(
        f"llguidance {importlib.metadata.version('llguidance')}; slowest compilation {1e3 * seconds:.1f} ms, {slowest}"
    )
    criteria = [
        Criterion.bound("schemas followed", found["strict"].followed, at_least=1.0, enforced_from=Size.SMOKE),
        *(
            Criterion.none(f"invalid instances that a grammar admits, {mode}", found[mode].wrong)
            for mode in ("strict", "lenient", "closed")
        ),
        *(
            Criterion.none(f"refusals that name no keyword and place, {mode}", each.unnamed)
            for mode, each in found.items()
        ),
        Criterion.bound("CPU seconds of the slowest compilation", seconds, at_most=COMPILE_S),
        Criterion.bound("MiB of memory beyond those of the start", grown, at_most=MEMORY_MIB),
    ]
    result = {
        "drafts": drafts,
        **found["strict"].result(),
        **{mode: found[mode].result() for mode in ("optional", "lenient", "closed")},
        "slowest_compile_ms": round(1e3 * seconds, 1),
        "memory_mib": round(grown),
    }
    harness.finish(result, criteria, size)


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
