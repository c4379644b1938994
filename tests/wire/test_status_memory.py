"""Test that a refused call keeps nothing of what its peer sent."""

from __future__ import annotations

import gc

import pytest

from outrider.core.errors import BadRequest
from outrider.wire.status import abort


class Message:
    """Stand for a large message."""


class Aborted(Exception):
    """Stand for the error that grpc.aio raises when a call is aborted."""


class Context:
    async def abort(self, *_: object) -> None:
        raise Aborted


def refuse(message: Message) -> None:
    raise BadRequest(f"{type(message).__name__} is too large")


def take() -> None:
    refuse(Message())


async def test_the_message_of_a_refused_call_is_freed_though_its_error_lives_on() -> None:
    before = {id(m) for m in gc.get_objects() if isinstance(m, Message)}
    try:
        take()
    except BadRequest as error:
        refused = error
        with pytest.raises(Aborted) as aborted:
            await abort(Context(), error)  # type: ignore[arg-type]
    assert aborted.value.__context__ is refused
    assert [m for m in gc.get_objects() if isinstance(m, Message) and id(m) not in before] == []
