"""Test what a write to a peer that does not read, or that has gone, ends with."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from logged import errors_logged

from outrider.core.errors import Unavailable
from outrider.wire.status import aborting
from outrider.wire.writes import write_within


class Call:
    """A call's context whose writes end when they are let, with an error if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.let = asyncio.Event()

    async def write(self, message: bytes) -> None:
        await self.let.wait()
        if self.error is not None:
            raise self.error


async def test_a_write_in_time_returns_nothing_and_a_late_one_is_returned():
    call = Call()
    late = await write_within(call, b"", 0.01)
    assert late is not None
    call.let.set()
    assert await late is None
    assert await write_within(call, b"", 60.0) is None


@pytest.mark.parametrize("limit_s", [60.0, 0.01])
async def test_a_write_that_fails_since_the_peer_has_gone_ends_the_call_as_cancelled_and_logs_nothing(
    limit_s: float, caplog: pytest.LogCaptureFixture
):
    call = Call(grpc.aio.InternalError("Failed execute_batch"))

    async def serve() -> None:
        async with aborting(call):
            if (late := await write_within(call, b"", limit_s)) is not None:
                await late
            raise Unavailable("it was written")

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.05)
    call.let.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert errors_logged(caplog) == []


async def test_any_other_error_of_a_write_is_raised():
    call = Call(ValueError("not a message"))
    call.let.set()
    with pytest.raises(ValueError, match="not a message"):
        await write_within(call, b"", 60.0)


async def test_a_cancelled_caller_cancels_its_write():
    call = Call()
    writing = asyncio.create_task(write_within(call, b"", 60.0))
    await asyncio.sleep(0.01)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await asyncio.sleep(0)
    assert all(task is asyncio.current_task() for task in asyncio.all_tasks())
