"""Write the SDK's reference, `docs/reference/sdk.md`, from the docstrings of what `edge_agent` exports.

With `--check` nothing is written, and the exit status is 1 if the committed page is stale. The source is read as text:
docstrings below fields, which Python forgets, are on the page, too.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, is_typeddict

import edge_agent
from edge_agent.sdk.types import Options
from outrider.core import errors
from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import TokenLogprobs
from outrider.core.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "sdk.md"
HEAD = """\
# SDK reference

What `edge_agent` exports, from its docstrings: `make reference` writes this page, `make lint` fails where it is stale.
[sdk.md](../sdk.md) is the guide.
"""
CLIENTS = ("AsyncClient", "Client", "CompletionStream", "BlockingStream", "SkeletonStream", "BlockingSkeleton")
RESULTS = ("Completion", "Chunk", "Skeleton", "SkeletonPoint", "Statistics", "Usage")
SETTINGS = ("Timeout", "ClientTls", "EdgeSettings")
BESIDE = (Options, SamplingParams, TokenLogprobs)
"""Types of arguments and results that `edge_agent` itself does not export."""
_INDENT = "    "
_ITEM = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): ")
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def page() -> str:
    """Return the page. Raises ValueError for an export that has no section."""
    named = {*CLIENTS, *RESULTS, *SETTINGS}
    failures = [name for name in edge_agent.__all__ if issubclass(getattr(edge_agent, name), OutriderError)]
    if unplaced := set(edge_agent.__all__) - named - set(failures):
        raise ValueError(f"{', '.join(sorted(unplaced))} of edge_agent: give each a section in tools/reference.py")
    parts = [HEAD]
    for title, names in (("Clients and streams", CLIENTS), ("Results", RESULTS), ("Settings", SETTINGS)):
        parts += [f"## {title}\n", *(_class(getattr(edge_agent, name)) for name in names)]
    parts += ["## Other types\n", *(_class(cls, f"{cls.__module__}.{cls.__name__}") for cls in BESIDE)]
    parts += ["## Errors\n", _tree(), *(_class(getattr(edge_agent, name)) for name in failures)]
    return "\n".join(parts)


def _class(cls: type[Any], title: str = "") -> str:
    """Return the section of a class: its docstring, its constructor, its fields and methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if not isinstance(tree, ast.ClassDef):
        raise TypeError(f"{cls} is not made by a class statement, so there is no text to read")
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    parts = [f"### {title or cls.__name__}", _prose(_docstring(tree))]
    parts += [_signature(cls, method) for method in methods if method.name == "__init__" and cls.__name__ == CLIENTS[0]]
    parts += [_environment(cls), _all_fields(cls, tree)]
    parts += [_method(method) for method in methods if _is_for_callers(cls, method)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _is_for_callers(cls: type[Any], method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether callers use a method; they only read results and catch errors."""
    fills = method.returns is not None and ast.unparse(method.returns) == "None"
    read_only = issubclass(cls, OutriderError) or (cls.__name__ in RESULTS and fills)
    return not method.name.startswith("_") and not read_only


def _environment(cls: type[Any]) -> str:
    """Return how the environment names the fields of a settings class; "" for other classes."""
    prefix = getattr(cls, "model_config", {}).get("env_prefix")
    return f"In the environment a field is `{prefix}<NAME>`." if prefix else ""


def _all_fields(cls: type[Any], tree: ast.ClassDef) -> str:
    listed = list(_fields(tree))
    if not is_typeddict(cls):
        return "\n".join(listed)
    return "```text\n" + "\n".join(line.removeprefix("- ").strip("`") for line in listed) + "\n```"


def _fields(tree: ast.ClassDef) -> Iterator[str]:
    """Yield the public fields, each with its type, its default and the docstring below it."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.target.id[0] == "_":
            continue
        if (kind := ast.unparse(_bare(node.annotation))).startswith("ClassVar"):
            continue
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        if said or not isinstance(node.value, ast.Call) or ast.unparse(node.value.func) != "field":  # else it is inner
            yield f"- `{node.target.id}: {kind}{_default(node.value)}`" + (f": {_joined(str(said))}" if said else "")


def _bare(annotation: ast.expr) -> ast.expr:
    """Return a type without the metadata of Annotated."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        inner = annotation.slice
        return inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    return annotation


def _default(value: ast.expr | None) -> str:
    """Return a default as a caller sees it, with the bounds of a pydantic field."""
    if value is None or (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return ""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "Field":
        return f" = {ast.unparse(value)}"
    given = {word.arg or "": word.value for word in value.keywords}
    default = value.args[0] if value.args else given.get("default")
    shown = f" = {ast.unparse(default)}" if default is not None else ""
    bounds = [f"{words} {ast.unparse(given[name])}" for name, words in _BOUNDS.items() if name in given]
    return shown + (f" ({', '.join(bounds)})" if bounds else "")


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a heading with the signature, and the docstring."""
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        heading = f"`.{node.name}` -> `{ast.unparse(node.returns) if node.returns else 'None'}`"
    else:
        begin = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
        heading = f"`{begin}.{node.name}({_arguments(node.args)})`"
        heading += f" -> `{ast.unparse(node.returns)}`" if node.returns else ""
    return f"**{heading}**\n\n{_prose(_docstring(node))}".strip()


def _signature(cls: type[Any], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the signature with one argument a line and the values of constants."""
    known = vars(sys.modules[cls.__module__])
    arguments = [re.sub(r"\b[A-Z_]{4,}$", lambda found: repr(known[found[0]]), each) for each in _each(node.args)]
    listed = f",\n{_INDENT}".join(arguments)
    return f"```text\n{cls.__name__}(\n{_INDENT}{listed},\n)\n```"


def _arguments(arguments: ast.arguments) -> str:
    return ", ".join(_each(arguments))


def _each(arguments: ast.arguments) -> Iterator[str]:
    """Yield the arguments as they are written, without self and cls."""
    bare = ast.unparse(arguments)
    for part in _split(bare):
        if part not in ("self", "cls"):
            yield re.sub(r"(: .+?)=(?!=)", r"\1 = ", part)


def _split(text: str) -> Iterator[str]:
    """Split a text at the commas outside brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown: indented lines are a program, lines that begin with a name and a colon a list."""
    parts: list[list[str]] = [[]]
    for line in docstring.splitlines():
        in_program = bool(parts[-1]) and parts[-1][0].startswith(_INDENT)
        if line.startswith(_INDENT) != in_program and line.strip():
            parts.append([])
        elif not line.strip() and not in_program:
            parts.append([])
            continue
        parts[-1].append(line)
    return "\n\n".join(_program(part) if part[0].startswith(_INDENT) else _items(part) for part in parts if part)


def _program(lines: Sequence[str]) -> str:
    return "```python\n" + textwrap.dedent("\n".join(lines)).strip("\n") + "\n```"


def _items(lines: Sequence[str]) -> str:
    items: list[str] = []
    for line in lines:
        in_list = not items or items[-1].startswith(("- ", "  "))
        if in_list and (found := _ITEM.match(line)):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            items.append(f"- {names}: {line[found.end() :]}")
        else:
            items.append(f"  {line}" if items and in_list else line)
    return "\n".join(items)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _tree() -> str:
    """Return the tree of errors as their module draws it."""
    drawn = re.search(r"^    OutriderError\n(?:    .*\n)+", errors.__doc__ or "", re.MULTILINE)
    return f"```text\n{textwrap.dedent(drawn[0] if drawn else '')}```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.relative_to(ROOT)} is stale, run `make reference`", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
