"""The target's chat template, rendered in a sandbox; what users write never becomes a control token."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.core.errors import BadRequest, ModelRefused

Message = Mapping[str, str]
"""role and content"""

MAX_TEMPLATE_CHARS = 1 << 20


class ChatTemplate:
    """A template in the dialect that Hugging Face tokenizers use."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        """variables: bos_token and the like. Raises ModelRefused for a template that does not compile."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelRefused(f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS}")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelRefused(f"the target's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt's text up to where the assistant begins. Raises BadRequest for messages that it refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._variables
            )
        except jinja2.TemplateError as error:
            raise BadRequest(f"the target's chat template refuses these messages: {error}", field="messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise BadRequest(
                f"the target's chat template fails on these messages: {type(error).__name__}: {error}", field="messages"
            ) from error

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
        check_messages(messages)
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


def check_messages(messages: Sequence[Message]) -> None:
    """Raises BadRequest unless every message has a role and a content."""
    if not messages:
        raise BadRequest.bound("messages", "empty", "at least one message")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadRequest.bound(f"messages[{i}].{key}", repr(message.get(key))[:80], "a text")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> str:
    raise jinja2.TemplateError(reason)
