"""Parse what a target writes into content, reasoning and tool calls, while it comes."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from warnings import catch_warnings, simplefilter

from edge_agent.http.parsing.formats import (
    BARE,
    CALL_ID,
    ENDS,
    JSON,
    MESSAGE,
    START,
    AnswerFormat,
    CallForm,
    Parameters,
)
from edge_agent.http.parsing.reader import Delta, Reading, TextReader
from edge_agent.target.detokenizer import StopScanner

Functions = Mapping[str, Mapping[str, Any] | None]
"""The JSON schema of each function's parameters, None for one without any, by the function's name."""

_KINDS_OF: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
"""The type in a schema of a JSON value, by its type in Python; what may be a number may be an integer."""
KINDS = frozenset(_KINDS_OF.values())
_MAX_REFERENCES = 16
_MAX_VALUE = 1 << 16
"""Most characters of a value that is no string, which waits for its end."""
_MAX_HEADER = 256
"""Most characters of the header of one of gpt-oss's messages."""
_HEADER = re.compile(
    r"\s*(?:assistant)?\s*(?:to=(?P<to>[\w.\-]+))?\s*(?:<\|channel\|>\s*(?P<channel>\w+))?\s*(?:to=(?P<later>[\w.\-]+))?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_SAID = {"True": "true", "False": "false", "None": "null"}
"""Values as Python writes them, and so do some chat templates."""


class AnswerParser(StopScanner):
    """Turns one answer's text, in pieces, into deltas; what the deltas say does not depend on the pieces.

    Text waits only while it may be the beginning of a marker, of a stop, or of a call whose name and arguments have not
    both begun. What has not become a call by then is content, markers included; white space after a marker is dropped.
    To the stream of the answer it is what finds stops, but in the content alone, and it passes on all text.
    functions: those that may be called; without any, calls are content. prompt: the end of the prompt, which may have
    begun the reasoning. one_call: further calls are left out.
    """

    def __init__(
        self,
        form: AnswerFormat,
        functions: Functions | None = None,
        prompt: str = "",
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        one_call: bool = False,
    ) -> None:
        super().__init__(stops, min_tokens)
        self.form = form
        self._reader = TextReader()
        self._reading = _answer(self._reader, form, functions or {}, prompt)
        self._most_calls = 1 if one_call else math.inf
        self._calls = 0
        self._deltas: list[Delta] = []

    @property
    def unfinished(self) -> bool:
        """Whether the last tool call lacks its end."""
        return self._reader.unfinished and self._calls <= self._most_calls

    def taken(self) -> list[Delta]:
        """Return what has become certain since the last time. Nothing comes after a stop."""
        runs: list[list[Delta]] = []
        for delta in self._deltas:
            if runs and runs[-1][0].kind == delta.kind and not delta.name:
                runs[-1].append(delta)
            else:
                runs.append([delta])
        self._deltas = []
        return [replace(run[0], text="".join(delta.text for delta in run)) for run in runs]

    def feed(self, text: str) -> str:
        """Read one more token's text, and return it."""
        self._early -= 1
        self._read(text)
        return text

    def flush(self) -> str:
        """Read what waits for more text, since none will come; there is no text to return."""
        self._read("", ended=True)
        self._add(Delta("content", super().flush()))
        return ""

    def _read(self, text: str, *, ended: bool = False) -> None:
        self._reader.add(text, ended=ended)
        next(self._reading, None)
        for delta in self._reader.taken():
            if self.hit:
                break
            self._calls += bool(delta.name)
            if delta.kind == "content":
                self._add(Delta("content", self._scanned(delta.text)))
            elif delta.kind == "reasoning" or self._calls <= self._most_calls:
                self._add(Delta("content", super().flush()))
                self._add(delta)

    def _add(self, delta: Delta) -> None:
        if delta.text or delta.name:
            self._deltas.append(delta)


def _answer(r: TextReader, form: AnswerFormat, functions: Functions, prompt: str) -> Reading[None]:
    if form.tools == "harmony":
        yield from _harmony(r, calls=bool(functions))
    else:
        if form.reasoning is not None:
            yield from _reasoning(r, *form.reasoning, prompt)
        if functions and form.tools is not None:
            yield from _unmarked(r, form, functions)
            yield from _marked(r, form, functions)
    yield from r.passed("content")


def _reasoning(r: TextReader, opening: str, closing: str, prompt: str) -> Reading[None]:
    """Read `<think>...</think>` at the beginning, of which the prompt may have the first part."""
    begun, place = prompt.rstrip().endswith(opening), r.at
    yield from r.space()
    if not (yield from r.literal(opening)) and not begun:
        r.at = place
        return
    yield from r.space()
    yield from r.passed("reasoning", closing)
    yield from r.literal(closing)
    yield from r.space()


def _unmarked(r: TextReader, form: AnswerFormat, functions: Functions) -> Reading[None]:
    """Read calls as JSON at the beginning of an answer: a list of them, as a target of any family writes that was told
    of its tools in words (edge_agent.target.conversation), or in some families one without a list, too."""
    place = r.at
    yield from r.space()
    begun = (yield from r.peek()) == "[" or form.tools in BARE
    if not begun or not (yield from _calls(r, [JSON], functions, functions)):
        r.at = place


def _marked(r: TextReader, form: AnswerFormat, functions: Functions) -> Reading[None]:
    """Read calls after their markers, anywhere in the text."""
    forms = [one for one in form.forms if one.marker]
    openings = {one.marker for one in forms}
    markers = openings | {one.before_name for one in forms if one.before_name.startswith("<")}
    while forms and (marker := (yield from r.passed("content", *markers))):
        place = r.at
        yield from r.literal(*openings)
        yield from r.space()
        meant = [one for one in forms if one.marker == marker or one.before_name.startswith(marker)]
        if not (yield from _calls(r, meant, functions, None)):
            r.at = place
            r.emit("content", (yield from r.literal(marker)))


def _calls(
    r: TextReader, forms: Iterable[CallForm], functions: Functions, names: Collection[str] | None
) -> Reading[bool]:
    """Read calls, one after the other, and their closing; False, with nothing begun, where there is none.

    names: those that a call in JSON may name; None for any, of which the client will say that there is no such.
    """
    found: CallForm | None = None
    yield from r.skip("[")
    while True:
        place = r.at
        if found is not None:
            yield from r.skip(",", ";")
        begun = r.at
        for form in forms:
            if (yield from _call(r, form, functions, names)):
                found = form
                break
            r.at = begun
        else:
            r.at = place
            break
    if found is None:
        return False
    yield from r.skip("]")
    if closing := found.closing.strip("\n]"):
        yield from r.skip(closing)
    return True


def _call(r: TextReader, form: CallForm, functions: Functions, names: Collection[str] | None) -> Reading[bool]:
    """Read one call of this form; False, with nothing begun, where there is none."""
    if form.key:
        return (yield from r.call(names))
    if form.before_name and not (yield from r.text(form.before_name)):
        return False
    name = yield from r.word()
    if (yield from r.literal(CALL_ID)):
        yield from r.word()
    place = r.at
    if not (yield from r.text(form.after_name)):
        r.at = place
    told = name in functions or bool(form.before_name) or (form.after_name.strip() != "" and r.at > place)
    if not name or not (told or isinstance(form.arguments, Parameters)):
        return False
    yield from r.space()
    if isinstance(form.arguments, Parameters):
        begun = yield from _parameters(r, name, form, form.arguments, functions.get(name) or {}, told=told)
    elif form.arguments:
        begun = yield from _bare_object(r, name, form.arguments)
    else:
        begun = yield from r.arguments(name)
    for part in re.split(r"\n|(?=<)", form.after_arguments) if begun else ():
        if part:
            yield from r.skip(part)
    return begun


def _parameters(
    r: TextReader, name: str, form: CallForm, marks: Parameters, schema: Mapping[str, Any], *, told: bool
) -> Reading[bool]:
    """Read arguments between marks, each of a type that the function's schema gives it.

    told: the name alone says that this is a call, without any argument, too. A value whose end is missing ends where
    the next one begins, or the call ends. Of a key that comes twice the first value stands: it was passed on already.
    """
    ends = [part for part in (form.after_arguments + form.closing).split("\n") if part]
    after_keys = [one.split("\n")[0] for one in (marks.after_key, marks.after_key_of_json) if one]
    properties: Any = schema.get("properties")
    keys = set[str]()
    value_ends = (marks.after_value.rstrip("\n"), marks.after_value.strip("\n"))
    missing = (f"\n{marks.before_key}", f"\n{form.after_arguments}{form.closing}")
    while (mark := (yield from r.literal(marks.before_key, *ends))) == marks.before_key:
        key, after_key = yield from r.until(*after_keys)
        if not after_key:
            return bool(keys)
        key = key.strip()
        if not keys:
            r.begin_call(name)
        if not (repeated := key in keys):
            r.emit("tool_call", f"{', ' if keys else '{'}{_quoted(key)}: ")
        keys.add(key)
        known = isinstance(properties, Mapping) and key in properties
        kinds = kinds_of(properties[key], schema) if known else KINDS
        if marks.after_key_of_json:
            kinds = frozenset({"string"}) if after_key == marks.after_key else KINDS
        for part in marks.after_key.split("\n")[1:]:
            if part:
                yield from r.space()
            yield from r.literal(part or "\n")
        if repeated:
            end = yield from r.passed("tool_call", *value_ends, *missing, written=lambda _: "")
        else:
            end = yield from _value(r, kinds, *value_ends, *missing)
        if not end:
            return True
        yield from r.literal(*value_ends)
        yield from r.space()
    if not keys:
        if not mark or not told:
            return False
        r.begin_call(name)
        r.emit("tool_call", "{")
    if mark or not r.breaks_off(marks.before_key, *ends):
        r.emit("tool_call", "}")
        r.unfinished = False
    return True


def _value(r: TextReader, kinds: frozenset[str], *ends: str) -> Reading[str]:
    """Read a value up to one of its ends, which is returned and comes next; "" where it breaks off.

    A string is passed on as it comes.
    """
    if kinds == {"string"}:
        return (yield from _string(r, *ends))
    text, end = yield from r.until(*ends, most=_MAX_VALUE)
    r.at -= len(end)
    r.emit("tool_call", typed(text, kinds) if end else "")
    return end


def _string(r: TextReader, *ends: str) -> Reading[str]:
    """Pass a text on as a JSON string up to one of its ends, which is returned and comes next; "" where none comes."""
    r.emit("tool_call", '"')
    end = yield from r.passed("tool_call", *ends, written=lambda text: _quoted(text)[1:-1])
    r.emit("tool_call", '"' if end else "")
    return end


def _bare_object(r: TextReader, name: str, quote: str) -> Reading[bool]:
    """Read `{key:value}` as Gemma writes it, where a string stands between two quotes, and has no escapes."""
    if (yield from r.peek()) != "{":
        return False
    r.begin_call(name)
    depth = 0
    while True:
        if (yield from r.literal(quote)):
            if not (yield from _string(r, quote)):
                return True
            yield from r.literal(quote)
        elif word := (yield from r.word()):
            yield from r.space()
            r.emit("tool_call", _quoted(word) if (yield from r.peek()) == ":" else typed(word, KINDS))
        elif (text := (yield from r.string(_MAX_VALUE))) is not None:
            r.emit("tool_call", _quoted(text))
        else:
            letter = yield from r.peek()
            if not letter or letter not in "{}[],: \n":
                r.breaks_off(quote)
                return True
            r.at += 1
            r.emit("tool_call", {",": ", ", ":": ": "}.get(letter, letter.strip()))
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
            if not depth:
                r.unfinished = False
                return True


def _harmony(r: TextReader, *, calls: bool) -> Reading[None]:
    """Read messages on channels; a message to a recipient is a call. The prompt has `<|start|>assistant` already."""
    marker = ""
    while True:
        place = r.at
        text, found = yield from r.until(MESSAGE, most=_MAX_HEADER)
        header = _HEADER.fullmatch(text) if found else None
        recipient = (header["to"] or header["later"]) if header else None
        if header is None or not (recipient or header["channel"]):
            r.at = place
            r.emit("content", marker)
        else:
            if recipient and calls:
                r.begin_call(recipient.removeprefix("functions."))
                r.unfinished = not (yield from r.passed("tool_call", *ENDS, START))
            else:
                yield from r.passed("reasoning" if header["channel"] == "analysis" else "content", *ENDS, START)
            if (yield from r.literal(*ENDS)):
                yield from r.space()
        marker = yield from r.passed("content", START)
        if not marker:
            return
        yield from r.literal(START)


# --- values


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference in the whole one means; another schema, or one that is missing, as it is."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference.split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = True if found is None else found
    return schema


def kinds_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> frozenset[str]:
    """Return the JSON types that a value may have by its schema, all of them where it does not say.

    root: the whole schema, in which references are found. seen: schemas that are looked at only once, by their ids.
    """
    schema, kinds, seen = resolved(schema, root), KINDS, set() if seen is None else seen
    if not isinstance(schema, Mapping):
        return kinds
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    if isinstance(named := schema.get("type"), str | list):
        kinds &= {"integer" if "number" in named else "", *([named] if isinstance(named, str) else map(str, named))}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        kinds &= {_KINDS_OF[type(value)] for value in values}
    for combining in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(combining), list):
            found = [one for one in (kinds_of(one, root, seen) for one in several) if one]
            join = frozenset.intersection if combining == "allOf" else frozenset.union
            kinds &= join(*found) if found else kinds
    return kinds


def typed(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value that is written as text: a string, unless it is JSON of another of these types, or a
    list or an object as Python writes it."""
    said = _SAID.get(text.strip(), text.strip())
    try:
        value = json.loads(said, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value, said = _of_python(said)
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value, said = int(value), str(int(value))
    kind = _KINDS_OF[type(value)]
    return said if kind != "string" and kind in kinds else _quoted(text)


def _of_python(text: str) -> tuple[Any, str]:
    """Return a list or an object of Python's literals, and its JSON; the text twice where it is none."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError), catch_warnings():
        simplefilter("ignore")  # of a backslash that means nothing in the model's text
        if text.startswith(("[", "{")) and isinstance(value := ast.literal_eval(text), list | dict):
            return value, json.dumps(value, allow_nan=False)
    return text, text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
