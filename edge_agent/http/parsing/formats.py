"""Know how each family of models writes tool calls and reasoning, and parse an answer of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from edge_agent.http.parsing.reader import Delta, Reading, TextReader

ToolFormat = Literal["hermes", "llama3", "mistral", "deepseek", "harmony", "json"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
_Accepts = Callable[[str], bool]

TOOL_CALL = ("<tool_call>", "</tool_call>")
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, CALL_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_PARTS = 12

_MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": TOOL_CALL,
    "llama3": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, CALL_ID, ARGS),
    "deepseek": (CALLS_BEGIN, CALL_BEGIN, CALL_SEPARATOR, CALL_END, CALLS_END),
    "harmony": (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    "json": (),
}
_TELLTALES: tuple[tuple[str, ToolFormat], ...] = (
    (CHANNEL, "harmony"),
    (CALLS_BEGIN, "deepseek"),
    (TOOL_CALLS, "mistral"),
    (TOOL_CALL[0], "hermes"),
    (PYTHON_TAG, "llama3"),
    ("<|start_header_id|>", "llama3"),
)
"""Texts in a chat template's source, and the format that the first of them stands for."""
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class AnswerFormat:
    """The form in which a target writes tool calls and reasoning."""

    tools: ToolFormat | None
    """None: tool calls are not looked for."""
    reasoning: tuple[str, str] | None
    """The texts around reasoning, which comes first; None if there is none. Harmony has channels instead."""

    @classmethod
    def of(cls, template: str, chosen: str = "auto") -> AnswerFormat:
        """Return the format that a chat template's source speaks of; "json" where it speaks of none.

        chosen: one of TOOL_FORMATS takes precedence, "auto" does not; "none" takes all text as content.
        """
        if chosen == "none":
            return cls(None, None)
        found: ToolFormat = next((tools for text, tools in _TELLTALES if text in template), "json")
        tools = next((one for one in TOOL_FORMATS if one == chosen), found)
        return cls(tools, next((pair for pair in _REASONING if pair[1] in template), None))

    def markers(self, *, calls: bool) -> frozenset[str]:
        """Return the texts that a parser needs to see, also where they are special tokens. calls: for tool calls."""
        tools = _MARKERS[self.tools] if self.tools is not None and (calls or self.tools == "harmony") else ()
        return frozenset((*tools, *(self.reasoning or ())))


class AnswerParser:
    """Turns one answer's text, in pieces, into deltas; what the deltas say does not depend on the pieces.

    Text waits only while it may be the beginning of a marker, or of a call whose name and arguments have not both
    begun. What has not become a call by then is content, markers included; white space after a marker is dropped.
    tools: the names of the functions that may be called; without any, calls are content. prompt: the end of the prompt,
    which may have begun the reasoning.
    """

    def __init__(self, form: AnswerFormat, tools: Collection[str] = (), prompt: str = "") -> None:
        self._reader = TextReader()
        self._reading = _answer(self._reader, form, tools, prompt)

    @property
    def unfinished(self) -> bool:
        """Whether the last tool call lacks its end."""
        return self._reader.unfinished

    def feed(self, text: str) -> list[Delta]:
        """Return what is certain now."""
        self._reader.add(text)
        next(self._reading, None)
        return self._reader.taken()

    def end(self) -> list[Delta]:
        """Return what was waiting for more text."""
        self._reader.add("", ended=True)
        next(self._reading, None)
        return self._reader.taken()


def _answer(r: TextReader, form: AnswerFormat, tools: Collection[str], prompt: str) -> Reading[None]:
    """Read one whole answer."""
    if form.tools == "harmony":
        yield from _harmony(r, calls=bool(tools))
    else:
        if form.reasoning is not None:
            yield from _reasoning(r, *form.reasoning, prompt)
        if tools and form.tools is not None:
            yield from _listed(r, lambda name: name in tools)
            yield from _READINGS[form.tools](r, lambda name: name in tools)
    yield from r.pass_until("content")


def _reasoning(r: TextReader, opening: str, closing: str, prompt: str) -> Reading[None]:
    """Read `<think>...</think>` at the beginning, of which the prompt may have the first part."""
    begun = prompt.rstrip().endswith(opening)
    place = r.hold()
    yield from r.space()
    if not (yield from r.literal(opening)) and not begun:
        r.rewind(place)
        return
    r.release()
    yield from r.space()
    yield from r.pass_until("reasoning", closing)
    yield from r.space()


