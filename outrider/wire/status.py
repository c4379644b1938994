"""Convert core errors to gRPC statuses (core.errors.ANSWERS) and back.

A status code alone is too coarse (three errors are INVALID_ARGUMENT or FAILED_PRECONDITION), so the class travels by
name in the trailing metadata, with the fields that it carries. For a status without such a name, as gRPC itself sends,
the code decides.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import grpc

from outrider.core import errors
from outrider.core.errors import ANSWERS, OutriderError

log = logging.getLogger(__name__)

Code = grpc.StatusCode

# What a code means when it comes without our metadata: from gRPC itself, a proxy, or a newer peer.
_PLAIN: Mapping[grpc.StatusCode, type[OutriderError]] = {
    **{Code.__members__[answer.grpc]: cls for cls, answer in reversed(list(ANSWERS.items()))},
    Code.OUT_OF_RANGE: errors.BadRequest,
    Code.FAILED_PRECONDITION: errors.BadRequest,
    Code.UNIMPLEMENTED: errors.BadRequest,
    Code.DEADLINE_EXCEEDED: errors.Unavailable,
    Code.CANCELLED: errors.Unavailable,
    Code.UNKNOWN: errors.InternalError,
}

_UNRESOLVED = "its host name cannot be resolved"
_REASONS = (
    ("http proxy returned", "its proxy refuses the connection"),
    ("connection refused", "nothing listens there (connection refused)"),
    ("resolving", _UNRESOLVED),
    ("lookup", _UNRESOLVED),
    ("wrong_version_number", "it does not speak TLS"),
    ("certificate", "its TLS certificate is not trusted"),
    ("handshake", "the TLS handshake failed; does it speak TLS?"),
    ("http1", "another program listens there, an HTTP server"),
    ("parsing http/2", "another program listens there, or it wants TLS"),
    ("unreachable", "there is no route to its address"),
    ("no route", "there is no route to its address"),
    ("timed out", "it did not answer in time"),
    ("timeout", "it did not answer in time"),
    ("reset", "it closed the connection; does it want TLS?"),
    ("closed", "the connection was closed"),
    ("goaway", "the connection was closed"),
)
"""(what gRPC's text about a failed connection contains, in small letters; what that means), the first that fits."""

ERROR_KEY = "outrider-error"
_RETRY_KEY = "outrider-retry-after-s"
_FIELD_KEY = "outrider-field-bin"  # bytes: a field may name what a peer sent

# gRPC drops a whole call whose trailers exceed 8 KiB, and percent-encoding triples a byte.
MAX_MESSAGE_BYTES = 2_000
MAX_FIELD_BYTES = 256
MAX_RETRY_S = 3_600.0
_LOST_STATUS = "Internal error from Core"
"""What gRPC's aio client tells in place of the status of a call that the server ends while the client is writing
(grpc/grpc#36066)."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with the status of `error`. The peer is sent no more than the error's own message."""
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
        raise error  # already ended, or a cancellation
    told = error if isinstance(error, OutriderError) else _disguised(error)
    # The frames hold what the peer sent; in a reference cycle with the abort they would wait for the collector.
    error.__traceback__ = None
    cls = errors.known(told)
    await context.abort(
        Code.__members__[ANSWERS[cls].grpc], _clipped(str(told), MAX_MESSAGE_BYTES), _trailers(cls, told)
    )
    raise told  # unreachable: abort raises


@contextlib.asynccontextmanager
async def aborting(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of whatever the body raises."""
    try:
        yield
    except Exception as error:
        await abort(context, error)


def error_from_rpc(error: grpc.RpcError, peer: str = "the peer", advice: str = "") -> OutriderError:
    """Return the error that the peer raised, or the nearest one to a sync or aio error of gRPC itself.

    peer, advice: which program at which address was called, and what to do if it cannot be reached, for messages.
    """
    code: grpc.StatusCode = getattr(error, "code", lambda: Code.UNKNOWN)()
    message = str(getattr(error, "details", lambda: "")() or "")
    trailers = dict(getattr(error, "trailing_metadata", lambda: ())() or ())
    cls = errors.named(_text(trailers.get(ERROR_KEY, "")))
    if cls is None:
        return _plain(code, message, peer, advice)
    retry_after_s = _retry(trailers[_RETRY_KEY]) if _RETRY_KEY in trailers else None
    return cls(message, field=_text(trailers.get(_FIELD_KEY, "")), retry_after_s=retry_after_s)


def is_unresolved(error: grpc.RpcError) -> bool:
    """Return whether a call failed since a host name was not found. gRPC looks it up again after up to two minutes,
    a new channel at once."""
    details = str(getattr(error, "details", lambda: "")() or "")
    return bool(error.code() is Code.UNAVAILABLE and _why(Code.UNAVAILABLE, details) == _UNRESOLVED)


def _plain(code: grpc.StatusCode, message: str, peer: str, advice: str) -> OutriderError:
    if code is Code.INTERNAL and message == _LOST_STATUS:
        return errors.Unavailable("the call ended while a message was being sent, and gRPC lost its status; try again")
    if code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
        log.debug("%s cannot be reached: %s", peer, message)
        return errors.Unavailable(f"{peer} cannot be reached: {_why(code, message)}{advice and '; '}{advice}")
    if code is Code.RESOURCE_EXHAUSTED and "larger than max" in message:
        return errors.BadRequest(message)  # gRPC's own bound on a message: sending it again cannot help
    if code is Code.UNIMPLEMENTED:
        message = (
            f"{peer} does not serve this call ({message}): is it a verifier where a coordinator is meant, or the"
            " other way round, or of another version?"
        )
    cls = _PLAIN.get(code, errors.InternalError)
    return cls(message or f"the call ended with {code.name}")


def _why(code: grpc.StatusCode, message: str) -> str:
    """Return in plain words why gRPC itself ended a call; only the log has its own."""
    if code is Code.DEADLINE_EXCEEDED:
        return "it did not answer in time"
    return next((words for part, words in _REASONS if part in message.lower()), "there is no connection")


def _trailers(cls: type[OutriderError], error: OutriderError) -> tuple[tuple[str, str | bytes], ...]:
    trailers: list[tuple[str, str | bytes]] = [(ERROR_KEY, cls.__name__)]
    if error.field:
        trailers.append((_FIELD_KEY, _clipped(error.field, MAX_FIELD_BYTES).encode()))
    if error.retry_after_s or cls.retry_after_s:
        trailers.append((_RETRY_KEY, repr(float(error.retry_after_s))))
    return tuple(trailers)


def _disguised(error: Exception) -> errors.InternalError:
    """Log a defect with its traceback, and return an error with nothing but the number that the log's line has."""
    error_id = secrets.token_hex(6)
    log.error("internal error %s", error_id, exc_info=error)
    return errors.InternalError(f"internal error {error_id}; the server's log has the cause under this id")


def _clipped(text: str, size: int) -> str:
    raw = text.encode(errors="replace")
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "..."


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _retry(value: str | bytes) -> float:
    try:
        seconds = float(_text(value) or "1")
    except ValueError:
        return 1.0
    return min(max(seconds, 0.0), MAX_RETRY_S) if seconds == seconds else 1.0
