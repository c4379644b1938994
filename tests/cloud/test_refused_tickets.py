"""Test which tickets a verifier refuses after what the coordinator has told it."""

from dataclasses import replace

import pytest

from cloud_verifier.front import revocations
from cloud_verifier.front.revocations import Revocations
from outrider.core.errors import Killed, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import coordinator_pb2 as pb

CLAIMS = Claims("s", "acme", "v1", 1, 256, 1_000.0, SessionLimits(), Target("demo", "w", "t"), api_key_id="a")


def answer(seen: int = 7, **named: str) -> pb.ReportResponse:
    found = [pb.Revocation(**{kind: name}, until_unix=2_000.0) for kind, name in named.items()]
    return pb.ReportResponse(known=True, revocations=found, revocations_seen=seen)


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [("session_id", "s", Killed), ("api_key_id", "a", Unauthenticated)],
)
def test_a_revoked_ticket_is_refused_until_no_ticket_needs_it(kind: str, name: str, error: type[Exception]) -> None:
    known = Revocations()
    known.check(CLAIMS)
    known.learn(answer(**{kind: name}), 500.0)
    assert known.seen == 7
    with pytest.raises(error):
        known.check(CLAIMS)
    known.check(replace(CLAIMS, session_id="t", api_key_id="b"))
    known.learn(pb.ReportResponse(), 1_998.0)  # that of a report that failed
    assert known.seen == 7
    known.learn(answer(), 1_999.0)
    with pytest.raises(error):
        known.check(CLAIMS)
    known.learn(answer(), 2_001.0)
    known.check(CLAIMS)


def test_a_closed_session_is_refused_until_its_ticket_has_expired() -> None:
    known = Revocations()
    known.close(CLAIMS)
    with pytest.raises(PermissionDenied, match="open a new one"):
        known.check(CLAIMS)
    known.learn(answer(), 1_004.0)
    with pytest.raises(PermissionDenied):
        known.check(CLAIMS)
    known.learn(answer(), 1_006.0)
    known.check(CLAIMS)


def test_no_number_of_closed_sessions_makes_a_verifier_forget_a_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "MAX_REVOCATIONS", 2)
    known = Revocations()
    known.learn(answer(session_id="s"), 0.0)
    for name in "tuvw":
        known.close(replace(CLAIMS, session_id=name))
    with pytest.raises(Killed):
        known.check(CLAIMS)
    with pytest.raises(PermissionDenied):
        known.check(replace(CLAIMS, session_id="w"))
    known.check(replace(CLAIMS, session_id="t"))
