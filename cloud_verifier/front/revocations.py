"""Remember which tickets ended before their time, by what the coordinator's answers to reports say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from outrider.core.errors import Killed, OutriderError, PermissionDenied, Unauthenticated
from outrider.wire.ticket import Claims
from outrider.wire.v1 import coordinator_pb2 as pb

CLOCK_SKEW_S = 5.0
"""Seconds for which a ticket is taken after its expiry, since clocks differ."""
MAX_REVOCATIONS = 131_072
"""Revocations that are remembered, with sessions that their devices have closed; the oldest are forgotten first."""
_REFUSALS: Mapping[str, tuple[type[OutriderError], str]] = {
    "session_id": (Killed, "an operator has ended the session; it is not to be resumed"),
    "api_key_id": (Unauthenticated, "the API key that opened the session was revoked; open a new one with a valid key"),
    "key_id": (Unauthenticated, "the key that signed the ticket was revoked; open a new session"),
    "closed": (PermissionDenied, "the device has closed the session; open a new one"),
}
"""What has ended -> the error that refuses the ticket, and its text."""


class Revocations:
    """Knows the sessions, API keys and signing keys whose tickets are valid no longer.

    It is lost with the process, whose first report asks for all. Not thread-safe.
    """

    def __init__(self) -> None:
        self.seen = 0
        """What the next report names as the last revocation that is known."""
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()
        """("session_id", "api_key_id", "key_id" or "closed", its id) -> Unix time after which no ticket needs it."""

    def learn(self, answer: pb.ReportResponse, now: float) -> None:
        """Take the revocations of an answer, and forget those that have had their time. now: Unix time in seconds."""
        for one in answer.revocations:
            kind = one.WhichOneof("ended")
            if kind is not None:
                self._add((kind, getattr(one, kind)), one.until_unix)
        if answer.known:
            self.seen = answer.revocations_seen
        while self._until and next(iter(self._until.values())) < now:
            self._until.popitem(last=False)

    def close(self, claims: Claims) -> None:
        """Remember until the ticket expires that its device has closed the session."""
        self._add(("closed", claims.session_id), claims.expires_unix + CLOCK_SKEW_S)

    def check(self, claims: Claims) -> None:
        """Raise Killed, PermissionDenied or Unauthenticated if the ticket of these claims is valid no longer."""
        for kind, (error, text) in _REFUSALS.items():
            name = claims.session_id if kind == "closed" else getattr(claims, kind)
            if name and (kind, name) in self._until:
                raise error(text)

    def _add(self, key: tuple[str, str], until_unix: float) -> None:
        self._until[key] = max(until_unix, self._until.pop(key, 0.0))
        if len(self._until) > MAX_REVOCATIONS:
            self._until.popitem(last=False)
