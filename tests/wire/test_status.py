"""Test that every core error crosses the wire and comes back as itself."""

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from outrider.core import errors
from outrider.wire import channels, status

METHOD = "/outrider.test/Fail"
EVERY_CLASS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.OutriderError)]


@contextlib.asynccontextmanager
async def failing(error: Callable[[], BaseException]) -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable]:
    """Serve a method that ends every call with `error()`."""

    async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await status.abort(context, error())

    server = channels.server()
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.test", {"Fail": handler}),))
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_unary(METHOD)
    await server.stop(None)


async def sent(error: BaseException) -> errors.OutriderError:
    async with failing(lambda: error) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    return status.error_from_rpc(caught.value)


async def test_every_core_error_comes_back_as_its_own_class_with_its_message_and_fields():
    assert set(EVERY_CLASS) == set(errors.ANSWERS)
    for cls in EVERY_CLASS:
        back = await sent(cls("grün is not a number, must be 1"))
        assert type(back) is cls
        assert str(back) == "grün is not a number, must be 1"
    back = await sent(errors.ProtocolViolation("no", field="größe"))
    assert isinstance(back, errors.ProtocolViolation)
    assert back.field == "größe"
    for again_s in (0.125, 0.0):
        back = await sent(errors.Unavailable("not now", retry_after_s=again_s))
        assert isinstance(back, errors.Unavailable)
        assert back.retry_after_s == again_s


async def test_a_defect_reaches_the_peer_as_a_number_and_the_log_as_a_traceback(caplog):
    with caplog.at_level(logging.ERROR):
        back = await sent(ZeroDivisionError("secret /etc/path"))
    assert type(back) is errors.InternalError
    assert "secret" not in str(back)
    error_id = str(back).split()[2].rstrip(";")
    [record] = [r for r in caplog.records if error_id in r.getMessage()]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_a_very_long_message_is_clipped_and_still_arrives():
    back = await sent(errors.BadRequest("ü" * 100_000, field="ü" * 100_000))
    assert type(back) is errors.BadRequest
    assert str(back).endswith("...")
    assert len(str(back).encode()) <= status.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_bare_status_code_has_a_meaning(code):
    back = status.error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata()))
    assert type(back) in errors.ANSWERS
    assert str(back)


@pytest.mark.parametrize("said", ["nonsense", "nan", "-5", "1e99"])
def test_a_wrong_time_to_ask_again_is_made_harmless(said):
    trailers = grpc.aio.Metadata(("outrider-error", "Overloaded"), ("outrider-retry-after-s", said))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    back = status.error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, "full"))
    assert isinstance(back, errors.Overloaded)
    assert 0.0 <= back.retry_after_s <= status.MAX_RETRY_S


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", r"nothing listens there \(connection refused\)"),
        ("name.invalid:1", "its host name cannot be resolved"),
    ],
)
async def test_a_peer_that_is_not_there_is_named_with_its_address_and_what_to_do(address, why):
    async with channels.channel(address, insecure=True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD)(b"", timeout=60)
    said = str(status.error_from_rpc(caught.value, f"the coordinator at {address}", "start it"))
    assert re.fullmatch(rf"the coordinator at {address} cannot be reached: {why}; start it", said)
    assert status.is_unresolved(caught.value) is ("resolved" in why)
