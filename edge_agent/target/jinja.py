"""Run Jinja2 in a sandbox, as Hugging Face's chat templates need it; no other module imports it."""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping
from typing import Any

try:
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise ImportError("chat needs jinja2: pip install 'outrider[edge]'") from error

from outrider.core.errors import BadRequest, ModelRefused

MAX_RENDERED_CHARS = 16 << 20
"""Bound on the output: several times the longest prompt."""
_MAX_POWER_BITS = 4096


class _Generation(Extension):
    """An extension that renders `{% generation %}`, which marks the assistant's words for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that refuses products which would fill the memory, too."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_POWER_BITS:
                raise SecurityError("a power is too large")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                sized = isinstance(many, str | list | tuple) and isinstance(times, int)
                if sized and len(many) * times > MAX_RENDERED_CHARS:
                    raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def compiled(source: str) -> jinja2.Template:
    """Compile a template's source. Raises ModelRefused where that fails."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise ModelRefused(f"the target's chat template does not compile: {where}") from error
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelRefused(f"the target's chat template does not compile: {error}") from error


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template. Raises BadRequest for variables that it refuses, ModelRefused for output without end."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise ModelRefused(f"the target's chat template writes more than {MAX_RENDERED_CHARS} characters")
    except jinja2.TemplateError as error:
        what = f"the target's chat template refuses these messages{_line(error)}: {error}"
        raise BadRequest(what, field="messages") from error
    except (MemoryError, RecursionError) as error:
        raise ModelRefused(f"the target's chat template runs out of memory: {type(error).__name__}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise BadRequest(
            f"the target's chat template fails on these messages{_line(error)}: {type(error).__name__}: {error}",
            field="messages",
        ) from error
    return "".join(pieces)


def _line(error: BaseException) -> str:
    """Return at which line of the template an error was raised, as Jinja2 has it in the traceback."""
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> str:
    raise jinja2.TemplateError(reason)
