"""Look into a grammar and its JSON Schemas: bound what they ask of a compiler, and find the place of a refusal.

What is read here came from outside, so that every pattern below takes time in proportion to the text.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from outrider.core.errors import BadRequest

MAX_ITEMS = 10_000
"""Most items of all lists in a schema, by `minItems` and `maxItems`: the compiler writes out each one, in 0.1 ms."""
MAX_CHOICES = 1_000
"""Most optional properties of an object, members of `anyOf` or `oneOf`, and lists and objects in an `enum`: no step
follows more at once. The compiler's time grows with the square of the first, 0.2 s for these."""
MAX_MULTIPLE = 10_000
"""Largest common multiple of what `multipleOf` asks for in a schema; numbers then have so many remainders."""
MAX_TERMINALS = 128
"""Most terminals of a grammar that are made of other ones; the compiler's time grows with the cube of their chains."""
MAX_PATTERNS = 8
"""Most patterns that one text may have to match; each further one doubles the compiler's time and memory."""
_MAX_FAILED = 100
"""Most places after `%json` that are no JSON: each costs time."""
_MAX_JOINED = 100_000
"""Most names that are kept while patterns are counted."""

Path = tuple["Path", str] | None
"""Where a schema stands: the path of what it stands in, and its key there; None for the whole."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords of which every member is a schema."""
_VALUES = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords that hold no schema."""
_EMBEDDED = re.compile(r"%json\s*(?=[{\[tf])")
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?')
_DEFINITION = re.compile(r"\b(\w+) ?(?:\.-?\d{1,9})? ?(?:\[[^\]]{0,99}\])? ?:")
_TERMINAL = re.compile(r"\b_*[A-Z]")
_HINTS = (
    (r"^Unsatisfiable schema: anyOf", ("enum", "anyOf", "type")),
    (r"^Unsatisfiable schema: .*\bitem", ("items", "prefixItems", "minItems")),
    (r"^(Resource|Anchor|Pointer|circular)|registry|does not exist", ("$ref", "$dynamicRef", "$schema", "$id")),
    (r"range", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    (r"patternProperty", ("patternProperties",)),
    (r"regex", ("pattern", "patternProperties", "minLength", "maxLength", "format")),
    (r"format", ("format",)),
    (r"type", ("type",)),
)
"""What a message says -> the keywords of which it may speak without naming one."""


def place_of(message: str, grammar: str) -> str:
    """Return the keyword that a compiler's message refuses and its place in its schema, such as `"not" at #/items`.

    Empty if the message speaks of no keyword.
    """
    named, hinted = [word for word in re.findall(r"[$\w]+", message) if word != "not"], list[str]()
    if unknown := re.match(r"Unimplemented keys: (\[.*\])", message):
        named = re.findall(r'"([^"]+)"', unknown[1])
    else:
        hinted = [key for pattern, keys in _HINTS if re.search(pattern, message, re.IGNORECASE) for key in keys]
    best, least = "", (3, 0)
    _, schemas = split_schemas(grammar)
    for path, node in itertools.chain.from_iterable(map(_subschemas, schemas)):
        if not isinstance(node, dict):
            if node is False and "schema is false" in message and least > (0, -99):
                best, least = f"false at {_pointer(path)}", (0, -99)
            continue
        for key, value in node.items():
            if key not in named and key not in hinted:
                continue
            said = str(value) if isinstance(value, str | int | float) else ""
            if said and said in message:
                rank = (0, -len(said))
            else:
                rank = (1, named.index(key)) if key in named else (2, hinted.index(key))
            if rank < least:
                best, least = _placed(key, path), rank
    return best or next(filter(None, map(_foreign_reference, schemas)), "")


def _foreign_reference(schema: object) -> str:
    """Return the place of a reference out of the schema: metaschemas are known by their address, and looked into."""
    for path, node in _subschemas(schema):
        if isinstance(node, dict) and isinstance(ref := node.get("$ref"), str) and not ref.startswith("#"):
            return _placed("$ref", path)
    return ""


def check_grammar(grammar: str) -> None:
    """Raise BadRequest, with the place, for a grammar that would keep its compiler or a step busy for long.

    It looks for what the compiler's own limits do not bound, or only after the work is done.
    """
    text, schemas = split_schemas(grammar)
    for schema in schemas:
        _check_schema(schema)
    _, *rules = _DEFINITION.split(" ".join(_LITERALS.sub(" ", text).split()))
    bodies = zip(rules[::2], rules[1::2], strict=True)
    joined = [name for name, body in bodies if _TERMINAL.match(name) and _TERMINAL.search(body)]
    if len(joined) > MAX_TERMINALS:
        raise _too_much(f"the terminal {joined[-1][:20]}", f"at most {MAX_TERMINALS} terminals made of others")


def split_schemas(grammar: str) -> tuple[str, list[object]]:
    """Return a grammar's text without the JSON that stands after `%json`, and the values of that.

    What is no JSON stays in the text: the compiler says so. Raises BadRequest if that is more than a mistake.
    """
    decoder, kept, values, at, failed = json.JSONDecoder(), list[str](), list[object](), 0, 0
    for found in _EMBEDDED.finditer(grammar):
        if found.start() < at:
            continue
        try:
            value, end = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            failed += 1
            if failed > _MAX_FAILED:
                raise BadRequest(f"the grammar has {failed} times %json without JSON", field="grammar") from None
            continue
        kept.append(grammar[at : found.start()])
        values.append(value)
        at = end
    return " ".join([*kept, grammar[at:]]), values


# --- JSON Schemas


def _subschemas(schema: object) -> Iterator[tuple[Path, dict[str, Any] | bool]]:
    """Yield a schema and those in it, in their order."""
    left: list[tuple[Path, object]] = [(None, schema)]
    while left:
        path, schema = left.pop()
        if isinstance(schema, dict | bool):
            yield path, schema
        if isinstance(schema, dict):
            left += reversed([(_below(path, key, name), member) for key, name, member in _members(schema)])


def _below(path: Path, key: str, name: str | None) -> Path:
    return (path, key) if name is None else ((path, key), name)


def _members(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | None, object]]:
    """Yield what is a schema in a schema: the keyword, the name or number below it or None, and the member."""
    for key, value in schema.items():
        if key in _VALUES:
            continue
        if key in _MAPS and isinstance(value, dict):
            yield from ((key, name, member) for name, member in value.items())
        elif isinstance(value, list):
            yield from ((key, str(i), member) for i, member in enumerate(value) if isinstance(member, dict | bool))
        elif isinstance(value, dict) or (value is False and key == "items"):
            yield key, None, value


def _check_schema(schema: object) -> None:
    """Raise BadRequest, with keyword and place, for a schema that asks for too much."""
    items, multiple, patterns = 0, 1, 0
    for path, node in _subschemas(schema):
        if not isinstance(node, dict):
            continue
        counts = {key: node[key] for key in ("minItems", "maxItems") if _is_number(node.get(key))}
        if counts:
            keyword = max(counts, key=counts.__getitem__)
            items += max(0, math.ceil(min(counts[keyword], 10 * MAX_ITEMS)))
            if items > MAX_ITEMS:
                raise _too_much(_placed(keyword, path), f"lists of at most {MAX_ITEMS} items, all together")
        if _is_number(factor := node.get("multipleOf")) and factor > 0:
            multiple = math.lcm(multiple, _whole(factor))
            if multiple > MAX_MULTIPLE:
                raise _too_much(_placed("multipleOf", path), f"a common multiple of at most {MAX_MULTIPLE}")
        for keyword, count in _choices(node):
            if count > MAX_CHOICES:
                raise _too_much(_placed(keyword, path), f"at most {MAX_CHOICES} choices at one place")
        patterns += _own_patterns(node)
    if patterns > MAX_PATTERNS:
        _PatternCount(schema).check()


def _choices(node: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield keywords of a schema, with the number of ways in which a text may go on by them."""
    if isinstance(properties := node.get("properties"), dict):
        yield "properties", len(properties.keys() - _listed(node.get("required")))
    for key in ("anyOf", "oneOf", "enum"):
        if isinstance(members := node.get(key), list):
            yield key, sum(isinstance(one, dict | list) for one in members)


