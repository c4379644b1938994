"""Read text that comes in pieces, whatever the pieces, and collect what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

from edge_agent.target.detokenizer import overlap

_A = TypeVar("_A")

Kind = Literal["content", "reasoning", "tool_call"]
Reading = Generator[None, None, _A]
"""A reading yields where it needs more text, and goes on once there is more or the end is known."""

MAX_NAME = 128
"""Most characters of a function's name, or of a key."""
_MAX_SPACE = 256
"""Most characters of white space between the parts of a call; more is text."""
_MAX_STRING = 4096
"""Most characters of arguments that are written as a JSON string."""
_MAX_HELD = 1 << 16
"""Most characters of arguments that come before their function's name, and wait for it."""
_KEYS = ('"name"', '"arguments"', '"parameters"', '"id"', '"type"')
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
    was split. A reading may go back to an earlier place (`at`) unless something was passed on since.
    """

    def __init__(self) -> None:
        self.at = 0
        self.unfinished = False
        """Whether the last tool call lacks its end."""
        self._text = ""
        self._ended = False
        self._calls = 0
        self._deltas: list[Delta] = []

    # --- text in, deltas out

    def add(self, text: str, *, ended: bool = False) -> None:
        self._text += text
        self._ended = ended

    def taken(self) -> list[Delta]:
        """Return the deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def emit(self, kind: Kind, text: str) -> None:
        """Append text to the answer; for a tool call, to the arguments of the last one."""
        if text:
            self._deltas.append(Delta(kind, text, max(0, self._calls - 1) if kind == "tool_call" else 0))

    def begin_call(self, name: str) -> None:
        """Begin a tool call, whose arguments follow."""
        self._deltas.append(Delta("tool_call", "", self._calls, name))
        self._calls += 1
        self.unfinished = True

    def _upto(self, end: int) -> str:
        """Consume and return the text up to a place, and forget it and what came before."""
        found, self._text, self.at = self._text[self.at : end], self._text[end:], 0
        return found

    # --- readings

    def passed(self, kind: Kind, *markers: str, written: Callable[[str], str] = str) -> Reading[str]:
        """Emit text up to the first of the markers, which is returned and comes next; "" at the end of the text.

        Only text that may be the beginning of a marker waits. written: makes of the text what is emitted.
        """
        while True:
            found = [(place, -len(one), one) for one in markers if (place := self._text.find(one, self.at)) >= 0]
            if found:
                place, _, marker = min(found)
                self.emit(kind, written(self._upto(place)))
                return marker
            rest = self._text[self.at :]
            waiting = 0 if self._ended else max((overlap(rest, one) for one in markers), default=0)
            self.emit(kind, written(self._upto(len(self._text) - waiting)))
            if self._ended:
                return ""
            yield

    def until(self, *markers: str, most: int = MAX_NAME) -> Reading[tuple[str, str]]:
        """Consume and return the text up to the first of the markers, and that marker.

        Returns the rest of the text and "" where it ends before, and ("", "") after more than `most` characters.
        """
        while True:
            limit = self.at + most + max(map(len, markers))
            found = [(place, one) for one in markers if (place := self._text.find(one, self.at, limit)) >= 0]
            if found or self._ended or len(self._text) >= limit:
                break
            yield
        if not found and len(self._text) >= limit:
            return "", ""
        place, marker = min(found, default=(len(self._text), ""))
        text, self.at = self._text[self.at : place], place + len(marker)
        return text, marker

    def breaks_off(self, *options: str) -> bool:
        """Return whether the text has ended within one of the options, which `literal` has not found; drop that end."""
        rest = self._text[self.at :]
        if ended := any(one.startswith(rest) for one in options):
            self.at = len(self._text)
        return ended

    def peek(self) -> Reading[str]:
        """Return the next letter without consuming it; "" at the end."""
        while self.at == len(self._text) and not self._ended:
            yield
        return self._text[self.at : self.at + 1]

    def literal(self, *options: str) -> Reading[str]:
        """Consume and return the longest option that comes next; "" where none does."""
        while True:
            rest = self._text[self.at : self.at + max(map(len, options))]
            if self._ended or not any(len(rest) < len(one) and one.startswith(rest) for one in options):
                break
            yield
        found = max((one for one in options if rest.startswith(one)), key=len, default="")
        self.at += len(found)
        return found

    def space(self) -> Reading[None]:
        """Drop white space, of which there is little."""
        for _ in range(_MAX_SPACE):
            if (yield from self.peek()) not in (" ", "\t", "\r", "\n"):
                return
            self.at += 1

    def text(self, text: str) -> Reading[bool]:
        """Consume a text, in which a line's end stands for any white space or none; False for another text."""
        for number, part in enumerate(text.split("\n")):
            if number:
                yield from self.space()
            if part and not (yield from self.literal(part)):
                return False
        return True

    def skip(self, *options: str) -> Reading[None]:
        """Drop white space, what there is of these texts, and the white space after it."""
        yield from self.space()
        if (yield from self.literal(*options)):
            yield from self.space()

    def word(self) -> Reading[str]:
        """Consume letters, digits, `_`, `.` and `-`; "" where there are none, or more than a name has."""
        while True:
            found = _WORD.match(self._text, self.at, self.at + MAX_NAME + 1)
            end = found.end() if found else self.at
            if end < len(self._text) or self._ended or end - self.at > MAX_NAME:
                break
            yield
        if end - self.at > MAX_NAME:
            return ""
        word, self.at = self._text[self.at : end], end
        return word

    def string(self, most: int = MAX_NAME) -> Reading[str | None]:
        """Consume a JSON string of at most `most` letters, and return it decoded; None for anything else."""
        while True:
            limit = self.at + most + 2
            if found := _STRING.match(self._text, self.at, limit):
                self.at = found.end()
                return _decoded(found[0])
            begun = self._text[self.at : limit]
            if self._ended or len(begun) == most + 2 or (begun and not _STRING_BEGUN.fullmatch(begun)):
                return None
            yield

    def _object(self, *, held: bool = False, depth: int = 0) -> Reading[str | None]:
        """Consume a JSON object; its strings are not checked, nor is its grammar. depth: its brackets that are open.

        Its text is emitted as it comes, unless it is held. Returns the text that was held, "" for what was emitted,
        and None where the object breaks off, cannot be JSON, or has too much to be held.
        """
        begin, place, quoted, escaped = self.at, self.at, False, False
        while True:
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
            over = place < len(self._text) or not depth or self._ended
            if not held:
                self.emit("tool_call", self._upto(place))
                begin = place = 0
            elif place - begin > _MAX_HELD:
                return None
            if over:
                self.at = place
                return None if depth else self._text[begin:place]
            yield

    def arguments(self, name: str) -> Reading[bool]:
        """Read a JSON object as the arguments of a call of `name`; False, with nothing begun, where there is none."""
        if (yield from self.peek()) != "{":
            return False
        self.begin_call(name)
        self.unfinished = (yield from self._object()) is None
        return True

    def call(self, names: Collection[str] | None) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}` as a call; False, with nothing begun, where there is none, or one of
        a function that is none of these names (None: of any).

        The keys may come in any order, `parameters` stands for `arguments`, and `id` and `type` are skipped. So is the
        second of two braces, which small models copy from Qwen's template.
        """
        name, arguments = "", "{}"
        closing = "}" * len((yield from self.literal("{", "{{")))
        if not closing:
            return False
        while True:
            key = yield from self._key()
            if key == "name":
                name = (yield from self.string()) or ""
                if not name or (names is not None and name not in names):
                    return False
            elif key in ("arguments", "parameters") and name and (yield from self.arguments(name)):
                if not self.unfinished:
                    yield from self.space()
                    if (yield from self.literal(",", closing)) == ",":
                        yield from self._object(held=True, depth=1)
                return True
            elif key in ("arguments", "parameters"):
                text = yield from self._held_arguments()
                if text is None:
                    return False
                arguments = text
            elif not key or (yield from self.string()) is None:
                return False
            yield from self.space()
            separator = yield from self.literal(",", closing)
            if separator == closing and name:
                self.begin_call(name)
                self.emit("tool_call", arguments)
                self.unfinished = False
                return True
            if separator != ",":
                return False

    def _key(self) -> Reading[str]:
        """Consume a key of a call and its colon; "" for anything else."""
        yield from self.space()
        key = yield from self.literal(*_KEYS)
        yield from self.space()
        if not (yield from self.literal(":")):
            return ""
        yield from self.space()
        return key.strip('"')

    def _held_arguments(self) -> Reading[str | None]:
        """Consume arguments as null, as a JSON string, or as an object before its function's name."""
        match (yield from self.peek()):
            case "n":
                return "{}" if (yield from self.literal("null")) else None
            case '"':
                return (yield from self.string(_MAX_STRING))
            case "{":
                return (yield from self._object(held=True))
        return None


def _decoded(string: str) -> str | None:
    """Return the text of a JSON string; None for one that is invalid, or no Unicode."""
    try:
        text = json.loads(string)
        text.encode()
    except ValueError:
        return None
    return str(text)
