"""Make the grammar of an answer: reasoning, then calls of tools, JSON or text, as the target's family writes them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from edge_agent.http.errors import invalid_value, unsupported
from edge_agent.http.parsing import formats
from edge_agent.http.parsing.answer import kinds_of, resolved
from edge_agent.http.parsing.formats import AnswerFormat, Parameters
from edge_agent.http.requests import ChatCompletionRequest, FunctionDefinition, RequestBody, json_problem
from edge_agent.sdk.grammars import COLON, COMMA, choice_expression, embedded_regex, embedded_schema, gbnf, quoted
from outrider.core.constraint import grammar_warnings
from outrider.core.errors import BadRequest

_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
"""What `structured_outputs` may have, as vLLM names it, and `guided_` in older requests."""
_COMMA, _COLON = f"/{COMMA}/", f"/{COLON}/"
_SPACE = r"/[ \n]{1,2}/?"
_KEY = r"/[\w.\-]+/"
_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern")
"""Options of `structured_outputs` for libraries that this server does not use."""
MAX_SCHEMA_BYTES = 1 << 16
"""Largest schema of an output, as JSON."""
_COMBINING = {"allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"}
"""Keywords under which several schemas say what an object may have."""
_SAYING_MORE = {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "dependentRequired"}
"""Keywords by which an object may be meant to have properties that its schema does not list."""
_DEFINED = re.compile(r"#|#/(\$defs|definitions)/[^/]+")
_DEFINITIONS = ("$defs", "definitions")
_ANYTHING = "(?s:.*)"
_ANY = f"/{_ANYTHING}/"
_MAX_COUNTED = 1024
"""Greatest length that a text between marks is held to."""
_OF_TEXTS = ("format", "maxLength", "minLength", "pattern")
"""Keywords that a schema may have for texts."""
_NULLS = frozenset({"null"})
_TEXT = _NULLS | {"string"}
"""Types of a value that is a text, if it is any."""
_BEGIN, _END = {"^", r"\A"}, {"$", r"\z", r"\Z"}
"""Anchors of a regular expression."""
_IN_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "contains", "additionalItems")
"""Keywords whose values are schemas, or lists of them."""
_FALLIBLE = ("$ref", "pattern", "patternProperties")
"""Keywords whose values a lenient compiler refuses, where it ignores others that it does not know."""


def output_expression(body: RequestBody) -> tuple[str, str]:
    """Return what a request wants its output to follow, as an expression of a grammar, and the field that says so.

    Both are empty if the output is free. Raises ApiError for what is no such wish, or for more than one.
    """
    wishes: list[tuple[str, str, Any]] = []
    format_ = body.response_format or {"type": "text"}
    match format_.get("type"):
        case "json_object" if format_.get("schema") is not None:  # as llama.cpp has it
            wishes.append(("response_format", "json", format_["schema"]))
        case "json_object":
            wishes.append(("response_format", "json_object", True))
        case "json_schema":
            wishes.append(("response_format", "json_schema", format_.get("json_schema")))
        case "text":
            pass
        case other:
            bound = "must be 'text', 'json_object' or 'json_schema'"
            raise invalid_value("response_format", f"response_format.type is {str(other)[:40]!r}, {bound}")
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    if unknown := given.keys() - {*_FIELDS, *_WITHOUT_EFFECT}:
        raise unsupported(f"structured_outputs.{min(unknown)[:40]}")
    older = body.model_extra or {}
    named = [("structured_outputs", name, given.get(name)) for name in _FIELDS]
    named += [(f"guided_{name}", name, older.get(f"guided_{name}")) for name in _FIELDS]
    wishes += [wish for wish in named if wish[2] is not None and wish[1:] != ("json_object", False)]
    if len(wishes) > 1:
        names = " and ".join(f"{field}: {kind}" for field, kind, _ in wishes)
        raise invalid_value(wishes[1][0], f"the output cannot follow several things at once; got {names}")
    for field, kind, value in wishes:
        try:
            return _expression(body, field, kind, value), field
        except BadRequest as error:
            raise invalid_value(field, f"{field}: {error}") from error
    return "", ""


def _expression(body: RequestBody, field: str, kind: str, value: Any) -> str:
    """Return the expression of one wish. Raises BadRequest, or ApiError for a schema that is too deep or too large."""
    match kind:
        case "json_object":
            return embedded_schema({"type": "object"})
        case "json_schema":
            if not isinstance(value, Mapping) or "schema" not in value:
                raise BadRequest("json_schema must be an object with a schema")
            return _checked_schema(body, field, value["schema"], lenient=not value.get("strict"))
        case "json":
            return _checked_schema(body, field, _parsed(value), lenient=False)
        case "regex":
            return embedded_regex(_text(kind, value))
        case "choice":
            return f"({choice_expression(value)})"
        case _:
            return f"%lark {{\n{gbnf(_text(kind, value))}\n}}"


def _checked_schema(body: RequestBody, field: str, schema: Any, *, lenient: bool) -> str:
    if problem := json_problem(schema, MAX_SCHEMA_BYTES):
        raise invalid_value(field, f"{field}: the schema {problem}")
    if not lenient:  # what is wrong with it is said when all is compiled
        return embedded_schema(_closed(schema))
    followed, problems = _followed(schema, True, lenient=True)
    body.notes.extend(f"{field}: {one}" for one in problems)
    return embedded_schema(followed, lenient=True)


def _followed(schema: Any, otherwise: Any, *, lenient: bool) -> tuple[Any, list[str]]:
    """Return what can be followed of a schema, and what of it is ignored, each with its reason.

    otherwise: the schema in the place of one that cannot be followed at all. Unless lenient, nothing is ignored: raises
    BadRequest.
    """
    schema = _closed(schema)
    try:
        return schema, [*_warnings(embedded_schema(schema, lenient=lenient))]
    except BadRequest:
        if not lenient or not isinstance(schema, dict):
            raise
    schema, problems = copy.deepcopy(schema), []
    defined = {name: schema[name] for name in _DEFINITIONS if name in schema}
    for one in list(_schemas_in(schema)):
        for keyword in [name for name in _FALLIBLE if name in one]:
            try:
                _warnings(embedded_schema({**defined, keyword: one[keyword]}, lenient=True))
            except BadRequest as error:
                del one[keyword]
                problems.append(f"{keyword!r} is ignored: {_reason(error)}")
    try:
        return schema, [*problems, *_warnings(embedded_schema(schema, lenient=True))]
    except BadRequest as error:
        return otherwise, [f"the schema is ignored: {_reason(error)}"]


def _reason(error: BadRequest) -> str:
    """Return what a compiler says of a schema, without the place of that in the grammar."""
    return str(error).rpartition("JSON schema: ")[2]


@functools.lru_cache(maxsize=1024)
def _warnings(schema: str) -> Sequence[str]:
    """Return what a lenient schema's compiler ignores. schema: its expression. Raises BadRequest."""
    return grammar_warnings(f"start: {schema}")


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it lists, unless it says more of them.

    Clients that know other servers count on that: some even take `additionalProperties` out of what they send. A schema
    that combines others is returned as it is, since the properties of one may be those that another lists.
    """
    closed = copy.deepcopy(schema)
    found = list(_schemas_in(closed))
    if any(
        one.keys() & _COMBINING
        or len(one.keys() & {"properties", "anyOf", "$ref"}) > 1
        or not _DEFINED.fullmatch(str(one.get("$ref", "#")))
        for one in found
    ):
        return schema
    for one in found:
        listed, required = one.get("properties"), one.get("required", [])
        if not isinstance(listed, dict) or not isinstance(required, list) or one.keys() & _SAYING_MORE:
            continue
        if all(name in listed for name in required):
            one["additionalProperties"] = False
    return closed


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those in it, but for a schema that is true or false."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        members: Sequence[Any] = ()
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            members = list(value.values())
        elif key in _IN_SCHEMAS:
            members = value if isinstance(value, list) else [value]
        for member in members:
            yield from _schemas_in(member)


def _parsed(value: Any) -> Any:
    """Return a schema that may come as its text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"json is no JSON: {error}") from error


