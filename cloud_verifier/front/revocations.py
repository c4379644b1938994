"""Remember which tickets ended before their time, by what the coordinator's answers to reports say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from outrider.core.errors import Killed, OutriderError, PermissionDenied, Unauthenticated
from outrider.wire.ticket import Claims
from outrider.wire.v1 import coordinator_pb2 as pb

CLOCK_SKEW_S = 5.0
"""Seconds for which a ticket is taken after its expiry, since clocks differ."""
MAX_REVOCATIONS = 65_536
"""Revocations that are remembered, and as many sessions that their devices have closed, which a tenant makes as many as
it likes; of each the oldest are forgotten first."""
_Ended = OrderedDict[tuple[str, str], float]
_REFUSALS: Mapping[str, tuple[type[OutriderError], str]] = {
    "session_id": (Killed, "an operator has ended the session; it is not to be resumed"),
    "api_key_id": (Unauthenticated, "the API key that opened the session was revoked; open a new one with a valid key"),
    "closed": (PermissionDenied, "the device has closed the session; open a new one"),
}
"""What has ended -> the error that refuses the ticket, and its text."""


class Revocations:
    """Knows the sessions and API keys whose tickets are valid no longer.

    It is lost with the process, whose first report asks for all. Not thread-safe.
    """

    def __init__(self) -> None:
        self.seen = 0
        """What the next report names as the last revocation that is known."""
        self._revoked: _Ended = OrderedDict()
        """("session_id" or "api_key_id", its id) -> Unix time after which no ticket needs it."""
        self._closed: _Ended = OrderedDict()
        """("closed", session id) -> the same."""

    def learn(self, answer: pb.ReportResponse, now: float) -> None:
        """Take the revocations of an answer, and forget those that have had their time. now: Unix time in seconds."""
        for one in answer.revocations:
            kind = one.WhichOneof("ended")
            if kind is not None:
                _add(self._revoked, (kind, getattr(one, kind)), one.until_unix)
        if answer.known:
            self.seen = answer.revocations_seen
        for ended in (self._revoked, self._closed):
            while ended and next(iter(ended.values())) < now:
                ended.popitem(last=False)

    def close(self, claims: Claims) -> None:
        """Remember until the ticket expires that its device has closed the session."""
        _add(self._closed, ("closed", claims.session_id), claims.expires_unix + CLOCK_SKEW_S)

    def check(self, claims: Claims) -> None:
        """Raise Killed, PermissionDenied or Unauthenticated if the ticket of these claims is valid no longer."""
        for kind, (error, text) in _REFUSALS.items():
            name = claims.session_id if kind == "closed" else getattr(claims, kind)
            if name and ((kind, name) in self._revoked or (kind, name) in self._closed):
                raise error(text)


def _add(ended: _Ended, key: tuple[str, str], until_unix: float) -> None:
    ended[key] = max(until_unix, ended.pop(key, 0.0))
    if len(ended) > MAX_REVOCATIONS:
        ended.popitem(last=False)
