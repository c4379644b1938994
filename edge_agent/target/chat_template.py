"""The target's chat template, rendered in a sandbox; what users write never becomes a control token."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_agent.validation import items, refuse
from outrider.core.errors import BadRequest, ModelRefused

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, str]
"""role and content"""

MAX_TEMPLATE_CHARS = 1 << 20


class ChatTemplate:
    """A template in the dialect that Hugging Face tokenizers use; compiled when chat is first used.

    Whatever is wrong with it thus disables chat and nothing else.
    """

    def __init__(self, source: str | bytes, *, variables: Mapping[str, str] | None = None) -> None:
        """variables: bos_token and the like."""
        self._source = source
        self._variables = dict(variables or {})

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """Raises ModelRefused for a template that does not compile, ImportError naming the extra."""
        from edge_agent.target.jinja import compiled

        if len(self._source) > MAX_TEMPLATE_CHARS:
            raise ModelRefused(f"the chat template has {len(self._source)} characters, at most {MAX_TEMPLATE_CHARS}")
        try:
            source = self._source if isinstance(self._source, str) else self._source.decode()
        except UnicodeDecodeError as error:
            raise ModelRefused(f"the target's chat template does not compile: it is no UTF-8: {error}") from error
        return compiled(source)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt's text up to where the assistant begins.

        Raises BadRequest for messages that it refuses, ModelRefused for a template that cannot be used.
        """
        template = self._template
        from edge_agent.target.jinja import rendered

        turns = [dict(message) for message in messages]
        return rendered(template, {**self._variables, "messages": turns, "add_generation_prompt": True})

    def tokenise(
        self,
        messages: Sequence[Message],
        encode: Callable[[str], list[int]],
        encode_plain: Callable[[str], list[int]],
        controls: Sequence[str],
    ) -> list[int]:
        """Token ids of the rendered messages.

        encode: reads control tokens in text as such; encode_plain: as plain text. Contents in which a control token is
        spelt out are encoded apart and plain, so that no user can close his turn and open the system's.
        """
        messages = check_messages(messages)
        if not any(control in message["content"] for message in messages for control in controls):
            return encode(self.render(messages))
        marks = [secrets.token_hex(16) for _ in messages]
        marked = self.render([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        ids: list[int] = []
        for message, mark in zip(messages, marks, strict=True):
            before, found, marked = marked.partition(mark)
            if not found:  # a template that leaves a message out, or puts them in another order
                raise BadRequest(
                    "a message's content spells out a control token; write it differently", field="content"
                )
            ids += encode(before) + encode_plain(message["content"])
        return ids + encode(marked)


def check_messages(messages: object) -> tuple[Message, ...]:
    """The messages, each with a role and a content. Raises BadRequest."""
    given = items("messages", messages, "messages")
    if not given:
        raise BadRequest.bound("messages", "empty", "at least one message")
    return tuple(_checked(f"messages[{i}]", message) for i, message in enumerate(given))


def _checked(field: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        refuse(field, message, 'a mapping with "role" and "content"')
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            refuse(f"{field}.{key}", message.get(key), "a text")
    return message


def special_tokens(data: bytes) -> dict[str, str]:
    """The special tokens' texts by the names that templates know them by. Raises ModelRefused."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"the target's special tokens are no JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
        raise ModelRefused("the target's special tokens must be a JSON object of texts")
    return names
