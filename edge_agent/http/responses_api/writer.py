"""Write a response: its items whole, or as events in the order in which clients expect them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from edge_agent.http.errors import ApiError
from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.parsing.reader import Delta, Kind
from edge_agent.http.requests import ChatCompletionRequest
from edge_agent.http.responses import about, call_id
from edge_agent.http.responses_api.request import ResponseRequest
from edge_agent.sdk.types import Completion
from edge_agent.target.bundle import TargetBundle

Event = dict[str, Any]

_TEXT_EVENTS: Mapping[Kind, str] = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "tool_call": "response.function_call_arguments",
}
_PREFIXES: Mapping[str, str] = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Beginnings of the ids of items that are no messages."""
_UNSAID = dict.fromkeys(("description", "parameters", "strict"))
"""What a function may lack, and clients expect."""


def item_id(kind: str) -> str:
    """Return an id for an item of this type."""
    return f"{_PREFIXES.get(kind, 'msg')}_{secrets.token_hex(12)}"


class OutputItem:
    """An item of the output whose text grows: a message, reasoning, or a call of a function, which has this name."""

    def __init__(self, first: Delta, form: AnswerFormat, named: Mapping[str, str]) -> None:
        self.kind = first.kind
        self.pieces: list[str] = []
        head: dict[str, Any] = {"type": "message", "role": "assistant"}
        if first.kind == "reasoning":
            head = {"type": "reasoning", "summary": []}
        elif first.kind == "tool_call":
            head = {"type": "function_call", "call_id": call_id(form), **named}
        self.id = item_id(head["type"])
        self._head = {"id": self.id, **head}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> dict[str, Any]:
        """Return the one part of the content, with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def written(self, status: str) -> dict[str, Any]:
        """Return the item with its text, or without any while it is in progress."""
        begun = status == "in_progress"
        if self.kind == "tool_call":
            return {**self._head, "status": status, "arguments": "" if begun else self.text}
        return {**self._head, "status": status, "content": [] if begun else [self.part(self.text)]}


class ResponseWriter:
    """Writes one response from what its answer's parser reads piece by piece; the items do not depend on the pieces.

    An item ends where another kind of text begins. Events are numbered from 0 on.
    """

    def __init__(
        self, body: ResponseRequest, chat: ChatCompletionRequest, bundle: TargetBundle, parser: AnswerParser
    ) -> None:
        self.output: list[dict[str, Any]] = []
        """The items that have ended."""
        self._item: OutputItem | None = None
        """The item that grows."""
        self._body = body
        self._chat = chat
        self._bundle = bundle
        self._parser = parser
        self._head = {"id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time())}
        self._sequence = 0

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first item, once."""
        if self._sequence:
            return
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def grow(self) -> Iterator[Event]:
        """Yield the events of what was parsed since the last time."""
        for delta in self._parser.taken():
            yield from self._add(delta)

    def finish(self, completion: Completion) -> Iterator[Event]:
        """Yield the events that end the items. An answer without text and calls gets an empty message."""
        whole = status_of(completion) == "completed"
        if self._item is None or (whole and self._item.kind == "reasoning"):
            yield from self._add(Delta("content", ""))
        if self._item is not None and self._item.kind == "tool_call":
            whole = not self._parser.unfinished
        yield from self._end_item("completed" if whole else "incomplete")

    def last(self, response: Mapping[str, Any]) -> Event:
        """Return the event that ends a stream with its response."""
        return self._event(f"response.{response['status']}", response=response)

    def response(
        self, status: str, completion: Completion | None = None, error: ApiError | None = None
    ) -> dict[str, Any]:
        """Return the response with the items that have ended."""
        body, reasoning = self._body, self._body.reasoning
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._bundle.description.target.name,
            "output": list(self.output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                {**(_UNSAID if one.type == "function" else {}), **one.model_dump(exclude_unset=True)}
                for one in body.tools or ()
                if one.type in ("function", "namespace")
            ],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if completion is None else self._usage(completion),
            "user": body.user,
            "warnings": [*body.warnings, *self._chat.notes],
            **({} if completion is None else {"outrider": about(completion)}),
        }

    def _add(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of one delta."""
        if self._item is None or self._item.kind != delta.kind or delta.name:
            yield from self._end_item("completed")
            yield from self._begin_item(OutputItem(delta, self._parser.form, self._body.named(delta.name)))
        if delta.text and self._item is not None:
            self._item.pieces.append(delta.text)
            yield self._of_item(_TEXT_EVENTS[delta.kind] + ".delta", self._item, delta=delta.text)

    def _begin_item(self, item: OutputItem) -> Iterator[Event]:
        self._item = item
        yield self._event("response.output_item.added", output_index=len(self.output), item=item.written("in_progress"))
        if item.kind != "tool_call":
            yield self._of_item("response.content_part.added", item, part=item.part(""))

    def _end_item(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item that grows, if there is one."""
        if (item := self._item) is None:
            return
        done = _TEXT_EVENTS[item.kind] + ".done"
        if item.kind == "tool_call":
            yield self._of_item(done, item, arguments=item.text, name=item.written(status)["name"])
        else:
            yield self._of_item(done, item, text=item.text)
            yield self._of_item("response.content_part.done", item, part=item.part(item.text))
        yield self._event("response.output_item.done", output_index=len(self.output), item=item.written(status))
        self.output.append(item.written(status))
        self._item = None

    def _of_item(self, kind: str, item: OutputItem, **fields: Any) -> Event:
        """Return an event about an item's content."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.output)}
        if item.kind != "tool_call":
            place["content_index"] = 0
        if kind.startswith("response.output_text."):
            place["logprobs"] = []
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _usage(self, completion: Completion) -> dict[str, Any]:
        """Count tokens; those of the reasoning as the target's tokenizer splits its text."""
        read, written = completion.usage.prompt_tokens, completion.usage.completion_tokens
        thought = [item["content"][0]["text"] for item in self.output if item["type"] == "reasoning"]
        reasoning = len(self._bundle.tokenizer.encode_plain("".join(thought)))
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, written)},
            "total_tokens": read + written,
        }


def status_of(completion: Completion) -> str:
    """Return a response's status: "incomplete" where it was cut short."""
    return "completed" if completion.finish_reason in ("eos", "stop") else "incomplete"


def _error_code(error: ApiError) -> str:
    """Return the code of a failed response's error; the API knows few."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"
