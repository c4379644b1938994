"""Check the body of POST /v1/responses, and turn it into the chat that it stands for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from edge_agent.http.errors import invalid_body, invalid_value, unsupported
from edge_agent.http.requests import (
    CalledFunction,
    ChatCompletionRequest,
    ContentPart,
    ConversationRequest,
    FunctionDefinition,
    JsonInteger,
    ReasoningEffort,
)

_M = TypeVar("_M", bound=BaseModel)

_LOGPROBS = "message.output_text.logprobs"
_REFUSED = ("background", "conversation", "prompt", "top_logprobs")
"""Fields that would change the answer unless they are null, false or 0."""
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""A chat's names of fields, and those of this API."""


def _parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _items(value: object) -> object:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Parts = Annotated[list[ContentPart], BeforeValidator(_parts, json_schema_input_type=str | list[ContentPart])]


class Item(BaseModel, extra="allow", strict=True):
    """An item of a conversation: a message, a call of a function, its output, or reasoning."""

    type: str | None = None
    """None: a message."""
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    summary: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """Of a call of a function in a tool of type `namespace`."""
    arguments: str | None = None
    output: Parts | None = None


class Tool(BaseModel, extra="allow", strict=True):
    """A tool; what a function has beside its type is checked as a chat's function is."""

    type: str
    name: str | None = None
    tools: list[Tool] | None = None
    """Of a namespace: its functions, which a chat knows by the names of both."""


class TextOptions(BaseModel, extra="allow", strict=True):
    format: dict[str, Any] | None = None


class Reasoning(BaseModel, extra="allow", strict=True):
    effort: ReasoningEffort | None = None


