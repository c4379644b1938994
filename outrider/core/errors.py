"""Define the one tree of errors, and how each class is answered over gRPC and HTTP.

    OutriderError
    |-- BadRequest                 the caller sent something wrong; sending it again cannot help
    |   |-- ProtocolViolation      a peer broke the session protocol
    |   `-- VocabularyMismatch     draft and target do not share a token table
    |-- Unauthenticated            no ticket or key, or a wrong or expired one
    |-- PermissionDenied           a good ticket for somebody or something else
    |-- NotFound                   an unknown target, session or artifact
    |-- Fenced                     an epoch that a greater one has replaced
    |-- Killed                     an operator has ended the session; asking again cannot help
    |-- Overloaded                 no room at present; `retry_after_s` says when to ask again
    |-- Unavailable                the peer cannot be reached, is loading or has gone; try another
    |   `-- Draining               a verifier that is about to end; another one takes the session
    |-- TimedOut                   the request's own time is over
    |-- ModelRefused               a model or draft that cannot be served, with the reason
    `-- InternalError              a defect on our side

Every message says what was wrong, what was got and how to correct it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from outrider.core.text import masked

TOO_LONG = "length of prompt"
"""`field` of a BadRequest for a text that the target, or offline the draft, cannot hold."""


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""

    retry_after_s = 0.0
    """Seconds after which the peer asks for another try; 0 if it named none."""

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        """field: what is out of bounds. retry_after_s: as of the class if not given.

        Credentials in URLs of the message are masked.
        """
        super().__init__(masked(message))
        self.field = field
        self.retry_after_s = self.retry_after_s if retry_after_s is None else retry_after_s


class BadRequest(OutriderError):
    """A value is outside its stated bound. `field` names it."""

    @classmethod
    def bound(cls, field: str, got: object, bound: str) -> Self:
        """Return the error for a value outside a bound, in the form that all bounds share."""
        return cls(f"{field} is {got}, must be {bound}", field=field)


def between(field: str, value: float, low: float, high: float) -> None:
    """Raise BadRequest unless the value is a number from low to high."""
    if not low <= value <= high:  # NaN is not, either
        raise BadRequest.bound(field, value, f"between {low} and {high}")


class ProtocolViolation(BadRequest):
    """The session protocol forbids this message in this state."""


class VocabularyMismatch(BadRequest):
    """The draft and the target would not mean the same text by the same ids."""


class Unauthenticated(OutriderError):
    """The ticket or key is missing, malformed, expired or badly signed."""


class PermissionDenied(OutriderError):
    """The ticket or key is genuine and does not allow this."""


class NotFound(OutriderError):
    """There is no such target, session, verifier or artifact."""


class Fenced(OutriderError):
    """A greater epoch owns the session."""


class Killed(OutriderError):
    """An operator has ended the session, for good."""


class Overloaded(OutriderError):
    """Refused before any work was done. `retry_after_s` is in seconds."""

    retry_after_s = 1.0


class Unavailable(OutriderError):
    """The peer cannot be reached, is loading or went away. `retry_after_s`: seconds, 0 where the peer named none."""

    waited = False
    """Whether it was waited for longer than a restart takes: another try would only wait again."""


class Draining(Unavailable):
    """The verifier is about to end: another one takes the session, now."""


class TimedOut(OutriderError):
    """The request took longer than its caller allows.

    `seconds`: that time. `first_token`: whether it was the time until the first token.
    """

    def __init__(self, message: str, *, seconds: float = 0.0, first_token: bool = False, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.seconds = seconds
        self.first_token = first_token


class ModelRefused(OutriderError):
    """A model or draft file that fails a check at load."""


class InternalError(OutriderError):
    """Something that must not happen happened here."""


class Answer(NamedTuple):
    """Says how a class of errors is answered. http: status, type and code in OpenAI's shape."""

    grpc: str
    http: tuple[int, str, str]


_INVALID, _SERVER, _UPSTREAM = "invalid_request_error", "server_error", "upstream_error"
ANSWERS: Mapping[type[OutriderError], Answer] = {
    BadRequest: Answer("INVALID_ARGUMENT", (400, _INVALID, "invalid_value")),
    ProtocolViolation: Answer("INVALID_ARGUMENT", (502, _UPSTREAM, "protocol_violation")),
    VocabularyMismatch: Answer("FAILED_PRECONDITION", (500, _SERVER, "vocabulary_mismatch")),
    Unauthenticated: Answer("UNAUTHENTICATED", (502, _UPSTREAM, "upstream_refused")),
    PermissionDenied: Answer("PERMISSION_DENIED", (502, _UPSTREAM, "upstream_refused")),
    NotFound: Answer("NOT_FOUND", (404, _INVALID, "not_found")),
    Fenced: Answer("ABORTED", (500, _SERVER, "internal_error")),
    # Final, also to a peer that knows the status alone; HTTP clients would repeat what is answered by 5xx.
    Killed: Answer("FAILED_PRECONDITION", (410, _UPSTREAM, "session_killed")),
    Overloaded: Answer("RESOURCE_EXHAUSTED", (429, "rate_limit_error", "overloaded")),
    Unavailable: Answer("UNAVAILABLE", (503, "service_unavailable_error", "unavailable")),
    Draining: Answer("UNAVAILABLE", (503, "service_unavailable_error", "unavailable")),
    TimedOut: Answer("DEADLINE_EXCEEDED", (504, "timeout_error", "timeout")),
    ModelRefused: Answer("FAILED_PRECONDITION", (400, _INVALID, "model_refused")),
    InternalError: Answer("INTERNAL", (500, _SERVER, "internal_error")),
    OutriderError: Answer("UNKNOWN", (500, _SERVER, "internal_error")),
}
_BY_NAME = {cls.__name__: cls for cls in ANSWERS}


def known(error: OutriderError) -> type[OutriderError]:
    """Return the class that a peer knows of an error: its own, or the nearest one above it."""
    return next(cls for cls in type(error).__mro__ if cls in ANSWERS)


def named(name: str) -> type[OutriderError] | None:
    """Return the class of a name; None for one that is not known here."""
    return _BY_NAME.get(name)
