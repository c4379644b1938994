"""Test what the operator's command prints: values that steer no terminal, whole numbers in JSON, rates of `top`."""

from __future__ import annotations

import argparse
import json
import re

from coordinator.cli import verifiers
from coordinator.cli.output import Result, facts, fields, render, table
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

EVIL = "\x1b[2J\u202eevil\u2028"


def test_no_value_is_taken_for_a_code_or_a_line() -> None:
    columns = {"NAME": lambda row: row["name"]}
    for view in (table(columns, [{"name": EVIL + "\n"}], "none"), facts({"a": {"b": EVIL + "\n"}}), f"said {EVIL}"):
        said = render(Result({}, view), "table")
        assert r"\x1b[2J\u202eevil\u2028" in said
        assert all(c.isprintable() for line in said.split("\n") for c in line) and said.count("\n") < 2
    assert table(columns, [], "none") == "none"


def test_json_has_the_fields_of_messages_with_counts_as_numbers_and_without_what_is_absent() -> None:
    telemetry = VerifierTelemetry(accepted=3, step_ms=0.5, step_cost_ms={2: 1.5, 1: 1.0})
    status = pb.VerifierStatus(verifier_id="v", telemetry=telemetry)
    document = json.loads(render(Result(fields(status, "address"), ""), "json"))
    assert document["telemetry"]["accepted"] == 3
    assert list(document["telemetry"]["step_cost_ms"].items()) == [("1", 1.0), ("2", 1.5)]
    assert "target" not in document and "address" not in document
    assert re.search(r"^telemetry.step_cost_ms +1:1,2:1.5$", facts(document), re.MULTILINE)
    assert facts({"urls": ("a", "b"), "none": ()}).split() == ["urls", "a,", "b", "none", "-"]


async def test_top_shows_the_busiest_sessions_and_their_speed_since_the_frame_before(monkeypatch) -> None:
    now, committed, epoch = 0.0, {"a": 0, "b": 10}, 1
    monkeypatch.setattr(verifiers.time, "monotonic", lambda: now)

    async def call(method: str, _: object) -> pb.ListVerifiersResponse | pb.ListSessionsResponse:
        if method == "ListVerifiers":
            return pb.ListVerifiersResponse()
        known = [SessionTelemetry(session_id=name, committed=n, epoch=epoch) for name, n in committed.items()]
        return pb.ListSessionsResponse(sessions=[pb.SessionStatus(telemetry=one) for one in known], total=2)

    frames = verifiers.Frames()
    options = argparse.Namespace(sessions=1)

    async def busiest() -> list[str]:
        head, row, left = (await frames.next(options, call)).view.splitlines()[-3:]
        assert head.startswith("TOKENS/S  SESSION") and left == "and 1 more sessions"
        return row.split()[:2]

    assert await busiest() == ["-", "b"]
    now, committed = 2.0, {"a": 60, "b": 20}
    assert await busiest() == ["30", "a"]
    now, epoch = 4.0, 2  # both have moved, and begun again elsewhere
    assert await busiest() == ["-", "a"]
