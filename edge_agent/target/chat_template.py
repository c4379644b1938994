"""Render the target's chat template in a sandbox; no text of a caller's becomes a control token."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from edge_agent.target.conversation import Tools, Turn, fitted, new_mark, turns_of
from outrider.core.errors import BadRequest, ModelRefused

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""A chat message as transformers knows it: `role`, `content`, and for tools `tool_calls` and `tool_call_id`."""

MAX_SPELT_OUT = 4096
"""Most control tokens that a caller's texts may spell out: each is encoded apart."""


class ChatTemplate:
    """Renders messages by a template in the dialect of Hugging Face's tokenizers, and tokenises them.

    variables: bos_token and the like. Messages are fitted to what the template takes (`conversation`). A broken one
    disables chat alone; `check` tells of it before the first chat. Sandbox and bounds keep a template from the system
    and from output without end; as in transformers, nothing else bounds its time, so call it on a thread.
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

        variables: further ones of the template, such as `tools`, a list of JSON schemas. With a true
        `continue_final_message` the text ends in the last message, an assistant's, as in transformers.
        Raises BadRequest for messages that the template refuses, ModelRefused for a template that cannot be used.
        """
        template = self._template
        from edge_agent.target.jinja import rendered

        given = {"add_generation_prompt": True, **self.special_tokens, **(variables or {})}
        tools, turns = given.pop("tools", None) or (), turns_of(messages)
        end = new_mark() if given.pop("continue_final_message", False) else ""
        continued = turns[-1]["content"] if turns else ""
        if end:
            if not continued.strip():
                message = "the last message has no text, must have one to continue"
                raise BadRequest(message, field="continue_final_message")
            turns[-1] = {**turns[-1], "content": f"{continued}{end} "}
            given["add_generation_prompt"] = False
        thinks = ".thinking" in self.source  # gpt-oss's name for what the assistant thought before a call

        def text_of(turns: Sequence[Turn], tools: Tools) -> str:
            if thinks:
                turns = [
                    {**one, "thinking": one["reasoning_content"]}
                    if one.get("reasoning_content") and not one["content"]
                    else one
                    for one in turns
                ]
            present = {**given, "messages": turns, **({"tools": list(tools)} if tools else {})}
            try:
                return rendered(template, {"documents": None, "tools": None, **present})  # as transformers does
            except BadRequest:
                return rendered(template, present)  # for templates that ask whether they are defined, and no more

        text = fitted(text_of, turns, tools)
        if not end:
            return text
        before, _, rest = text.rpartition(end)
        if continued.strip() not in before:
            raise BadRequest("the target's chat template leaves out the last message", field="continue_final_message")
        return before if rest.startswith(" ") else before.rstrip()  # as the template does with the ends of texts

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
        # The JSON text of a call can hide a control token, so its arguments are read first.
        given = {"messages": turns_of(messages), **(variables or {})}
        texts = list(_texts(given))
        spelt = sorted((one for one in controls if any(one in text for text in texts)), key=len, reverse=True)
        if not spelt:
            return encode(self.render(given["messages"], variables))
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
        return TypeAdapter(dict[str, str]).validate_json(data)
    except ValueError as error:
        raise ModelRefused("the target's special tokens are no JSON object of texts") from error