def _text(kind: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{kind} must be a text")
    return value


class AnswerGrammar:
    """Writes the grammar of one answer. special: id of each special token of the target, by its text."""

    def __init__(self, form: AnswerFormat, special: Mapping[str, int]) -> None:
        self.notes: list[str] = []
        """What is ignored in the schemas of functions."""
        self._form = form
        self._special = {text: token for text, token in special.items() if text.strip()}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        self._rules: list[str] = []

    def text(self, output: str, *, reasons: bool | None) -> str:
        """Return the grammar in which `output`, an expression, follows the reasoning.

        reasons: whether the prompt has begun the reasoning; None for a target that has none.
        """
        start = output
        if self._form.tools == "harmony":
            start = f"{self._harmony_analysis()} ({output})"
        elif self._form.reasoning is not None and reasons is not None:
            opening, closing = self._form.reasoning
            thought = f"{self._until(closing)} {_SPACE}"
            start = f"{thought} ({output})" if reasons else f"({self._literal(opening)} {thought})? ({output})"
        return "\n".join([f"start: {start}", *self._rules])

    def content(self, expression: str) -> str:
        """Return the expression of an answer whose content follows another one."""
        if self._form.tools != "harmony":
            return expression
        constrained = f'(" "? {self._literal(formats.CONSTRAIN)} "json")?'
        return f"{self._channel('final')} {constrained} {self._literal(formats.MESSAGE)} ({expression})"

    def calls(self, functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
        """Return the expression of an answer that calls functions and says nothing else. parallel: more than one."""
        call, form = self._call(functions), self._form.call
        if self._form.tools == "harmony":
            return call  # after which the target ends its turn
        calls = self._listed(call, parallel)
        if self._form.tools == "json":
            return f'{call} | "[" {calls} "]"'
        if self._form.tools == "llama3":
            return f"{self._literal(form.opening)}? {calls}"
        section = f"{self._literal(form.opening)} {calls} {self._literal(form.closing)}"
        return f"{section} ({_SPACE} {section})*" if form.separator is None and parallel else section

    def free(self, functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
        """Return the expression of an answer that may say anything, and in which calls have their schemas."""
        form = self._form.call
        if self._form.tools == "harmony":
            return f"{self.content(f'{_ANY}?')} | {self._call(functions)}"
        if self._form.tools in formats.BARE:
            begins = "{[" if self._form.tools == "json" else "{"
            return f"{self.calls(functions, parallel=parallel)} | /[^{re.escape(begins)}](?s:.*)/?"
        calls = self._listed(self._call(functions), parallel)
        section = f"{self._until(form.opening)} {calls} {self._literal(form.closing)}"
        return f"({section}){'*' if parallel else '?'} {self._without(form.marker)}"

    def _call(self, functions: Sequence[FunctionDefinition]) -> str:
        """Return a rule of one call of any of these functions."""
        return self._rule(" | ".join(map(self._call_of, functions)))

    def _call_of(self, function: FunctionDefinition) -> str:
        form = self._form.call
        if self._form.tools == "harmony":
            json_follows = f'{self._literal(formats.CONSTRAIN)} "json" {self._literal(formats.MESSAGE)}'
            header = self._channel(f"commentary to=functions.{function.name} ")
            return f"{header} {json_follows} {self._arguments(function)}"
        if form.key:  # in the same pieces as the expression of a schema: an answer may be either
            name, key = quoted(json.dumps(function.name)), quoted(json.dumps(form.key))
            arguments = self._arguments(function)
            return f'"{{" "\\"name\\"" {_COLON} {name} {_COMMA} {key} {_COLON} {arguments} "}}"'
        before = self._literal(form.before_name + function.name + form.after_name)
        return f"{before} {self._arguments(function)} {self._literal(form.after_arguments)}"

    def _listed(self, call: str, parallel: bool) -> str:
        """Return the expression of one call, or of those that share an opening and a closing."""
        separator = self._form.call.separator
        return f"{call} ({self._literal(separator)} {call})*" if separator is not None and parallel else call

    def _arguments(self, function: FunctionDefinition) -> str:
        """Return the expression of a function's arguments. Raises ApiError, which names it, for those of a strict one
        that cannot be followed."""
        lenient, given = not function.strict, {"type": "object", **(function.parameters or {"properties": {}})}
        try:
            schema, problems = _followed(given, {"type": "object"}, lenient=lenient)
        except BadRequest as error:
            raise invalid_value("tools", f"the parameters of the function {function.name!r}: {error}") from error
        form = formats.JSON if self._form.tools == "harmony" else self._form.call
        noted, self.notes = self.notes, problems
        if isinstance(form.arguments, Parameters):
            written = self._parameters(form.arguments, schema, lenient=lenient)
        elif form.arguments:
            written = self._bare(form.arguments, schema, schema, lenient=lenient)
        else:
            written = embedded_schema(schema, lenient=lenient)
        self.notes = [*noted, *(f"tools: {function.name}: {one}" for one in self.notes)]
        return written

    def _parameters(self, marks: Parameters, schema: Mapping[str, Any], *, lenient: bool) -> str:
        """Return the expression of arguments between marks."""
        pairs: dict[str, str] = {}
        for key, value in schema.get("properties", {}).items():
            value, kinds = resolved(value, schema), kinds_of(value, schema)
            after_key = marks.after_key if "string" in kinds else marks.after_key_of_json or marks.after_key
            if "string" not in kinds:
                defined = {name: schema[name] for name in _DEFINITIONS if name in schema and "$ref" in str(value)}
                written = embedded_schema({**defined, **value}, lenient=lenient)
            elif texts := _texts_in(_text_of(value, schema)):
                written = f"({' | '.join(map(quoted, [*texts, *_NULLS.intersection(kinds)]))})"
            else:
                written = ""
            after = self._literal(marks.after_value) if written else self._string(value, schema, marks.after_value)
            pairs[key] = f"{self._literal(marks.before_key + key + after_key)} {written} {after}"
        after_key = self._literal(marks.after_key)
        more = f"{self._literal(marks.before_key)} {_KEY} {after_key} {self._until(marks.after_value)}"
        return f"{self._chosen(pairs, schema, '')} {f'({more})*' if _is_open(schema) else ''}"

    def _bare(self, quote: str, schema: Any, root: Mapping[str, Any], *, lenient: bool) -> str:
        """Return the expression of a value with bare keys, in which strings stand between quotes.

        Lists and objects that are references, which may be without end, have any members.
        """
        inline = not (isinstance(schema, Mapping) and "$ref" in schema)
        schema, kinds = resolved(schema, root), kinds_of(schema, root)
        if "string" in kinds and kinds <= _TEXT:
            texts = [self._literal(f"{quote}{one}{quote}") for one in _texts_in(_text_of(schema, root))]
            texts = texts or [f"{self._literal(quote)} {self._string(schema, root, quote, null=False)}"]
            return " | ".join([*texts, *map(quoted, _NULLS.intersection(kinds))])
        if kinds == {"object"} and not _is_open(schema) and inline:
            properties = schema.get("properties", {})
            pairs = {
                key: f"{quoted(f'{key}:')} ({self._bare(quote, value, root, lenient=lenient)})"
                for key, value in properties.items()
            }
            return f'"{{" {self._chosen(pairs, schema, ",")} "}}"'
        if kinds == {"array"} and inline:
            item = self._rule(self._bare(quote, schema.get("items", True), root, lenient=lenient))
            return f'"[" ({item} ("," {item})*)? "]"'
        if not kinds & {"string", "object", "array"}:
            return embedded_schema(schema, lenient=lenient)
        self._note(schema)
        scalar = embedded_schema({"type": ["number", "boolean", "null"]})
        if not any(rule.startswith("bare:") for rule in self._rules):
            members = f'{_KEY} ":" bare ("," {_KEY} ":" bare)*'
            text = f"{self._literal(quote)} {self._until(quote)}"
            self._rules.append(f'bare: {text} | {scalar} | "[" (bare ("," bare)*)? "]" | "{{" ({members})? "}}"')
        return f'"{{" ({_KEY} ":" bare ("," {_KEY} ":" bare)*)? "}}"' if kinds == {"object"} else "bare"

    def _chosen(self, pairs: Mapping[str, str], schema: Mapping[str, Any], separator: str) -> str:
        """Return the expression of an object's members: those that it requires, and then any of the others."""
        names, between = schema.get("required", ()), self._literal(separator)
        rules = {key: self._rule(pair) for key, pair in pairs.items()}
        required = [rule for key, rule in rules.items() if key in names]
        others = [rule for key, rule in rules.items() if key not in names]
        first, rest = [], ""
        for rule in reversed(others):
            first.append(f"{rule} {rest}")
            rest = self._rule(f"({between} {rule})? {rest}")
        if required:
            return f"{f' {between} '.join(required)} {rest}"
        return f"({' | '.join(first)})?" if first else ""

    def _harmony_analysis(self) -> str:
        """Return the expression of what is thought before the answer, message after message."""
        begun = f"{self._channel('analysis')} {self._literal(formats.MESSAGE)}"
        return f'({begun} {self._until(formats.ENDS[0])} {self._literal(formats.START)} "assistant")*'

    def _channel(self, name: str) -> str:
        return self._literal(formats.CHANNEL + name)

    def _literal(self, text: str) -> str:
        """Return the expression of a text, in which special tokens are tokens."""
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else quoted(part)
            for part in self._split(text)
            if part
        )

    def _string(self, schema: Any, root: Mapping[str, Any], mark: str, *, null: bool = True) -> str:
        """Return the expression of a text by its schema, up to a mark, and of that. What is not followed is noted.

        Only a value that must be a text, or null, is held to more than its type. null: whether that is written here.
        """
        own = _text_of(schema, root)
        least, most = (
            given if type(given) is int and 0 < given <= _MAX_COUNTED else 0
            for given in (own.get("minLength"), own.get("maxLength"))
        )
        followed = {"maxLength"} if most else set[str]()
        content, empty = [f"(?s:.{{0,{most}}})" if most else _ANYTHING], True
        if least and (least <= most or not most):
            followed.add("minLength")
            content.append(f"(?s:.{{{least},}})")
            empty = False
        if isinstance(pattern := own.get("pattern"), str):
            with contextlib.suppress(BadRequest, re.error):
                found = _found(pattern)
                _warnings("T\nT: " + " & ".join(f"/{one}/" for one in (*content, found)))
                followed.add("pattern")
                content.append(found)
                empty = empty and re.search(pattern, "") is not None
        self._note(schema, followed)
        text = self._until(mark, content, empty=empty)
        null = null and bool(followed) and "null" in kinds_of(schema, root)
        return f"({text} | {self._literal(f'null{mark}')})" if null else text

    def _note(self, schema: Any, followed: Collection[str] = ()) -> None:
        """Note what a schema says of texts, but for what is followed."""
        said = {key for one in _schemas_in(schema) for key in _OF_TEXTS if key in one}
        self.notes += [f"{key!r} is ignored in a text between marks" for key in sorted(said.difference(followed))]

    def _until(self, mark: str, content: Sequence[str] = (_ANYTHING,), *, empty: bool = True) -> str:
        """Return the expression of a text up to a mark, and of that.

        content: regular expressions that all match the text. empty: whether there may be none.
        """
        begin, *rest = self._split(mark)
        ended = _escaped(begin)
        expression = " & ".join(f"/{one}{ended}/" for one in content)
        if rest:
            text = expression if len(content) == 1 else self._rule(expression, terminal=True)
            return f"{text}{'?' if empty and not begin else ''} {self._literal(mark[len(begin) :])}"
        if len(content) > 1:  # a mark that comes too soon must not become a part of the text
            expression = self._rule(f"{expression} & ~/{_ANYTHING}{ended}(?s:.+)/", terminal=True)
        return self._rule(expression, "[lazy]")

    def _without(self, marker: str) -> str:
        """Return the expression of any text in which a marker does not occur."""
        if marker in self._special:
            return f"{_ANY}?"
        return self._rule(rf"/(?s:.*)/ & ~/(?s:.*){_escaped(marker)}(?s:.*)/", terminal=True) + "?"

    def _rule(self, expression: str, attributes: str = "", *, terminal: bool = False) -> str:
        """Return the name of a rule for the expression."""
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def text_grammar(body: RequestBody) -> tuple[str, str]:
    """Return the grammar of a text's completion, and the field of the request that asks for it; both empty for none."""
    expression, field = output_expression(body)
    return (f"start: {expression}", field) if expression else ("", "")


def chat_grammar(
    body: ChatCompletionRequest, form: AnswerFormat, special: Mapping[str, int], prompt: str
) -> tuple[str, str]:
    """Return the grammar of a chat's answer, and the field of the request that asks for it; both empty for none.

    What of a schema is ignored is added to the body's notes. special: as of AnswerGrammar. prompt: the end of the
    prompt's text, which may have begun the reasoning. Raises ApiError. Call it on a thread: it may take a second.
    """
    grammar, parallel = AnswerGrammar(form, special), body.parallel_tool_calls is not False
    expression, field = output_expression(body)
    functions = body.functions
    if form.tools is None and (body.must_call or any(one.strict for one in functions)):
        raise unsupported(
            "tool_choice" if body.must_call else "tools", ": this server reads no calls (--answer-format)"
        )
    if body.must_call:
        output, field = grammar.calls(functions, parallel=parallel and body.named_function is None), "tool_choice"
    elif expression:
        calls = [f"({grammar.calls(functions, parallel=parallel)})"] if functions and form.tools else []
        output = " | ".join([grammar.content(expression), *calls])
    elif any(one.strict for one in functions):
        output, field = grammar.free(functions, parallel=parallel), "tools"
    else:
        return "", ""
    body.notes.extend(dict.fromkeys(grammar.notes))
    reasons = None if form.reasoning is None else prompt.rstrip().endswith(form.reasoning[0])
    return grammar.text(output, reasons=reasons), field


def _text_of(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema says of a value that is a text, if it is any; nothing where the value may be more."""
    if not isinstance(schema, Mapping) or not kinds_of(schema, root) <= _TEXT:
        return {}
    either = schema.get("anyOf", schema.get("oneOf"))
    texts = [resolved(one, root) for one in either] if isinstance(either, list) else []
    texts = [one for one in texts if kinds_of(one, root) == {"string"}]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], Mapping) else schema


def _texts_in(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts of which a value must be one, if it is any; none where it may be another."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    texts = [one for one in values if one is not None] if isinstance(values, list) else []
    return texts if all(isinstance(one, str) for one in texts) else []


def _found(pattern: str) -> str:
    """Return the regular expression of the texts in which a pattern is found.

    Raises BadRequest for an anchor that is not at an end, where grammars have none.
    """
    branches, depth = [list[str]()], 0
    for piece in re.findall(r"(?s)\\.|\[(?:\\.|[^\]\\])*\]|.", pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(piece)
    found = []
    for pieces in branches:
        begins, ends = not _BEGIN.isdisjoint(pieces[:1]), not _END.isdisjoint(pieces[-1:])
        inner = pieces[begins : len(pieces) - ends]
        if not (_BEGIN | _END).isdisjoint(inner):
            raise BadRequest(f"the pattern {pattern!r} has an anchor that is not at an end")
        found.append(f"{'' if begins else _ANYTHING}{''.join(inner)}{'' if ends else _ANYTHING}")
    return embedded_regex(f"(?:{'|'.join(found)})")[1:-1]


def _is_open(schema: object) -> bool:
    """Return whether an object may have members that its schema does not list."""
    given = schema if isinstance(schema, Mapping) else {}
    return given.get("additionalProperties", "properties" not in given) is not False


def _escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/#&~]", r"\\\g<0>", text).replace("\n", r"\n")
