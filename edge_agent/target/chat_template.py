"""Render the target's chat template in a sandbox; no text of a caller's becomes a control token."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.core.errors import BadRequest, ModelRefused

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""A chat message as transformers knows it: `role`, `content`, and for tools `tool_calls` and `tool_call_id`."""

MAX_SPELT_OUT = 4096
"""Most control tokens that a caller's texts may spell out: each is encoded apart."""
_TOOLS_TEXT = (
    "You can call functions. To call some, answer with nothing but a JSON list of calls, such as "
    '[{"name": "function", "arguments": {"argument": "value"}}]. The functions are:'
)


class ChatTemplate:
    """Renders messages by a template in the dialect of Hugging Face's tokenizers, and tokenises them.

    variables: bos_token and the like. A template that knows nothing of tools gets tools, calls and results as text.
    One that refuses messages in which users, or systems, speak twice in a row gets these joined. A broken one disables
    chat alone; `check` tells of it before the first chat. Sandbox and bounds keep a template from the system and from
    output without end; as in transformers, nothing else bounds its time, so call it on a thread.
    """

    def __init__(self, source: str | bytes, *, variables: Mapping[str, str] | None = None) -> None:
        self._source = source
        self.special_tokens = dict(variables or {})
        """Texts of the target's special tokens, by their names in templates."""

    @functools.cached_property
    def source(self) -> str:
        """Return the template's text; bytes that are no UTF-8 are replaced."""
        return self._source if isinstance(self._source, str) else self._source.decode(errors="replace")

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """Compile the template. Raises ModelRefused where that fails, ImportError naming the extra."""
        from edge_agent.target.jinja import compiled

        try:
            return compiled(self._source if isinstance(self._source, str) else self._source.decode())
        except UnicodeDecodeError as error:
            raise ModelRefused(f"the target's chat template does not compile: it is no UTF-8: {error}") from error

    def check(self) -> None:
        """Render a plain message of a user. Raises what `render` raises, which names the template's line."""
        self.render([{"role": "user", "content": "x"}])

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Return the prompt's text, up to where the assistant begins.

        variables: further ones of the template, such as `tools`, a list of JSON schemas.
        Raises BadRequest for messages that the template refuses, ModelRefused for a template that cannot be used.
        """
        template = self._template
        from edge_agent.target.jinja import rendered

        given = {"tools": None, "documents": None, **self.special_tokens, **(variables or {})}
        if "tools" not in self.source:
            messages, given["tools"] = _told(messages, given["tools"] or ()), None
        turns = [_turn(message, self.source) for message in messages]

        def text_of(turns: Sequence[Message]) -> str:
            return rendered(template, {**given, "messages": turns, "add_generation_prompt": True})

        try:
            return text_of(turns)
        except BadRequest:
            if len(joined := _joined(turns)) == len(turns):
                raise
            with contextlib.suppress(BadRequest):
                return text_of(joined)
            raise

    def tokenise(
        self,
        messages: Sequence[Message],
        encode: Callable[[str], list[int]],
        encode_plain: Callable[[str], list[int]],
        controls: Sequence[str],
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the rendered messages.

        `encode` takes control tokens in a text for what they are, `encode_plain` for plain text. Where a caller's text
        spells out one of `controls`, that is encoded apart and plain, so that nobody can end his turn and begin the
        system's, in a message no more than in a tool's result.
        """
        given = {"messages": list(messages), **(variables or {})}
        texts = list(_texts(given))
        spelt = sorted((one for one in controls if any(one in text for text in texts)), key=len, reverse=True)
        if not spelt:
            return encode(self.render(messages, variables))
        pattern = re.compile("|".join(map(re.escape, spelt)))
        if sum(len(pattern.findall(text)) for text in texts) > MAX_SPELT_OUT:
            message = f"the messages spell out more than {MAX_SPELT_OUT} control tokens; write them differently"
            raise BadRequest(message, field="messages")
        marks = {control: secrets.token_hex(16) for control in spelt}
        marked = _replaced(given, lambda text: pattern.sub(lambda found: marks[found[0]], text))
        controls_of = {mark: control for control, mark in marks.items()}
        ids: list[int] = []
        for piece in re.split(f"((?:{'|'.join(controls_of)})+)", self.render(marked.pop("messages"), marked)):
            if piece[:32] in controls_of:
                ids += encode_plain("".join(controls_of[piece[at : at + 32]] for at in range(0, len(piece), 32)))
            elif piece:
                ids += encode(piece)
        return ids


class _Arguments(dict[str, Any]):
    """A call's arguments, for templates that take them as a mapping, and for those that take them as JSON text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def _turn(message: Message, source: str) -> dict[str, Any]:
    """Return a message as a template expects it: the arguments of its calls are objects where they can be."""
    turn = dict(message)
    if calls := turn.get("tool_calls"):
        functions = [dict(call["function"]) for call in calls]
        for function in functions:
            function["arguments"] = _arguments(function.get("arguments"))
        turn["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
        turn["content"] = turn.get("content") or None  # DeepSeek's tells by it whether there are calls
    if turn.get("reasoning_content") and not turn.get("content") and ".thinking" in source:
        turn["thinking"] = turn["reasoning_content"]  # gpt-oss's name for it
    return turn


def _joined(turns: Sequence[Message]) -> list[Message]:
    """Return the messages with those joined that users, or systems, write one after another."""
    joined: list[Message] = []
    for turn in turns:
        last = joined[-1] if joined else {}
        texts = [last.get("content"), turn.get("content")]
        if turn["role"] in ("user", "system") and turn["role"] == last.get("role") and all(map(_is_text, texts)):
            joined[-1] = {**last, "content": "\n\n".join(map(str, texts))}
        else:
            joined.append(turn)
    return joined


def _is_text(content: object) -> bool:
    return isinstance(content, str)


def _arguments(given: Any) -> Any:
    """Return a call's arguments as an object; unchanged where they are no JSON object, as after a break."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return _Arguments(value) if isinstance(value, Mapping) else given


def _told(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with tools, calls and results as text, for a template that knows none of them."""
    told: list[Message] = []
    results_follow = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if calls := message.get("tool_calls"):
            parts = [{"name": f["name"], "arguments": _arguments(f.get("arguments"))} for f in map(_function, calls)]
            content = "\n".join(filter(None, (content, json.dumps(parts, ensure_ascii=False))))
        if role == "tool":
            if results_follow:
                content = f"{told.pop()['content']}\n{content}"
            role = "user"
        results_follow = message["role"] == "tool"
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        told.append({**kept, "role": role, "content": content})
    if tools:
        text = "\n".join((_TOOLS_TEXT, *(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)))
        if told and told[0]["role"] == "system":
            text = f"{told.pop(0)['content']}\n\n{text}"
        told.insert(0, {"role": "system", "content": text})
    return told


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tool["function"]
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, names of its members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield from (str(name), *_texts(member))
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts(member)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts replaced."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {replace(str(name)): _replaced(member, replace) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(member, replace) for member in value]
    return value


def special_tokens(data: bytes) -> dict[str, str]:
    """Return the special tokens' texts by the names that templates give them. Raises ModelRefused."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"the target's special tokens are no JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
        raise ModelRefused("the target's special tokens must be a JSON object of texts")
    return names
