"""Render the target's chat template in a sandbox; no text of a user's becomes a control token."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.core.errors import BadRequest, ModelRefused

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, str]
"""A chat message, with `role` and `content`."""

MAX_TEMPLATE_CHARS = 1 << 20


class ChatTemplate:
    """Renders messages by a template in the dialect of Hugging Face's tokenizers.

    It is compiled when chat is first used, so that a broken one disables chat alone. `variables` are bos_token and the
    like.
    """

    def __init__(self, source: str | bytes, *, variables: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._variables = dict(variables or {})

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """Compile the template. Raises ModelRefused where that fails, ImportError naming the extra."""
        from edge_agent.target.jinja import compiled

        if len(self._source) > MAX_TEMPLATE_CHARS:
            raise ModelRefused(f"the chat template has {len(self._source)} characters, at most {MAX_TEMPLATE_CHARS}")
        try:
            source = self._source if isinstance(self._source, str) else self._source.decode()
        except UnicodeDecodeError as error:
            raise ModelRefused(f"the target's chat template does not compile: it is no UTF-8: {error}") from error
        return compiled(source)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt's text, up to where the assistant begins.

        Raises BadRequest for messages that the template refuses, ModelRefused for a template that cannot be used.
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
        """Return the token ids of the rendered messages.

        `encode` takes control tokens in a text for what they are, `encode_plain` for plain text. A content that spells
        out one of `controls` is encoded apart and plain, so that no user can end his turn and begin the system's.
        """
        if not any(control in message["content"] for message in messages for control in controls):
            return encode(self.render(messages))
        marks = [secrets.token_hex(16) for _ in messages]
        marked = self.render([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        ids: list[int] = []
        for message, mark in zip(messages, marks, strict=True):
            before, found, marked = marked.partition(mark)
            if not found:  # the template leaves a message out, or reorders them
                why = "a message's content spells out a control token; write it differently"
                raise BadRequest(why, field="content")
            ids += encode(before) + encode_plain(message["content"])
        return ids + encode(marked)


def special_tokens(data: bytes) -> dict[str, str]:
    """Return the special tokens' texts by the names that templates give them. Raises ModelRefused."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"the target's special tokens are no JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
        raise ModelRefused("the target's special tokens must be a JSON object of texts")
    return names
