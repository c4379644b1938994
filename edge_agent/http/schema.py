"""What is answered, as /openapi.json tells it; `answers` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel


class Wrong(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: Wrong


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    draft: str | None


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok", "loading"]


class Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    outrider: dict[str, Any]


class TextChoice(Choice):
    text: str


class Message(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    message: Message


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


Responses = dict[int | str, dict[str, Any]]

_EVENTS: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


def told(model: type[BaseModel], *, streams: bool = False) -> Responses:
    """A route's answers: this one, or events of its parts, and errors."""
    return {200: {"model": model, **({"content": _EVENTS} if streams else {})}, "default": {"model": Error}}
