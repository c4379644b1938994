"""Read text that comes in pieces, whatever the pieces, and collect what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from edge_agent.target.detokenizer import overlap

_A = TypeVar("_A")

Kind = Literal["content", "reasoning", "tool_call"]
Reading = Generator[None, None, _A]
"""A reading yields where it needs more text, and goes on once there is more or the end is known."""

MAX_NAME = 128
"""Most characters of a function's name, or of a key beside it."""
_MAX_SPACE = 256
"""Most characters of white space between the parts of a call; more is text."""
_MAX_STRING = 4096
"""Most characters of arguments that are written as a JSON string."""
_MAX_HELD = 1 << 16
"""Most characters of arguments that come before their function's name, and wait for it."""
_KEYS = ("name", "arguments", "parameters", "id", "type")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')
_STRING_BEGUN = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+\\?')
_WORD = re.compile(r"[\w.\-]*+")
_JSON_LETTERS = frozenset("+-.,:eE \t\r\n0123456789truefalsn")
"""What stands outside strings and brackets of a JSON value."""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: of its content, of its reasoning, or of the arguments of one of its tool calls."""

    kind: Kind
    text: str
    index: int = 0
    """The number of the tool call, from 0 on."""
    name: str = ""
    """The function's name, in the first delta of a tool call."""


