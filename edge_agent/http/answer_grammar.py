"""Make the grammar of an answer: reasoning, then calls of tools, JSON or text, as the target's family writes them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge_agent.http.errors import invalid_value, unsupported
from edge_agent.http.parsing import formats
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.requests import ChatCompletionRequest, FunctionDefinition, RequestBody, json_problem
from edge_agent.sdk.grammars import COLON, COMMA, choice_expression, embedded_regex, embedded_schema, gbnf, quoted
from outrider.core.errors import BadRequest

_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
"""What `structured_outputs` may have, as vLLM names it, and `guided_` in older requests."""
_ANY = r"/(?s:.*)/"
_COMMA, _COLON = f"/{COMMA}/", f"/{COLON}/"
_SPACE = r"/[ \n]{1,2}/?"
_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern")
"""Options of `structured_outputs` for libraries that this server does not use."""
MAX_SCHEMA_BYTES = 1 << 16
"""Largest schema of an output, as JSON."""
_COMBINING = {"allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"}
"""Keywords under which several schemas say what an object may have."""
_SAYING_MORE = {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "dependentRequired"}
"""Keywords by which an object may be meant to have properties that its schema does not list."""
_DEFINED = re.compile(r"#|#/(\$defs|definitions)/[^/]+")
_FENCE = "```json"
_JSON_CALLS = {"json": ("arguments", "{["), "llama3": ("parameters", "{")}
"""Format of calls without an opening marker -> the key of the arguments, and the letters with which no text begins."""


def output_expression(body: RequestBody) -> tuple[str, str]:
    """Return what a request wants its output to follow, as an expression of a grammar, and the field that says so.

    Both are empty if the output is free. Raises ApiError for what is no such wish, or for more than one.
    """
    wishes: list[tuple[str, str, Any]] = []
    format_ = body.response_format or {"type": "text"}
    match format_.get("type"):
        case "json_object" if "schema" in format_:  # as llama.cpp has it
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
            return _expression(field, kind, value), field
        except BadRequest as error:
            raise invalid_value(field, f"{field}: {error}") from error
    return "", ""


def _expression(field: str, kind: str, value: Any) -> str:
    """Return the expression of one wish. Raises BadRequest, or ApiError for a schema that is too deep or too large."""
    match kind:
        case "json_object":
            return embedded_schema({"type": "object"})
        case "json_schema":
            if not isinstance(value, Mapping) or "schema" not in value:
                raise BadRequest("json_schema must be an object with a schema")
            return _checked_schema(field, value["schema"], lenient=not value.get("strict"))
        case "json":
            return _checked_schema(field, _parsed(value), lenient=False)
        case "regex":
            return embedded_regex(_text(kind, value))
        case "choice":
            return f"({choice_expression(value)})"
        case _:
            return f"%lark {{\n{gbnf(_text(kind, value))}\n}}"


def _checked_schema(field: str, schema: Any, *, lenient: bool) -> str:
    if problem := json_problem(schema, MAX_SCHEMA_BYTES):
        raise invalid_value(field, f"{field}: the schema {problem}")
    return embedded_schema(_closed(schema), lenient=lenient)


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
        elif key in ("anyOf", "prefixItems") and isinstance(value, list):
            members = value
        elif key in ("items", "additionalProperties", "contains", "additionalItems"):
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
    """Writes the grammar of one answer. special: id of each special token of the target, by its text.

    template: source of the target's chat template, which tells variants of a format.
    """

    def __init__(self, form: AnswerFormat, template: str, special: Mapping[str, int]) -> None:
        self._form = form
        self._template = template
        self._special = special
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
        form = self._form.tools
        if form == "harmony":
            return self._harmony_calls(functions)
        if (bare := _JSON_CALLS.get(form or "")) is not None:
            key, _ = bare
            call = self._either(functions, lambda one: _json_call(one, key))
            if form == "json":
                return f'{call} | "[" {_listed(call, ", ", parallel)} "]"'
            return f"{self._literal(formats.PYTHON_TAG)}? {_listed(call, '; ', parallel)}"
        opening, rest, repeated = self._marked_calls(functions, parallel=parallel)
        call = f"{self._literal(opening)} {rest}"
        return f"{call} ({_SPACE} {call})*" if repeated and parallel else call

    def free(self, functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
        """Return the expression of an answer that may say anything, and in which calls have their schemas."""
        form = self._form.tools
        if form == "harmony":
            return f"{self.content(f'{_ANY}?')} | {self._harmony_calls(functions)}"
        if (bare := _JSON_CALLS.get(form or "")) is not None:
            _, begins = bare
            return f"{self.calls(functions, parallel=parallel)} | /[^{re.escape(begins)}](?s:.*)/?"
        opening, rest, _ = self._marked_calls(functions, parallel=parallel)
        return f"({self._until(opening)} {rest}){'*' if parallel else '?'} {self._without(opening)}"

    def _marked_calls(self, functions: Sequence[FunctionDefinition], *, parallel: bool) -> tuple[str, str, bool]:
        """Return the marker before calls, the expression of what follows it, and whether the next call has its own."""
        either, literal = self._either, self._literal
        if self._form.tools == "deepseek":
            call = either(functions, self._deepseek_call)
            one = f"{literal(formats.CALL_BEGIN)} {call} {literal(formats.CALL_END)}"
            return formats.CALLS_BEGIN, f"{_listed(one, chr(10), parallel)} {literal(formats.CALLS_END)}", False
        if self._form.tools == "mistral" and formats.ARGS in self._template:
            arguments = literal(formats.ARGS)
            call = either(functions, lambda one: f"{quoted(one.name)} {arguments} {_arguments(one)}")
            return formats.TOOL_CALLS, call, True
        if self._form.tools == "mistral":
            call = either(functions, lambda one: _json_call(one, "arguments"))
            return formats.TOOL_CALLS, f'"[" {_listed(call, ", ", parallel)} "]"', False
        opening, closing = formats.TOOL_CALL
        call = either(functions, lambda one: _json_call(one, "arguments"))
        return opening, f"{_SPACE} {call} {_SPACE} {literal(closing)}", True

    def _deepseek_call(self, function: FunctionDefinition) -> str:
        separator, arguments = self._literal(formats.CALL_SEPARATOR), _arguments(function)
        if _FENCE in self._template:
            return f'"function" {separator} {quoted(f"{function.name}{chr(10)}{_FENCE}{chr(10)}")} {arguments} "\\n```"'
        return f"{quoted(function.name)} {separator} {arguments}"

    def _harmony_calls(self, functions: Sequence[FunctionDefinition]) -> str:
        """Return the expression of one call, after which the target ends its turn."""
        json = f'{self._literal(formats.CONSTRAIN)} "json" {self._literal(formats.MESSAGE)}'
        return self._either(
            functions,
            lambda one: f"{self._channel(f'commentary to=functions.{one.name} ')} {json} {_arguments(one)}",
        )

    def _harmony_analysis(self) -> str:
        """Return the expression of what is thought before the answer, message after message."""
        begun = f"{self._channel('analysis')} {self._literal(formats.MESSAGE)}"
        return f'({begun} {self._until(formats.ENDS[0])} {self._literal(formats.START)} "assistant")*'

    def _channel(self, name: str) -> str:
        return f"{self._literal(formats.CHANNEL)} {quoted(name)}"

    def _either(self, functions: Sequence[FunctionDefinition], expression: Callable[[FunctionDefinition], str]) -> str:
        """Return a rule of the expressions of all functions, of which one follows."""
        return self._rule(" | ".join(map(expression, functions)))

    def _literal(self, text: str) -> str:
        """Return the expression of a marker: a token of its own, or text."""
        return f"<[{self._special[text]}]>" if text in self._special else quoted(text)

    def _until(self, marker: str) -> str:
        """Return the expression of any text up to a marker, and of the marker."""
        if marker in self._special:
            return f"{_ANY}? {self._literal(marker)}"
        return self._rule(rf"/(?s:.*){_escaped(marker)}/", "[lazy]")

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
    body: ChatCompletionRequest, form: AnswerFormat, template: str, special: Mapping[str, int], prompt: str
) -> tuple[str, str]:
    """Return the grammar of a chat's answer, and the field of the request that asks for it; both empty for none.

    template, special: as of AnswerGrammar. prompt: the end of the prompt's text, which may have begun the reasoning.
    """
    grammar, parallel = AnswerGrammar(form, template, special), body.parallel_tool_calls is not False
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
    reasons = None if form.reasoning is None else prompt.rstrip().endswith(form.reasoning[0])
    return grammar.text(output, reasons=reasons), field


def _listed(call: str, separator: str, parallel: bool) -> str:
    """Return the expression of one call, or of any number of them between separators."""
    return f"{call} ({quoted(separator)} {call})*" if parallel else call


def _json_call(function: FunctionDefinition, key: str) -> str:
    """Return the expression of a call as JSON, in the same pieces as that of a schema: an answer may be either."""
    name, key = quoted(json.dumps(function.name)), quoted(json.dumps(key))
    return f'"{{" "\\"name\\"" {_COLON} {name} {_COMMA} {key} {_COLON} {_arguments(function)} "}}"'


def _arguments(function: FunctionDefinition) -> str:
    schema = {"type": "object", **(function.parameters or {"properties": {}})}
    return embedded_schema(_closed(schema), lenient=not function.strict)


def _escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/#&~]", r"\\\g<0>", text)
