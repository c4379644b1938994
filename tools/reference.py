"""Write the pages of `docs/reference` that come from the code: settings, commands and the fields of HTTP requests.

With `--check` nothing is written, and the exit status is 1 if a committed page is stale. The reference of the SDK is
made by mkdocstrings when the site is built (`tools/docstrings.py`).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic_settings import BaseSettings

from cloud_verifier.config import VerifierConfig
from cloud_verifier.distill import cli as distill
from cloud_verifier.distill.config import DistillConfig
from coordinator.cli import arguments as operator
from coordinator.config import CoordinatorConfig
from edge_agent import cli as edge
from edge_agent.config import EdgeSettings
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, ConversationRequest, RequestBody
from edge_agent.http.responses_api.request import ResponseRequest
from outrider.settings import choices_of, default_of, flag_of, metavar_of, table_of, variable_of

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
MODELS: tuple[type[BaseSettings], ...] = (CoordinatorConfig, VerifierConfig, EdgeSettings, DistillConfig)
BODIES: Mapping[str, type[BaseModel]] = {
    "Fields of all requests": RequestBody,
    "Fields of chats and responses": ConversationRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/chat/completions": ChatCompletionRequest,
    "POST /v1/responses": ResponseRequest,
}
NOTE = "<!-- Written by `make reference`; changes here are lost. -->\n"
_CONNECTION = {"--coordinator", "--ca", "--cert", "--cert-key", "--state-dir", "--tls", "--insecure"}
"""Flags of `outrider` that all commands which ask a coordinator have."""
_OUTPUT = {"--output", "--json"}
_DEFAULT, _VARIABLE = re.compile(r" ?\[default: ([^\]]*)\]"), re.compile(r" ?\[env: (\w+)\]")


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name, the same on every machine if XDG_CACHE_HOME is not set."""
    return {"settings.md": _settings(), "cli.md": _commands(), "http.md": _fields_of_requests()}


# --- settings


def _settings() -> str:
    head = f"""\
# Settings

{NOTE}
[Configuration](../configuration.md) says how to give them. The word behind a flag is the kind of its value. `_ms`,
`_s`, `_minutes`, `_days` and `_bytes` at the end of a name are its unit.

"""
    return head + "\n".join(map(_table_of_settings, MODELS))


def _table_of_settings(cls: type[BaseSettings]) -> str:
    head = f"## [{table_of(cls)}]\n\nVariables are `{variable_of(cls, '')}` and the name in capitals.\n\n"
    return f"{head}| setting | default | flag | |\n|---|---|---|---|\n" + "".join(
        _setting(cls, name) for name in cls.model_fields
    )


def _setting(cls: type[BaseSettings], name: str) -> str:
    field = cls.model_fields[name]
    flag = flag_of(cls, name)
    choices = choices_of(field)
    takes = f"{{{','.join(choices)}}}" if choices else "" if field.annotation is bool else metavar_of(name, field)
    if field.annotation is bool:
        flag = f"--[no-]{flag.removeprefix('--')}"
    shown = f"`{flag} {takes}`".replace(" `", "`") if flag else "none: a secret"
    return f"| `{name}` | {default_of(field)} | {shown} | {_cell(field.description or '')} |\n"


# --- commands


def _commands() -> str:
    head = f"""\
# Commands

{NOTE}
Each process takes its [settings](settings.md) as flags, too; they are left out here. `outrider-coordinator` and
`outrider-verifier` have no other flags. Commands of `outrider` that print something take `-o json` or
`--json`, too.

"""
    parts = [
        _program(operator.parser(), _CONNECTION | _OUTPUT),
        f"### The coordinator to ask\n\nThese flags stand before a command or behind it.\n\n{_connection()}",
        f"### Exit codes\n\n```text\n{operator.EPILOG}\n```\n",
        _program(edge.parser(), _flags(EdgeSettings)),
        _program(distill.parser(), _flags(DistillConfig)),
    ]
    return head + "\n".join(parts)


