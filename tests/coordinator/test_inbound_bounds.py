"""Test that every inbound value is checked against a bound, and that the refusal names field and value."""

import pytest
from peers import identity

from outrider.core.errors import BadRequest, Unauthenticated
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

GOOD_OPEN = {"target": "demo"}
GOOD_RESUME = {"session_id": "s", "ticket": b"t"}
GOOD_REGISTER = {
    "verifier_id": "v1",
    "address": "127.0.0.1:1",
    "target": identity(),
    "capacity_sessions": 1,
    "instance": 1,
}
GOOD_REPORT = {"verifier_id": "v1", "instance": 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"target": "x" * 161}, "length of target is 161, must be at most 160"),
        ({"prompt_tokens": 2**31}, "prompt_tokens is 2147483648"),
    ],
)
async def test_an_open_beyond_its_bounds_is_refused(coordinator, refused, change, complaint):
    error = await refused(coordinator.sessions.OpenSession(pb.OpenSessionRequest(**{**GOOD_OPEN, **change})))
    assert type(error) is BadRequest
    assert complaint in str(error)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"session_id": ""}, "session_id is ''"),
        ({"session_id": "a:b"}, "session_id is 'a:b'"),
        ({"session_id": "s" * 129}, "1 to 128"),
        ({"ticket": b"t" * 4_097}, "bytes of ticket is 4097"),
        ({"failed_verifiers": ["v"] * 65}, "failed_verifiers is 65"),
        ({"failed_verifiers": ["{x}"]}, "failed_verifiers is '{x}'"),
        ({"last_epoch": 2**64 - 1}, "last_epoch is 18446744073709551615"),
    ],
)
async def test_a_resume_beyond_its_bounds_is_refused(coordinator, refused, change, complaint):
    error = await refused(coordinator.sessions.ResumeSession(pb.ResumeSessionRequest(**{**GOOD_RESUME, **change})))
    assert type(error) is BadRequest
    assert complaint in str(error)


async def test_a_close_beyond_its_bounds_is_refused(coordinator, refused):
    close = coordinator.sessions.CloseSession
    assert type(await refused(close(pb.CloseSessionRequest(session_id="*", ticket=b"t")))) is BadRequest
    assert type(await refused(close(pb.CloseSessionRequest(session_id="s", ticket=b"t" * 5_000)))) is BadRequest
    assert type(await refused(close(pb.CloseSessionRequest(session_id="s")))) is Unauthenticated


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"verifier_id": ""}, "verifier_id is ''"),
        ({"verifier_id": "v" * 65}, "1 to 64"),
        ({"verifier_id": "v\n1"}, "verifier_id"),
        ({"address": "nowhere"}, "HOST:PORT"),
        ({"address": "h" * 256 + ":1"}, "length of address is 258"),
        ({"address": "127.0.0.1:0"}, "port of address is 0"),
        ({"capacity_sessions": 0}, "capacity_sessions is 0"),
        ({"capacity_sessions": 4_097}, "capacity_sessions is 4097"),
        ({"instance": 0}, "instance is 0"),
        ({"target": identity(name="")}, "target.name is '', must be 1 to 160 printable"),
        ({"target": identity(weights_hash="")}, "target.weights_hash is '', must be 1 to 160 printable"),
        ({"target": identity(hardware="h" * 161)}, "target.hardware is 161 characters long, must be 0 to 160"),
        ({"target": identity(name="a\x1b[2J")}, "target.name is 'a\\x1b[2J', must be 1 to 160 printable"),
    ],
)
async def test_a_registration_beyond_its_bounds_is_refused(coordinator, refused, change, complaint):
    error = await refused(coordinator.registry.Register(pb.RegisterRequest(**{**GOOD_REGISTER, **change})))
    assert type(error) is BadRequest
    assert complaint in str(error)
    assert await coordinator.alive() == set()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"verifier_id": "v/1"}, "verifier_id is 'v/1'"),
        ({"instance": 0}, "instance is 0"),
        ({"verifier": VerifierTelemetry(live_sessions=10**6)}, "live_sessions is 1000000"),
        ({"verifier": VerifierTelemetry(step_ms=float("inf"))}, "step_ms is inf"),
        ({"verifier": VerifierTelemetry(node_ms=float("nan"))}, "node_ms is nan"),
        ({"verifier": VerifierTelemetry(timing_ms={"verify": -1.0})}, "timing_ms of verify is -1.0"),
        ({"verifier": VerifierTelemetry(timing_ms={str(i): 1.0 for i in range(17)})}, "entries in timing_ms is 17"),
        ({"verifier": VerifierTelemetry(timing_ms={"p" * 33: 1.0})}, "length of a name in timing_ms is 33"),
        ({"verifier": VerifierTelemetry(step_cost_ms={8: -1.0})}, "step_cost_ms of 8 is -1.0"),
        ({"verifier": VerifierTelemetry(step_cost_ms=dict.fromkeys(range(65), 1.0))}, "entries in step_cost_ms is 65"),
        ({"verifier": VerifierTelemetry(session_cost_ms=float("inf"))}, "session_cost_ms is inf"),
        ({"verifier": VerifierTelemetry(tokens_per_s=-1.0)}, "tokens_per_s is -1.0"),
        ({"verifier": VerifierTelemetry(min_acceptance=1.5)}, "min_acceptance is 1.5"),
        ({"sessions": [SessionTelemetry(session_id="s")] * 8_193}, "entries in sessions is 8193"),
        ({"sessions": [SessionTelemetry(session_id="")]}, "session_id is ''"),
        ({"sessions": [SessionTelemetry(session_id="s", evaluated=2**64 - 1)] * 2}, "sessions.evaluated is 184467"),
        ({"sessions": [SessionTelemetry(session_id="s", accepted=2**64 - 1)] * 2}, "sessions.accepted is 184467"),
        ({"sessions": [SessionTelemetry(session_id="s", rtt_ms=float("nan"))]}, "sessions.rtt_ms is nan"),
        ({"sessions": [SessionTelemetry(session_id="s", tenant="t" * 65)]}, "sessions.tenant is 'ttt"),
        ({"sessions": [SessionTelemetry(session_id="s", tenant="a:b")]}, "sessions.tenant is 'a:b'"),
    ],
)
async def test_a_report_beyond_its_bounds_is_refused(coordinator, refused, change, complaint):
    error = await refused(coordinator.registry.Report(pb.ReportRequest(**{**GOOD_REPORT, **change})))
    assert type(error) is BadRequest
    assert complaint in str(error)


async def test_a_report_at_its_bounds_is_taken(coordinator):
    await coordinator.registry.Register(pb.RegisterRequest(**{**GOOD_REGISTER, "capacity_sessions": 4_096}))
    extreme = SessionTelemetry(session_id="s" * 128, epoch=2**64 - 1, steps=2**64 - 1, committed=2**64 - 1)
    assert (await coordinator.registry.Report(pb.ReportRequest(**GOOD_REPORT, sessions=[extreme]))).known
    [shown] = await coordinator.placed()
    reported = shown.telemetry
    assert (reported.epoch, reported.steps, reported.committed) == (2**64 - 1,) * 3
