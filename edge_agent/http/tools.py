"""Check the tools of a chat's request, and the calls in its messages, within bounds on their number, size and depth."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from edge_agent.http.errors import invalid_value, unsupported

MAX_TOOLS = 128
MAX_TOOL_BYTES = 1 << 16
"""Largest definition of one tool, and the largest arguments of one call, as JSON."""
MAX_VARIABLES_BYTES = 1 << 14
"""Largest `chat_template_kwargs`, as JSON."""
MAX_DEPTH = 32
"""Most levels of lists and objects in a schema."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class FunctionDefinition(BaseModel, extra="allow", strict=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(BaseModel, extra="allow", strict=True):
    type: str
    function: FunctionDefinition | None = None


class CalledFunction(BaseModel, extra="allow", strict=True):
    name: str
    arguments: str


class CalledTool(BaseModel, extra="allow", strict=True):
    id: str | None = None
    type: str | None = None
    function: CalledFunction


def check_tools(tools: Sequence[ToolDefinition]) -> None:
    """Raise ApiError for tools that are not functions, are too many or too large, or share a name."""
    functions = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported(f"tools[{i}].type", f" unless it is 'function'; it is {tool.type[:40]!r}")
        if tool.function is None:
            raise invalid_value("tools", f"tools[{i}].function is missing")
        functions.append((f"tools[{i}].function", tool.function))
    check_functions(functions)


def check_functions(functions: Sequence[tuple[str, FunctionDefinition]]) -> None:
    """Raise ApiError for functions that are too many or too large, or share a name; each has its place's name."""
    if len(functions) > MAX_TOOLS:
        raise invalid_value("tools", f"tools has {len(functions)} items, must have at most {MAX_TOOLS}")
    names = set[str]()
    for field, function in functions:
        check_name(f"{field}.name", function.name, "tools")
        if function.name in names:
            raise invalid_value("tools", f"{field}.name is {function.name!r}, as another tool's is")
        names.add(function.name)
        if (kind := (function.parameters or {}).get("type", "object")) != "object":
            raise invalid_value("tools", f"{field}.parameters.type is {str(kind)[:40]!r}, must be 'object'")
        check_json("tools", field, function.model_dump(), MAX_TOOL_BYTES)


def template_tool(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as chat templates expect it, a JSON schema of a function, with what the request has of it."""
    function = tool.function.model_dump(exclude_unset=True, exclude={"strict"}) if tool.function is not None else {}
    return {"type": "function", "function": function}


def check_choice(choice: str | Mapping[str, Any] | None, names: Collection[str]) -> None:
    """Raise ApiError for a `tool_choice` that is none, or that no function fits. names: of the functions."""
    if choice in (None, "none", "auto"):
        return
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name not in names:
            message = f"tool_choice names the function {str(name)[:80]!r}, must name one of the tools"
            raise invalid_value("tool_choice", message)
    elif choice != "required":
        bound = "must be 'none', 'auto', 'required' or a function"
        raise invalid_value("tool_choice", f"tool_choice is {str(choice)[:40]!r}, {bound}")
    elif not names:
        raise invalid_value("tool_choice", "tool_choice is 'required', and there are no tools")


def check_calls(field: str, calls: Sequence[CalledTool]) -> None:
    """Raise ApiError for a message's calls that are too many or too large."""
    if len(calls) > MAX_TOOLS:
        raise invalid_value("messages", f"{field} has {len(calls)} items, must have at most {MAX_TOOLS}")
    for i, call in enumerate(calls):
        if call.type not in (None, "function"):
            raise unsupported(f"{field}[{i}].type", f" unless it is 'function'; it is {call.type[:40]!r}")
        check_call(f"{field}[{i}].function", call.function, "messages")


def check_call(field: str, function: CalledFunction, param: str) -> None:
    """Raise ApiError for a call whose name cannot be a function's, or whose arguments are too large or too deep."""
    check_name(f"{field}.name", function.name, param)
    if (size := len(function.arguments)) > MAX_TOOL_BYTES:
        raise invalid_value(param, f"{field}.arguments has {size} characters, must have at most {MAX_TOOL_BYTES}")
    try:
        arguments = json.loads(function.arguments)
    except ValueError:
        return  # a call that broke off; the template gets its text
    except RecursionError:
        raise invalid_value(param, f"{field}.arguments is nested too deeply") from None
    check_json(param, f"{field}.arguments", arguments, MAX_TOOL_BYTES)


def check_name(field: str, name: str, param: str) -> None:
    """Raise ApiError for a text that cannot be a function's name."""
    if not _NAME.fullmatch(name):
        bound = "must be 1 to 64 ASCII letters, digits, '_', '.' or '-'"
        raise invalid_value(param, f"{field} is {name[:80]!r}, {bound}")


def check_json(param: str, field: str, value: object, most_bytes: int) -> None:
    """Raise ApiError for a JSON value that is nested too deeply or too large."""
    level, depth = [value], 0
    while level := [member for one in level for member in _members(one)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise invalid_value(param, f"{field} is nested more than {MAX_DEPTH} levels deep")
    if (size := len(json.dumps(value))) > most_bytes:
        raise invalid_value(param, f"{field} has {size} bytes as JSON, must have at most {most_bytes}")


def _members(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
