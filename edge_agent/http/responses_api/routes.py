"""Define the routes of the Responses API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from edge_agent.config import EdgeSettings
from edge_agent.http.errors import ApiError, api_error, invalid_value, json_response, unsupported
from edge_agent.http.responses import naming_ignored
from edge_agent.http.responses_api.request import RENAMED, Item, ResponseRequest
from edge_agent.http.responses_api.writer import ResponseWriter, item_id, status_of
from edge_agent.http.starting import start_chat
from edge_agent.http.streaming import Events, drained, event, merged, streamed, unless_gone
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk
from outrider.core.errors import OutriderError

MAX_STORED = 1000
"""Most responses that are kept for `previous_response_id`, and items of their outputs that requests may refer to."""
MAX_STORED_BYTES = 64 << 20
"""Most bytes that they take as JSON, each with the whole conversation before it."""
STORED_S = 86_400.0
"""Seconds for which a response is kept at most."""
_PATH = "/v1/responses/{response_id}"


def add_responses(app: FastAPI, client: AsyncClient, settings: EdgeSettings) -> None:
    store = ResponseStore()

    def stored(name: str) -> dict[str, Any]:
        if (found := store.get(name)) is None or "response" not in found:
            message = f"there is no response {name[:80]!r} here, or no longer: this server keeps the latest alone"
            raise ApiError(404, message, param="response_id", code="not_found")
        return found

    @app.post("/v1/responses", response_model=None)
    async def create(body: ResponseRequest, request: Request) -> Response:
        try:
            return await unless_gone(request, _answer(client, body, settings, store))
        except (ApiError, OutriderError) as error:
            raise _renamed(error) from error

    @app.get(_PATH, response_model=None)
    async def retrieve(response_id: str, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", " for a response that has ended")
        return json_response(stored(response_id)["response"])

    @app.delete(_PATH, response_model=None)
    async def delete(response_id: str) -> Response:
        for name in (response_id, *(item["id"] for item in stored(response_id)["response"]["output"])):
            store.remove(name)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get(f"{_PATH}/input_items", response_model=None)
    async def input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = stored(response_id)["input"]
        return json_response(_page(items if order == "asc" else items[::-1], limit, after))


async def _answer(client: AsyncClient, body: ResponseRequest, settings: EdgeSettings, store: ResponseStore) -> Response:
    """Return the whole response, or its first event with the rest to come."""
    context = _context(body, store)
    body.input = [_referred(f"input[{i}]", item, store) for i, item in enumerate(body.input)]
    chat = body.chat(context)
    (stream,), bundle, (parser,) = await start_chat(client, chat, settings)
    writer = ResponseWriter(body, chat, bundle, parser)

    def ended() -> dict[str, Any]:
        """Return the response, which has ended, and keep it where the request allows that."""
        completion = stream.completion
        response = writer.response(status_of(completion), completion)
        if response["store"]:
            for item in response["output"]:
                store.keep(item["id"], item)
            read = [_with_id(item) for item in (*context, *body.input)]
            store.keep(response["id"], {"response": response, "input": read})
        return response

    if not body.stream:
        (completion,) = await drained([stream])
        for _ in (*writer.grow(), *writer.finish(completion)):
            pass
        return naming_ignored(json_response(ended()), body.ignored, chat.notes)

    def failed(error: Exception) -> bytes:
        begin = [*writer.begin()]
        return b"".join(map(_event, [*begin, writer.last(writer.response("failed", error=_renamed(error)))]))

    response = await streamed(_events(stream, writer, ended), [stream], failed)
    return naming_ignored(response, body.ignored, chat.notes)


async def _events(stream: CompletionStream, writer: ResponseWriter, ended: Callable[[], dict[str, Any]]) -> Events:
    def write(_: int, chunk: Chunk | None) -> list[dict[str, Any]]:
        return [*writer.begin(), *(writer.finish(stream.completion) if chunk is None else writer.grow())]

    async with contextlib.aclosing(merged([stream], write)) as events:
        async for one in events:
            yield _event(one)
    yield _event(writer.last(ended()))


def _event(content: dict[str, Any]) -> bytes:
    return event(content, content["type"])


# --- earlier responses


class ResponseStore:
    """Holds JSON objects by their ids, within MAX_STORED, MAX_STORED_BYTES and STORED_S; the oldest go first.

    Each is kept as the bytes of its JSON, so that the size is exact and nobody changes what is kept. Nothing is written
    to disk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = 0
        self._clock = clock
        self._kept: dict[str, tuple[float, bytes]] = {}
        """Time of keeping and data, the oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, name: str, content: dict[str, Any]) -> None:
        """Keep an object, and drop as many old ones as that takes. One beyond MAX_STORED_BYTES is not kept."""
        self.remove(name)
        data = json.dumps(content, separators=(",", ":")).encode()
        if len(data) > MAX_STORED_BYTES:
            return
        self._kept[name] = self._clock(), data
        self.bytes += len(data)
        while len(self._kept) > MAX_STORED or self.bytes > MAX_STORED_BYTES:
            self.remove(next(iter(self._kept)))
        self._drop_aged()

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a copy of an object; None if it is not kept, or no longer."""
        self._drop_aged()
        _, data = self._kept.get(name, (0.0, b"null"))
        found: dict[str, Any] | None = json.loads(data)
        return found

    def remove(self, name: str) -> None:
        """Drop an object, if it is kept."""
        _, data = self._kept.pop(name, (0.0, b""))
        self.bytes -= len(data)

    def _drop_aged(self) -> None:
        now = self._clock()
        for name in [name for name, (at, _) in self._kept.items() if now - at > STORED_S]:
            self.remove(name)