class ResponseRequest(ConversationRequest):
    """The body that POST /v1/responses takes."""

    input: Annotated[list[Item], BeforeValidator(_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: JsonInteger | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in (None, False, 0):
                raise unsupported(name)
        if self.provenance:
            raise unsupported("provenance", " for a response")
        if self.choices > 1:
            raise unsupported("n", " beyond 1")
        if _LOGPROBS in (self.include or ()):
            raise unsupported("include", f" with {_LOGPROBS!r}")

    def unknown(self) -> list[str]:
        """Return the fields that are ignored; those of a chat that have no effect here are among them."""
        found = [name for name in super().unknown() if name not in _REFUSED]
        return found + [f"text.{name}" for name in (self.text and self.text.model_extra) or ()]

    @property
    def warnings(self) -> list[str]:
        """Return a sentence on each thing that is ignored although it might have been meant."""
        found = [f"fields that have no effect here: {self.ignored}"] if self.ignored else []
        found += [
            f"{place} is ignored: this server calls functions alone, and its type is {tool.type[:40]!r}"
            for place, _, tool in self._leaves
            if tool.type != "function"
        ]
        if self.truncation == "auto":
            found.append("truncation is 'disabled': an input that is too long is refused")
        return found

    @property
    def functions(self) -> list[FunctionDefinition]:
        """Return the functions among the tools and in namespaces. Raises ApiError for one that is none."""
        return [
            _checked(FunctionDefinition, {**(tool.model_extra or {}), **_named(tool.name, namespace)}, place)
            for place, namespace, tool in self._leaves
            if tool.type == "function"
        ]

    @property
    def _leaves(self) -> list[tuple[str, str | None, Tool]]:
        """Return the tools, those of namespaces in their places, each with its place and the name of its namespace."""
        leaves: list[tuple[str, str | None, Tool]] = []
        for i, tool in enumerate(self.tools or ()):
            if tool.type == "namespace":
                leaves += [(f"tools[{i}].tools[{j}]", tool.name, one) for j, one in enumerate(tool.tools or ())]
            else:
                leaves.append((f"tools[{i}]", None, tool))
        return leaves

    def named(self, function: str) -> dict[str, str]:
        """Return the name of a chat's function as the client knows it, and its namespace if it has one."""
        for _, namespace, tool in self._leaves:
            if namespace and _named(tool.name, namespace) == {"name": function}:
                return {"name": tool.name or "", "namespace": namespace}
        return {"name": function}

    def chat(self, context: Sequence[Item] = ()) -> ChatCompletionRequest:
        """Return the chat that this stands for, after the items of an earlier conversation. Raises ApiError."""
        self.refuse_unsupported()
        extra = self.model_extra or {}
        fields = {name: getattr(self, name) for name in ConversationRequest.model_fields}
        fields |= {name: value for name, value in extra.items() if name not in ChatCompletionRequest.model_fields}
        earlier = (("an earlier item", item) for item in context)
        given = ((f"input[{i}]", item) for i, item in enumerate(self.input))
        allowed = self._allowed()
        effort = self.reasoning.effort if self.reasoning is not None else None
        told = {
            "messages": _messages(self.instructions, itertools.chain(earlier, given)),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [
                {"type": "function", "function": function.model_dump(exclude_unset=True)}
                for function in self.functions
                if allowed is None or function.name in allowed
            ],
            "tool_choice": self._choice(),
            "reasoning_effort": effort,
            "response_format": self._format(),
        }
        fields |= {name: value for name, value in told.items() if value is not None}
        return _checked(ChatCompletionRequest, fields)

    def _allowed(self) -> set[str] | None:
        """Return the names that `tool_choice` allows; None for all."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        tools = choice.get("tools")
        named = [one for one in tools if _names_function(one)] if isinstance(tools, list) else []
        return {_named(one["name"], one.get("namespace"))["name"] for one in named}

    def _choice(self) -> str | dict[str, Any] | None:
        """Return a chat's `tool_choice`. Raises ApiError for a tool that is no function."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            mode = choice.get("mode")
            return mode if isinstance(mode, str) else "auto"
        if not _names_function(choice):
            raise unsupported(
                "tool_choice", f" unless it names a function; its type is {str(choice.get('type'))[:40]!r}"
            )
        return {"type": "function", "function": _named(choice["name"], choice.get("namespace"))}

    def _format(self) -> dict[str, Any] | None:
        """Return a chat's `response_format`; None where the text is free."""
        given = self.text.format if self.text is not None else None
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {name: given[name] for name in _SCHEMA_FIELDS if name in given}}


def _names_function(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str)


def _named(name: str | None, namespace: object) -> dict[str, str]:
    """Return the name of a chat's function, which has that of its namespace before it; empty if it has none."""
    before = f"{namespace.removesuffix('__')}__" if isinstance(namespace, str) and namespace else ""
    return {} if name is None else {"name": before + name}


def _checked(model: type[_M], value: object, *place: str | int) -> _M:
    """Return the value as this model. Raises ApiError naming the field below `place`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_body([{**found, "loc": ("body", *place, *found["loc"])} for found in error.errors()]) from None


# --- items to messages


def _messages(instructions: str | None, items: Iterable[tuple[str, Item]]) -> list[dict[str, Any]]:
    """Return a chat's messages for items, each with its place's name.

    System messages at the beginning become one, and so do an assistant's reasoning, text and calls: most templates know
    no others. So an output that names its tool and answers no call, by which Codex CLI tells of its own state, is told
    as a call without arguments and its result. Raises ApiError for an item that is none of a message, a call, an output
    or reasoning.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for field, item in items:
        match item.type:
            case None | "message":
                _add_message(messages, field, item)
            case "reasoning":
                if text := _text(f"{field}.content", item.content) or _text(f"{field}.summary", item.summary):
                    turn = _turn(messages)
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case "function_call":
                name = _named(_present(f"{field}.name", item.name), item.namespace)["name"]
                arguments = _present(f"{field}.arguments", item.arguments)
                _add_call(messages, field, _present(f"{field}.call_id", item.call_id), name, arguments)
            case "function_call_output":
                text, call_id = _text(f"{field}.output", item.output), item.call_id
                if call_id is None and item.name is not None:
                    call_id = hashlib.sha256(text.encode()).hexdigest()[:9]  # an id that Mistral's templates take
                    _add_call(messages, field, call_id, item.name, "{}")
                call_id = _present(f"{field}.call_id", call_id)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case other:
                raise unsupported(
                    f"{field}.type", f" as {other[:40]!r}: items are messages, calls, outputs and reasoning"
                )
    return messages


def _add_message(messages: list[dict[str, Any]], field: str, item: Item) -> None:
    role, text = _present(f"{field}.role", item.role), _text(f"{field}.content", item.content)
    if role == "assistant":
        turn = _turn(messages)
        turn["content"] = (turn["content"] or "") + text
    elif role == "user":
        messages.append({"role": role, "content": text})
    elif len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.append({"role": "system", "content": text})


def _add_call(messages: list[dict[str, Any]], field: str, call_id: str, name: str, arguments: str) -> None:
    function = _checked(CalledFunction, {"name": name, "arguments": arguments}, field)
    _turn(messages).setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(field: str, parts: Sequence[ContentPart] | None) -> str:
    """Return the text of all parts. Raises ApiError for one that is not text."""
    texts = []
    for i, part in enumerate(parts or ()):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            raise unsupported(f"{field}[{i}]", f" unless it is text; its type is {part.type[:40]!r}")
        texts.append(text)
    return "".join(texts)


def _present(field: str, value: str | None) -> str:
    """Return the value of an item's field. Raises ApiError where it is missing."""
    if value is None:
        raise invalid_value("input", f"{field} is missing")
    return value