class TextReader:
    """Holds the text that is not read yet, and the deltas of what is.

    A method that returns a Reading consumes what it recognises, and decides by the text alone, never by how the text
    was split. Text may be held, and read again from there; a call that has begun is never taken back.
    """

    def __init__(self) -> None:
        self.unfinished = False
        """Whether the last tool call lacks its end."""
        self._text = ""
        self._at = 0
        self._ended = False
        self._holds = False
        self._calls = 0
        self._deltas: list[Delta] = []

    # --- text in, deltas out

    def add(self, text: str, *, ended: bool = False) -> None:
        if not self._holds:
            self._text, self._at = self._text[self._at :], 0
        self._text += text
        self._ended = ended

    def taken(self) -> list[Delta]:
        """Return the deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def emit(self, kind: Kind, text: str) -> None:
        """Append text to the answer; for a tool call, to the arguments of the last one."""
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.kind == kind:
            self._deltas[-1] = replace(last, text=last.text + text)
        elif text:
            self._deltas.append(Delta(kind, text, max(0, self._calls - 1) if kind == "tool_call" else 0))

    def begin_call(self, name: str) -> None:
        """Begin a tool call, whose arguments follow."""
        self._holds = False
        self._deltas.append(Delta("tool_call", "", self._calls, name))
        self._calls += 1
        self.unfinished = True

    def end_call(self) -> None:
        self.unfinished = False

    # --- text that may have to be read again

    def hold(self) -> int:
        """Return the present place, to which `rewind` goes back unless a call begins before."""
        self._holds = True
        return self._at

    def rewind(self, place: int) -> None:
        self._at, self._holds = place, False

    def release(self) -> None:
        self._holds = False

    # --- readings

    def pass_until(self, kind: Kind, *markers: str) -> Reading[str]:
        """Emit text up to the first of the markers, which is consumed and returned; "" at the end of the text.

        Only text that may be the beginning of a marker waits. A marker's first letter is nowhere else in a marker.
        """
        while True:
            found = [(place, -len(one), one) for one in markers if (place := self._text.find(one, self._at)) >= 0]
            if found:
                place, _, marker = min(found)
                self.emit(kind, self._text[self._at : place])
                self._at = place + len(marker)
                return marker
            waiting = 0 if self._ended else max((overlap(self._text[self._at :], one) for one in markers), default=0)
            end = len(self._text) - waiting
            self.emit(kind, self._text[self._at : end])
            self._at = end
            if self._ended:
                return ""
            yield

    def peek(self) -> Reading[str]:
        """Return the next letter without consuming it; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def literal(self, *options: str) -> Reading[str]:
        """Consume and return the longest option that comes next; "" where none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            if self._ended or not any(len(rest) < len(one) and one.startswith(rest) for one in options):
                break
            yield
        found = max((one for one in options if rest.startswith(one)), key=len, default="")
        self._at += len(found)
        return found

    def space(self) -> Reading[None]:
        """Drop white space, of which there is little."""
        for _ in range(_MAX_SPACE):
            if (yield from self.peek()) not in (" ", "\t", "\r", "\n"):
                return
            self._at += 1

    def word(self) -> Reading[str]:
        """Consume letters, digits, `_`, `.` and `-`; "" where there are none, or more than a name has."""
        while True:
            end = self._word_end()
            if end < len(self._text) or self._ended or end - self._at > MAX_NAME:
                break
            yield
        found = self._text[self._at : end]
        if len(found) > MAX_NAME:
            return ""
        self._at = end
        return found

    def string(self, most: int = MAX_NAME) -> Reading[str | None]:
        """Consume a JSON string of at most `most` letters, and return it decoded; None for anything else."""
        while True:
            limit = self._at + most + 2
            if found := _STRING.match(self._text, self._at, limit):
                self._at = found.end()
                return _decoded(found[0])
            begun = self._text[self._at : limit]
            if self._ended or len(begun) == most + 2 or (begun and not _STRING_BEGUN.fullmatch(begun)):
                return None
            yield

    def value(self, emit: Callable[[str], None], depth: int = 0) -> Reading[bool]:
        """Pass the text of a JSON object on as it comes; False where it breaks off, or cannot be JSON.

        Its strings are not checked, nor is its grammar. depth: how many of its brackets are open already.
        """
        quoted = escaped = False
        while True:
            begin, place = self._at, self._at
            while place < len(self._text):
                letter = self._text[place]
                if quoted:
                    quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
                elif letter == '"':
                    quoted = True
                elif letter in "{[":
                    depth += 1
                elif letter in "}]":
                    depth -= 1
                elif letter not in _JSON_LETTERS:
                    break
                place += 1
                if not depth:
                    break
            self._at = place
            emit(self._text[begin:place])
            if place < len(self._text) or not depth or self._ended:
                return not depth
            yield

    def arguments(self, name: str) -> Reading[bool]:
        """Read a JSON object as the arguments of a call of `name`; False, with nothing begun, where there is none."""
        if (yield from self.peek()) != "{":
            return False
        self.begin_call(name)
        self.unfinished = not (yield from self.value(lambda text: self.emit("tool_call", text)))
        return True

    def call(self, accepts: Callable[[str], bool]) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}` as a call; False, with nothing begun, where there is none.

        The keys may come in any order, `parameters` stands for `arguments`, and `id` and `type` are skipped.
        """
        name, arguments = "", "{}"
        if not (yield from self.literal("{")):
            return False
        while True:
            key = yield from self._key()
            if key == "name":
                name = (yield from self.string()) or ""
                if not name or not accepts(name):
                    return False
            elif key in ("arguments", "parameters") and name and (yield from self.arguments(name)):
                if not self.unfinished:
                    yield from self.space()
                    if (yield from self.literal(",", "}")) == ",":
                        yield from self.value(lambda text: None, depth=1)
                return True
            elif key in ("arguments", "parameters"):
                text = yield from self._held_arguments()
                if text is None:
                    return False
                arguments = text
            elif not key or (yield from self.string()) is None:
                return False
            yield from self.space()
            separator = yield from self.literal(",", "}")
            if separator == "}" and name:
                self.begin_call(name)
                self.emit("tool_call", arguments)
                self.end_call()
                return True
            if separator != ",":
                return False

    def _key(self) -> Reading[str]:
        """Consume a key of a call and its colon; "" for anything else."""
        yield from self.space()
        key = yield from self.string()
        if key not in _KEYS:
            return ""
        yield from self.space()
        if not (yield from self.literal(":")):
            return ""
        yield from self.space()
        return key

    def _held_arguments(self) -> Reading[str | None]:
        """Consume arguments as null, as a JSON string, or as an object before its function's name."""
        first = yield from self.peek()
        if first == "n":
            return "{}" if (yield from self.literal("null")) else None
        if first == '"':
            return (yield from self.string(_MAX_STRING))
        begin, pieces = self._at, list[str]()
        if first != "{":
            return None
        reading = self.value(pieces.append)
        while True:
            try:
                next(reading)
            except StopIteration as end:
                return "".join(pieces) if end.value and self._at - begin <= _MAX_HELD else None
            if len(self._text) - begin > _MAX_HELD:
                return None
            yield

    def _word_end(self) -> int:
        found = _WORD.match(self._text, self._at, self._at + MAX_NAME + 1)
        return found.end() if found else self._at


def _decoded(string: str) -> str | None:
    """Return the text of a JSON string; None for one that is invalid, or no Unicode."""
    try:
        text = json.loads(string)
        text.encode()
    except ValueError:
        return None
    return str(text)