def _context(body: ResponseRequest, store: ResponseStore) -> list[Item]:
    """Return the items of the conversation that the request continues. Raises ApiError if it is not kept."""
    if (name := body.previous_response_id) is None:
        return []
    if (found := store.get(name)) is None or "response" not in found:
        message = (
            f"previous_response_id is {name[:80]!r}, which this server does not keep, or no longer; send all items"
        )
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    return [Item.model_validate(item) for item in (*found["input"], *found["response"]["output"])]


def _referred(field: str, item: Item, store: ResponseStore) -> Item:
    """Return the item of an earlier output that a reference means; another item as it is. Raises ApiError."""
    if item.type != "item_reference" and (item.type is not None or item.role is not None or item.id is None):
        return item
    if (found := store.get(item.id or "")) is None or "response" in found:
        message = (
            f"{field} refers to {str(item.id)[:80]!r}, which this server does not keep, or no longer; send the item"
        )
        raise invalid_value("input", message)
    return Item.model_validate(found)


def _with_id(item: Item) -> dict[str, Any]:
    """Return an item as JSON, with the type and the id that it may lack."""
    given = item.model_dump(exclude_unset=True)
    kind = given.get("type") or "message"
    return {**given, "type": kind, "id": given.get("id") or item_id(kind)}


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of items, from the one after `after` on. Raises ApiError if no item has that id."""
    begin = 0
    if after is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        if not begin:
            raise invalid_value("after", f"after is {after[:80]!r}, which is no item of this response")
    page = items[begin : begin + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, **ends, "has_more": begin + limit < len(items)}


def _renamed(error: Exception) -> ApiError:
    """Return the answer to an error, with this API's name of the field where it is a chat's."""
    found = api_error(error, chat=True)
    name = next((one for one in RENAMED if found.param is not None and re.match(rf"{one}\b", found.param)), None)
    if name is None or found.param is None:
        return found
    renamed = RENAMED[name]
    message = renamed + found.message.removeprefix(name) if found.message.startswith(name) else found.message
    return dataclasses.replace(found, param=renamed + found.param.removeprefix(name), message=message)