def _connection() -> str:
    parser = operator.parser()
    flags = [action for action in parser._actions if _CONNECTION & set(action.option_strings)]
    return _table(parser, flags)


def _flags(cls: type[BaseSettings]) -> set[str]:
    return {flag_of(cls, name) for name in cls.model_fields} | {"--config", "--check-config"}


def _program(parser: argparse.ArgumentParser, hidden: set[str]) -> str:
    """Return the section of a program with all its commands, without the flags that are `hidden`."""
    commands = "\n".join(_command(*found, hidden) for found in _leaves(parser, parser.prog, ""))
    return f"## {parser.prog}\n\n{parser.description}\n\n{commands}"


def _leaves(
    parser: argparse.ArgumentParser, path: str, text: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield each command that has no further ones: its words, what it does, and its parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield path, text, parser
    for action in nested:
        said = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, below in action.choices.items():
            yield from _leaves(below, f"{path} {name}", said[name])


def _command(path: str, text: str, parser: argparse.ArgumentParser, hidden: set[str]) -> str:
    flags = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction) and not hidden & set(action.option_strings)
    ]
    below = f"\n{_cell(parser.epilog)}\n" if parser.epilog and path.startswith("outrider ") else ""
    return f"### {path}\n\n{text[:1].upper()}{text[1:]}.\n\n{_table(parser, flags)}{below}"


def _table(parser: argparse.ArgumentParser, flags: Sequence[argparse.Action]) -> str:
    rows = "".join(f"| {_invocation(action)} | {_help(parser, action)} |\n" for action in flags)
    return f"| flag | default | |\n|---|---|---|\n{rows}" if rows else ""


def _invocation(action: argparse.Action) -> str:
    flags = ", ".join(action.option_strings[:1] if "--no-" in "".join(action.option_strings) else action.option_strings)
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    takes = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"`{f'{flags} {takes}'.strip()}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return two cells: what holds without the flag, and its text with the variable that sets it, too."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    default, variable = _DEFAULT.search(text), _VARIABLE.search(text)
    said = _cell(_DEFAULT.sub("", _VARIABLE.sub("", text))).replace("[", "\\[")
    also = f" (`{variable[1]}`)" if variable else ""
    return f"{_cell(default[1]) if default else ''} | {said}{also}"


# --- HTTP


def _fields_of_requests() -> str:
    head = f"""\
# HTTP requests

{NOTE}
The fields that `outrider-edge serve` reads, with their types. [HTTP server](../http.md) says what they do;
`GET /openapi.json` has the same as a schema. Fields without a text are those of OpenAI or vLLM.

"""
    return head + "\n".join(f"## {title}\n\n{_fields(cls)}" for title, cls in BODIES.items())


def _fields(cls: type[BaseModel]) -> str:
    """Return the public fields of a class as a table, each with its type and the docstring below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    rows = ""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True) if isinstance(tree, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            kind = ast.unparse(_bare(node.annotation)).removesuffix(" | None")
            kind = kind.replace(" | ", " or ").replace("JsonInteger", "int")
            needed = ", required" if node.value is None else ""
            rows += f"| `{node.target.id}` | `{kind}`{needed} | {_cell(str(said))} |\n"
    return f"| field | type | |\n|---|---|---|\n{rows}"


class _WithoutMetadata(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace `Annotated[T, ...]` by T, at any depth."""
        self.generic_visit(node)
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node


def _bare(annotation: ast.expr) -> ast.expr:
    bare: ast.expr = _WithoutMetadata().visit(annotation)
    return bare


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is stale")
    options = parser.parse_args()
    os.environ.pop("XDG_CACHE_HOME", None)
    stale = {name: text for name, text in pages().items() if text != _committed(name)}
    if options.check and stale:
        print(f"{', '.join(stale)} in docs/reference: stale, run `make reference`", file=sys.stderr)
        raise SystemExit(1)
    for name, text in stale.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _committed(name: str) -> str:
    page = FOLDER / name
    return page.read_text(encoding="utf-8") if page.exists() else ""


if __name__ == "__main__":
    main()
