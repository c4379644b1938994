"""Describe the responses for /openapi.json; `responses` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    draft: str | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(BaseModel):
    status: Literal["ok"]


class ReadyResponse(BaseModel):
    status: Literal["ready", "loading", "unreachable"]
    reason: str | None


class _Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    outrider: dict[str, Any]


class CompletionChoice(_Choice):
    text: str


class ToolCallFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ChatCompletionChoice(_Choice):
    message: AssistantMessage


class UsageResponse(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Response(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageResponse
    metrics: dict[str, Any] | None = None
    """`speculative_decoding` as vLLM has it, of an answer with one choice."""


class CompletionResponse(_Response):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletionResponse(_Response):
    object: Literal["chat.completion"]
    choices: list[ChatCompletionChoice]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any]
    warnings: list[str]
    outrider: dict[str, Any]


class ResponseItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


RouteResponses = dict[int | str, dict[str, Any]]

_EVENTS: Mapping[str, Any] = {"text/event-stream": {}}


def responses(model: type[BaseModel], *, streams: bool = False) -> RouteResponses:
    """Return a route's responses: the model, or events of its parts, and errors."""
    return {200: {"model": model, **({"content": _EVENTS} if streams else {})}, "default": {"model": ErrorResponse}}