class _PatternCount:
    """Counts the patterns that one text has to match, by `allOf` and references."""

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self._known: dict[int, Counter[str]] = {}
        self._kept = 0

    def check(self) -> None:
        """Raise BadRequest if there are too many of them."""
        for path, node in _subschemas(self._schema):
            if isinstance(node, dict) and not {"allOf", "$ref"}.isdisjoint(node):
                keyword, bound = "allOf" if "allOf" in node else "$ref", f"at most {MAX_PATTERNS} patterns of one text"
                try:
                    most = max(self._of(node).values(), default=0)
                except RecursionError:
                    most, bound = MAX_PATTERNS + 1, "shorter chains of references, or fewer patterns"
                if most > MAX_PATTERNS or self._kept > _MAX_JOINED:
                    raise _too_much(_placed(keyword, path), bound)

    def _of(self, node: object) -> Counter[str]:
        """Return how many patterns a text has to match by a schema ("") and by what is in it, as its names say.

        A schema within itself counts nothing there.
        """
        if not isinstance(node, dict) or self._kept > _MAX_JOINED:
            return Counter()
        if (known := self._known.get(id(node))) is not None:
            return known
        self._known[id(node)] = counts = Counter({"": _own_patterns(node)})
        either = Counter[str]()
        for key, name, member in _members(node):
            if key == "allOf":
                counts.update(self._of(member))
            elif key in ("anyOf", "oneOf"):
                either |= self._of(member)
            elif key not in ("$defs", "definitions"):
                either |= Counter({below or name or key: count for below, count in self._of(member).items()})
        if isinstance(node.get("$ref"), str):
            counts.update(self._of(self._target(node["$ref"])))
        counts.update(either)
        self._kept += len(counts)
        return counts

    def _target(self, ref: str) -> object:
        """Return what a reference within the schema means; None for another one."""
        node = self._schema if ref.startswith("#") else None
        for step in unquote(ref).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(step)] if step.isdecimal() and int(step) < len(node) else None
            else:
                node = node.get(step) if isinstance(node, dict) else None
        return node


def _own_patterns(node: Mapping[str, Any]) -> int:
    return sum(isinstance(node.get(key), str) for key in ("pattern", "format"))


def _listed(value: object) -> set[object]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _whole(factor: int | float) -> int:
    """Return a factor without its decimal point, as the compiler counts with it."""
    if isinstance(factor, int):
        return factor
    _, digits, exponent = Decimal(repr(factor)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(0, exponent) if isinstance(exponent, int) else MAX_MULTIPLE + 1


def _placed(keyword: str, path: Path) -> str:
    return f'"{keyword}" at {_pointer(path)}'


def _pointer(path: Path) -> str:
    """Return a path as a JSON pointer."""
    steps = list[str]()
    while path is not None:
        path, step = path
        steps.append(step.replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(steps)])


def _too_much(what: str, bound: str) -> BadRequest:
    return BadRequest(f"the grammar is refused: {what} asks for too much, must have {bound}", field="grammar")
