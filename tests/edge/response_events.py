"""Check that the events of a response come in the order that the Responses API promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def checked(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last event's response, after checking every event against the ones before it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *rest, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == in_progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == [] and created["response"]["usage"] is None
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}" and response["id"] == created["response"]["id"]
    items, at = [], 0
    while at < len(rest) and (item := _item(rest, at, len(items))) is not None:
        items.append(item[0])
        at = item[1]
    assert response["output"] == items
    assert at == len(rest) or response["status"] == "failed"
    return response


def _item(events: Sequence[Mapping[str, Any]], at: int, index: int) -> tuple[dict[str, Any], int] | None:
    """Return an item and the place after its last event; None where the stream has failed in it."""
    begun = events[at]
    assert begun["type"] == "response.output_item.added" and begun["output_index"] == index
    item = begun["item"]
    assert item["status"] == "in_progress" and not item.get("content") and not item.get("arguments")
    is_call, name = item["type"] == "function_call", f"response.{_TEXTS[item['type']]}"
    place = {"item_id": item["id"], "output_index": index} | ({} if is_call else {"content_index": 0})
    end = next((i for i in range(at, len(events)) if events[i]["type"] == "response.output_item.done"), None)
    inner = list(events[at + 1 : end])
    assert all(place.items() <= event.items() for event in inner)
    if end is None:
        return None
    done = events[end]["item"]
    if is_call:
        *deltas, ending = inner
        text = done["arguments"]
        assert ending["type"] == f"{name}.done" and ending["arguments"] == text and ending["name"] == done["name"]
    else:
        first, *deltas, ending, last = inner
        assert (first["type"], last["type"]) == ("response.content_part.added", "response.content_part.done")
        assert first["part"]["text"] == "" and done["content"] == [last["part"]]
        text = last["part"]["text"]
        assert ending["type"] == f"{name}.done" and ending["text"] == text
    assert {delta["type"] for delta in deltas} <= {f"{name}.delta"}
    assert "".join(delta["delta"] for delta in deltas) == text and all(delta["delta"] for delta in deltas)
    assert events[end]["output_index"] == index and done["id"] == item["id"] and done["type"] == item["type"]
    assert done["status"] in ("completed", "incomplete")
    return done, end + 1
