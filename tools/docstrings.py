"""Make docstrings Markdown for mkdocstrings: lines that begin with names and a colon become a list."""

from __future__ import annotations

import re

import griffe

_ITEM = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): ")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring as Markdown. A paragraph whose first line names an argument is a list of arguments."""
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", text)))


def _paragraph(text: str) -> str:
    if not _ITEM.match(text):
        return text
    lines = []
    for line in text.splitlines():
        if found := _ITEM.match(line):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {line[found.end() :]}")
        else:
            lines.append(f"    {line.strip()}")
    return "\n".join(lines)