def _listed(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read an answer that begins with a JSON list of calls, which a target of any family writes that was told of its
    tools in words (edge_agent.target.conversation)."""
    place = r.hold()
    yield from r.space()
    if (yield from r.literal("[")) and (yield from _calls(r, accepts, ",", ";")):
        yield from r.literal("]")
        yield from r.space()
    else:
        r.rewind(place)


def _hermes(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""
    opening, closing = TOOL_CALL
    while (yield from r.pass_until("content", opening)):
        place = r.hold()
        yield from r.space()
        if (yield from r.call(_any_name)):
            yield from r.space()
            yield from r.literal(closing)
            yield from r.space()
        else:
            r.rewind(place)
            r.emit("content", opening)


def _llama3(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read calls as JSON, separated by semicolons: the whole answer, or what comes after `<|python_tag|>`."""
    place, marker = r.hold(), ""
    while True:
        if not (yield from _calls(r, _any_name if marker else accepts, ";", ",")):
            r.rewind(place)
            r.emit("content", marker)
        marker = yield from r.pass_until("content", PYTHON_TAG)
        if not marker:
            return
        place = r.hold()


def _json(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read an answer that is a call as JSON, or several."""
    place = r.hold()
    if not (yield from _calls(r, accepts, ",", ";")):
        r.rewind(place)


def _mistral(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or the later `[TOOL_CALLS]name[ARGS]{...}`."""
    while (yield from r.pass_until("content", TOOL_CALLS)):
        place = r.hold()
        yield from r.space()
        if (yield from r.literal("[")):
            found = yield from _calls(r, _any_name, ",")
            if found:
                yield from r.literal("]")
        else:
            found = yield from _mistral_call(r)
        if found:
            yield from r.space()
        else:
            r.rewind(place)
            r.emit("content", TOOL_CALLS)


def _mistral_call(r: TextReader) -> Reading[bool]:
    name = yield from r.word()
    if name and (yield from r.literal(CALL_ID, ARGS)) == CALL_ID:
        yield from r.word()
        yield from r.literal(ARGS)
    yield from r.space()
    return bool(name) and (yield from r.arguments(name))


def _deepseek(r: TextReader, accepts: _Accepts) -> Reading[None]:
    """Read calls between DeepSeek's markers, with fenced arguments (V3, R1) or bare ones (V3.1)."""
    while marker := (yield from r.pass_until("content", CALLS_BEGIN, CALL_BEGIN)):
        place = r.hold()
        yield from r.space()
        begun = marker == CALL_BEGIN or bool((yield from r.literal(CALL_BEGIN)))
        if begun and (yield from _deepseek_call(r)):
            yield from r.space()
            yield from r.literal("```")
            yield from r.space()
            yield from r.literal(CALL_END)
            yield from r.space()
            yield from r.literal(CALLS_END)
            yield from r.space()
        else:
            r.rewind(place)
            r.emit("content", marker)


def _deepseek_call(r: TextReader) -> Reading[bool]:
    name = yield from r.word()
    if not (yield from r.literal(CALL_SEPARATOR)):
        return False
    yield from r.space()
    if (yield from r.peek()) != "{":  # what came first is the type of the tool
        name = yield from r.word()
        yield from r.space()
        yield from r.literal("```json")
        yield from r.space()
    return bool(name) and (yield from r.arguments(name))


def _harmony(r: TextReader, *, calls: bool) -> Reading[None]:
    """Read messages on channels; a message to a recipient is a call. The prompt has `<|start|>assistant` already."""
    place, marker = r.hold(), ""
    while True:
        header = yield from _harmony_header(r)
        if header is None:
            r.rewind(place)
            r.emit("content", marker)
            marker = yield from r.pass_until("content", START)
        else:
            r.release()
            marker = yield from _harmony_message(r, *header, calls=calls)
        if not marker:
            return
        place = r.hold()
        yield from r.word()  # the role


def _harmony_message(r: TextReader, channel: str, recipient: str, *, calls: bool) -> Reading[str]:
    """Read a message, and what begins the next one; "" if none comes right after it."""
    if recipient and calls:
        r.begin_call(recipient.removeprefix("functions."))
        ended = yield from r.pass_until("tool_call", *ENDS, START)
        if ended:
            r.end_call()
    else:
        ended = yield from r.pass_until("reasoning" if channel == "analysis" else "content", *ENDS, START)
    if not ended or ended == START:
        return ended
    yield from r.space()
    return (yield from r.pass_until("content", START))


def _harmony_header(r: TextReader) -> Reading[tuple[str, str] | None]:
    """Return the channel and the recipient ("": nobody) of a message; None where there is no header."""
    channel = recipient = ""
    for _ in range(_MAX_HEADER_PARTS):
        yield from r.space()
        match (yield from r.literal(MESSAGE, CHANNEL, CONSTRAIN, "to=")):
            case marker if marker == MESSAGE:
                return (channel, recipient) if channel or recipient else None
            case marker if marker == CHANNEL:
                yield from r.space()
                channel = yield from r.word()
            case "to=":
                recipient = yield from r.word()
            case marker:
                if not marker and not channel:
                    return None
                yield from r.space()
                if not (yield from r.word()):
                    return None
    return None


def _calls(r: TextReader, accepts: _Accepts, *separators: str) -> Reading[bool]:
    """Read calls as JSON objects, one after the other; False, with nothing begun, where there is none."""
    found = False
    while True:
        place = r.hold()
        yield from r.space()
        if found:
            yield from r.literal(*separators)
            yield from r.space()
        if not (yield from r.call(accepts)):
            if found:
                r.rewind(place)
                yield from r.space()
            return found
        found = True


def _any_name(name: str) -> bool:
    return True


_READINGS: Mapping[ToolFormat, Callable[[TextReader, _Accepts], Reading[None]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "json": _json,
}
"""Harmony's channels are read in another way."""
