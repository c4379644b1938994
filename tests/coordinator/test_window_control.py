"""What verifiers report becomes directives, kept where every coordinator finds them, within an operator's bounds."""

from __future__ import annotations

import random

import pytest
from peers import until

from coordinator.records import Load, SessionStats, WindowBounds
from coordinator.window import control
from outrider.core.errors import BadRequest, Unauthenticated
from outrider.core.verdicts import HIT, MISS
from outrider.wire.v1 import coordinator_pb2 as pb

LOAD = Load(step_cost_ms={1: 30.0, 65: 33.2}, session_cost_ms=0.1, timing_ms={"between": 1.0})
"""A verifier on which nodes cost next to nothing."""
REPORTED = {"step_cost_ms": {1: 30.0, 65: 33.2}, "session_cost_ms": 0.1}


def verdicts(hit: float, count: int = 96, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return bytes(HIT if rng.random() < hit else MISS for _ in range(count))


def stats(session_id: str = "s", hit: float = 0.85, **changes: object) -> SessionStats:
    fields = {"epoch": 5, "rtt_ms": 20.0, "verdicts": verdicts(hit), "draft_ms": 2.0, "nodes_per_level": 1.5}
    return SessionStats(session_id, "default", "v1", **(fields | changes))  # type: ignore[arg-type]


def report(session_id: str, hit: float = 0.85, **changes: object) -> pb.SessionReport:
    fields = {"epoch": 5, "rtt_ms": 20.0, "verdicts": verdicts(hit), "draft_ms": 2.0, "nodes_per_level": 1.5}
    return pb.SessionReport(session_id=session_id, **(fields | changes))


def test_a_good_draft_speculates_and_a_bad_one_only_probes() -> None:
    decided = control.decide(LOAD, [stats("good"), stats("bad", hit=0.0)], {}, {})
    good, bad = (control.directive(decided[name]) for name in ("good", "bad"))
    assert decided["good"].speedup > 1.5
    assert good.nodes_per_step > decided["good"].k >= 4
    assert good.window_nodes >= good.window_depth > 4
    assert decided["bad"].k == 0
    assert (bad.nodes_per_step, bad.window_depth > 0) == (0, True)


@pytest.mark.parametrize("changes", [{"verdicts": b""}, {"verdicts": verdicts(0.9, 10)}, {"rtt_ms": 0.0}])
def test_nothing_is_decided_about_a_session_that_is_hardly_known(changes: dict[str, object]) -> None:
    assert control.decide(LOAD, [stats(**changes)], {}, {}) == {}


def test_nor_where_the_verifier_tells_no_costs() -> None:
    assert control.decide(Load(), [stats()], {}, {}) == {}


def test_a_draft_that_has_become_good_is_judged_by_its_last_guesses() -> None:
    turned = verdicts(0.0, 200) + verdicts(0.85, control.RECENT)
    assert control.decide(LOAD, [stats(verdicts=turned)], {}, {})["s"].k > 0


def test_bounds_bound_and_pins_pin_the_session_or_all_others() -> None:
    sessions = [stats("a"), stats("b"), stats("new", verdicts=b"")]
    bounds = {"": WindowBounds(2, 6), "b": WindowBounds(0, 0), "new": WindowBounds(3, 9, pinned=True)}
    decided = control.decide(LOAD, sessions, {}, bounds)
    assert 0 < decided["a"].k <= 2
    assert decided["a"].depth <= 6
    assert decided["b"].k == 0
    assert (decided["new"].k, decided["new"].depth, decided["new"].reason) == (3, 9, "pinned by the operator")


def test_a_pinned_session_that_is_slower_than_streaming_keeps_nobody_else_from_speculating() -> None:
    hopeless = stats("pinned", hit=0.0)
    decided = control.decide(LOAD, [hopeless, stats("free")], {}, {"pinned": WindowBounds(4, 8, pinned=True)})
    assert decided["free"].k > 0


def test_another_epochs_window_is_no_reason_to_stick_to_it() -> None:
    before = control.decide(LOAD, [stats()], {}, {"": WindowBounds(1, 4, pinned=True)})
    same, other = (control.decide(LOAD, [stats(epoch=epoch)], before, {})["s"].k for epoch in (5, 6))
    assert other == control.decide(LOAD, [stats()], {}, {})["s"].k
    assert same >= 1


async def test_a_report_is_answered_with_directives_that_window_show_explains(coordinator) -> None:
    await coordinator.join("v1")
    opened = await coordinator.open()
    session = opened.session_id
    answer = await coordinator.report("v1", [report(session)], **REPORTED)
    [told] = answer.directives
    assert (told.session_id, told.epoch) == (session, 5)
    assert told.directive.nodes_per_step > 0
    shown = await coordinator.admin.ShowWindows(pb.ShowWindowsRequest())
    [window] = shown.windows
    assert (window.session_id, window.verifier_id, window.verdicts) == (session, "v1", 96)
    assert window.hits == pytest.approx(0.85, abs=0.1)
    assert "RTT 20 ms" in window.reason
    assert not (await coordinator.admin.ShowWindows(pb.ShowWindowsRequest(session_id="another"))).windows


async def test_what_one_coordinator_was_told_holds_at_every_other_and_across_reports(start) -> None:
    one, other = await start(), await start()
    await one.join("v1")
    session = (await one.open()).session_id
    pinned = pb.WindowBounds(k=2, depth=7, pinned=True)
    await one.admin.BoundWindow(pb.BoundWindowRequest(session_id=session, bounds=pinned))
    [told] = (await other.report("v1", [report(session)], **REPORTED)).directives
    assert (told.directive.nodes_per_step, told.directive.window_depth) == (3, 7)
    [window] = (await one.admin.ShowWindows(pb.ShowWindowsRequest(session_id=session))).windows
    assert window.bounds == pinned
    await one.admin.BoundWindow(pb.BoundWindowRequest(session_id=session))
    [told] = (await other.report("v1", [report(session)], **REPORTED)).directives
    assert told.directive.window_depth != 7


async def test_decisions_are_forgotten_with_the_session(start) -> None:
    coordinator = await start(lease_ms=300, report_interval_ms=50)
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id
    await coordinator.report("v1", [report(session)], **REPORTED)

    async def forgotten() -> bool:
        await coordinator.report("v1", **REPORTED)
        return not (await coordinator.admin.ShowWindows(pb.ShowWindowsRequest())).windows

    await until(forgotten)


async def test_window_control_can_be_left_out(start) -> None:
    coordinator = await start(window_control=False)
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id
    assert not (await coordinator.report("v1", [report(session)], **REPORTED)).directives


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"verdicts": bytes(2000)}, "bytes of sessions.verdicts is 2000"),
        ({"verdicts": b"\x07"}, "a byte of sessions.verdicts is 7"),
        ({"draft_ms": -1.0}, "sessions.draft_ms"),
        ({"nodes_per_level": float("nan")}, "sessions.nodes_per_level"),
    ],
)
async def test_what_cannot_be_measured_is_refused(coordinator, refused, bad, says) -> None:
    await coordinator.join("v1")
    error = await refused(coordinator.report("v1", [report("s", **bad)], **REPORTED))
    assert isinstance(error, BadRequest)
    assert says in str(error)


async def test_bounds_that_make_no_sense_are_refused(coordinator, refused) -> None:
    for bounds in (pb.WindowBounds(k=5, depth=4), pb.WindowBounds(k=1, depth=10_000)):
        error = await refused(coordinator.admin.BoundWindow(pb.BoundWindowRequest(session_id="s", bounds=bounds)))
        assert isinstance(error, BadRequest)


async def test_windows_are_for_operators(start, refused) -> None:
    coordinator = await start(admin_token="secret")
    for call in (
        coordinator.admin.ShowWindows(pb.ShowWindowsRequest()),
        coordinator.admin.BoundWindow(pb.BoundWindowRequest(session_id="s")),
    ):
        assert isinstance(await refused(call), Unauthenticated)
