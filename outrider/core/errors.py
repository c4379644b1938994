"""Define the one tree of errors; wire.status maps each class to a gRPC status and back.

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

from typing import Self


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""

    retry_after_s = 0.0
    """Seconds after which the peer asks for another try; 0 if it named none."""


class BadRequest(OutriderError):
    """A value is outside its stated bound. `field` names it."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field

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

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """The peer cannot be reached, is loading or went away. `retry_after_s`: seconds, 0 where the peer named none."""

    waited = False
    """Whether it was waited for longer than a restart takes: another try would only wait again."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Unavailable):
    """The verifier is about to end: another one takes the session, now."""


class TimedOut(OutriderError):
    """The request took longer than its caller allows.

    `seconds`: that time. `first_token`: whether it was the time until the first token.
    """

    def __init__(self, message: str, *, seconds: float = 0.0, first_token: bool = False) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.first_token = first_token


class ModelRefused(OutriderError):
    """A model or draft file that fails a check at load."""


class InternalError(OutriderError):
    """Something that must not happen happened here."""
