"""Test that reports become directives, kept where every coordinator finds them, within an operator's bounds."""

from __future__ import annotations

import math
import random

import pytest
from peers import until

from coordinator import window
from outrider.core.acceptance.history import HIT, MISS
from outrider.core.errors import BadRequest, NotFound
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import telemetry_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

LOAD = VerifierTelemetry(step_cost_ms={1: 30.0, 65: 33.2}, session_cost_ms=0.1, timing_ms={"between": 1.0})
"""A verifier on which nodes cost next to nothing."""
LIMITS = SessionLimits()
REPORTED = {"step_cost_ms": {1: 30.0, 65: 33.2}, "session_cost_ms": 0.1}


def history(hit: float, count: int = 96, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return bytes(HIT if rng.random() < hit else MISS for _ in range(count))


def stats(session_id: str = "s", hit: float = 0.85, **changes: object) -> SessionTelemetry:
    fields = {"epoch": 5, "rtt_ms": 20.0, "acceptance_history": history(hit), "draft_ms": 2.0, "nodes_per_level": 1.5}
    return SessionTelemetry(session_id=session_id, tenant="default", **(fields | changes))  # type: ignore[arg-type]


def report(session_id: str, hit: float = 0.85, **changes: object) -> telemetry_pb2.SessionTelemetry:
    fields = {"epoch": 5, "rtt_ms": 20.0, "acceptance_history": history(hit), "draft_ms": 2.0, "nodes_per_level": 1.5}
    return telemetry_pb2.SessionTelemetry(session_id=session_id, **(fields | changes))


def decide(
    *sessions: SessionTelemetry,
    before: dict[str, pb.WindowDecision] | None = None,
    load: VerifierTelemetry = LOAD,
    limits: SessionLimits = LIMITS,
    priors: dict[str, SessionTelemetry] | None = None,
    **bounds_of: pb.WindowBounds,
) -> dict[str, pb.WindowDecision]:
    """Return the decisions. bounds_of: by session id; `everybody` is ""."""
    named = {"" if name == "everybody" else name: bound for name, bound in bounds_of.items()}
    return window.decide(load, sessions, before or {}, named, limits, priors or {})


def bounds(k: int, depth: int, pinned: bool = False) -> pb.WindowBounds:
    return pb.WindowBounds(window=pb.Window(k=k, depth=depth), pinned=pinned)


def test_a_good_draft_speculates_and_a_bad_one_only_probes() -> None:
    decided = decide(stats("good"), stats("bad", hit=0.0))
    good, bad = (window.directive(decided[name], LIMITS) for name in ("good", "bad"))
    assert decided["good"].speedup > 1.5
    assert good.nodes_per_step > decided["good"].window.k >= 4
    assert good.window_nodes >= good.window_depth > 4
    assert decided["bad"].window.k == 0
    assert (bad.nodes_per_step, bad.window_depth, bad.draft_wait_ms) == (0, window.PROBE_DEPTH, 0)


def test_a_session_that_is_alone_may_have_all_nodes_that_pay_by_the_verifiers_own_estimate() -> None:
    alone = decide(stats(), load=CPU)["s"]
    beside = decide(stats(), stats("other"), load=CPU)["s"]
    assert 0 < alone.window.k < alone.max_k == 16
    assert alone.window.depth - alone.max_k >= 2
    assert window.directive(alone, LIMITS).nodes_per_step > 2 * window.directive(beside, LIMITS).nodes_per_step
    assert beside.max_k == beside.window.k > 0
    assert decide(stats(), s=bounds(k=2, depth=6))["s"].window.k == 2


def test_a_near_device_is_waited_for_by_as_much_as_was_planned_with_and_never_beyond_a_part_of_a_step() -> None:
    near, far = decide(stats(rtt_ms=2.0))["s"], decide(stats(rtt_ms=100.0))["s"]
    assert 0.0 < near.window.draft_wait_ms <= 0.4 * 32.0
    assert window.directive(near, LIMITS).draft_wait_ms >= near.window.draft_wait_ms
    assert window.directive(far, LIMITS).draft_wait_ms == 0


@pytest.mark.parametrize(
    "changes", [{"acceptance_history": b""}, {"acceptance_history": history(0.9, 10)}, {"rtt_ms": 0.0}]
)
def test_nothing_is_decided_about_a_session_that_is_hardly_known(changes: dict[str, object]) -> None:
    assert decide(stats(**changes)) == {}


CPU = VerifierTelemetry(step_cost_ms={1: 10.0, 9: 17.0, 65: 80.0}, session_cost_ms=0.3)
"""A verifier on which nodes cost a lot."""


@pytest.mark.parametrize("load", [LOAD, CPU])
@pytest.mark.parametrize("nodes", [2, 10])
def test_a_newcomer_takes_nobodys_speculation_away(load: VerifierTelemetry, nodes: int) -> None:
    """It may have any number of nodes by its verifier's own setting, though they make every step longer."""
    known = [stats(f"s{i}", hit=0.9, rtt_ms=2.0, acceptance_history=history(0.9, seed=i)) for i in range(3)]
    alone = decide(*known, load=load)
    beside = decide(*known, stats("new", acceptance_history=b"", steps=2, committed=3, evaluated=2 * nodes), load=load)
    assert beside.keys() == alone.keys()
    assert all(window.window.k > 0 for window in alone.values())
    assert all(window.window.k > 0 for window in beside.values())


def test_a_session_that_has_never_drafted_counts_as_streaming_and_is_not_slowed_down() -> None:
    known = [stats(f"s{i}", hit=0.9, rtt_ms=2.0) for i in range(3)]
    beside = decide(*known, stats("thin", acceptance_history=b"", committed=500, steps=500), load=CPU)
    assert "thin" not in beside
    assert all(window.window.k == 0 for window in beside.values())


def test_bounds_bound_and_pins_pin_the_session_or_all_others() -> None:
    given = {
        "everybody": bounds(k=2, depth=6),
        "b": bounds(k=0, depth=0),
        "new": bounds(k=3, depth=9, pinned=True),
        "off": bounds(k=0, depth=0, pinned=True),
    }
    new = {"acceptance_history": b"", "committed": 3}
    decided = decide(stats("a"), stats("b"), stats("new", **new), stats("off"), stats("newer", **new), **given)
    assert 0 < decided["a"].window.k <= 2
    assert decided["a"].window.depth <= 6
    for session in ("b", "off"):
        directive = window.directive(decided[session], LIMITS)
        assert directive.nodes_per_step == directive.window_nodes == directive.window_depth == 0
    assert (decided["new"].window.k, decided["new"].window.depth, decided["new"].reason) == (
        3,
        9,
        "pinned by the operator",
    )
    assert (decided["newer"].window.k, decided["newer"].window.depth) == (
        2,
        6,
    )  # not known, and held to the bounds all the same


def test_a_pinned_session_that_is_slower_than_streaming_keeps_nobody_else_from_speculating() -> None:
    decided = decide(stats("pinned", hit=0.0), stats("free"), pinned=bounds(k=4, depth=8, pinned=True))
    assert decided["free"].window.k > 0


def test_no_window_is_beyond_the_tickets_limits() -> None:
    few = SessionLimits(nodes=6, depth=5)
    for decided in (
        decide(stats(), limits=few),
        decide(stats(), limits=few, s=bounds(k=99, depth=99, pinned=True)),
    ):
        directive = window.directive(decided["s"], few)
        assert directive.window_depth <= 5
        assert max(directive.window_nodes, directive.nodes_per_step) <= 6
        assert decided["s"].window.depth * decided["s"].window.nodes_per_level <= 6


def test_a_window_stays_in_its_epoch_and_the_next_one_begins_anew() -> None:
    other = stats("other")
    best = decide(stats(), other)["s"]
    near = pb.WindowDecision(session_id="s", epoch=5, window=pb.Window(k=12 if best.window.k > 12 else 16, depth=18))
    same, anew = (decide(stats(epoch=epoch), other, before={"s": near})["s"].window.k for epoch in (5, 6))
    assert same == near.window.k != best.window.k
    assert anew == best.window.k


def bound(session: str, bounds: pb.WindowBounds | None = None) -> pb.UpdateSessionRequest:
    return pb.UpdateSessionRequest(session_id=session, action="SESSION_ACTION_BOUND", bounds=bounds)


async def test_a_report_is_answered_with_directives_that_window_show_explains(coordinator) -> None:
    await coordinator.join("v1")
    opened = await coordinator.open()
    session = opened.session_id
    answer = await coordinator.report("v1", [report(session)], **REPORTED)
    [sent] = answer.directives
    assert (sent.session_id, sent.epoch) == (session, 5)
    assert sent.directive.nodes_per_step > 0
    [shown] = await coordinator.placed()
    window = shown.window
    assert (window.session_id, window.verifier_id, window.observations) == (session, "v1", 96)
    assert window.first_acceptance == pytest.approx(0.85, abs=0.1)
    assert "RTT 20 ms" in window.reason


async def test_bounds_set_at_one_coordinator_hold_at_every_other_and_across_reports(start) -> None:
    one, other = await start(), await start()
    await one.join("v1")
    session = (await one.open()).session_id
    pinned = pb.WindowBounds(window=pb.Window(k=2, depth=7, draft_wait_ms=11, nodes_per_level=2.0), pinned=True)
    await one.admin.UpdateSession(bound(session, pinned))

    async def told(peer) -> tuple[int, int, int, int]:
        """Return what a report is answered: one coordinator hands it to the other, which decides about the verifier."""
        for sent in (await peer.report("v1", [report(session)], **REPORTED)).directives:
            found = sent.directive
            return found.nodes_per_step, found.window_depth, found.window_nodes, found.draft_wait_ms
        return 0, 0, 0, 0

    async def pinned_at(peer) -> bool:
        return await told(peer) == (4, 7, 14, 11)

    for peer in (one, other):
        await until(lambda peer=peer: pinned_at(peer))
    [shown] = await one.placed()
    assert shown.window.bounds == pinned
    await one.admin.UpdateSession(bound(session))

    async def free_at(peer) -> bool:
        return (await told(peer))[1] not in (0, 7)

    for peer in (one, other):
        await until(lambda peer=peer: free_at(peer))


async def test_decisions_are_forgotten_with_the_session(coordinator) -> None:
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id
    await coordinator.report("v1", [report(session)], **REPORTED)
    assert [shown.HasField("window") for shown in await coordinator.placed()] == [True]
    await coordinator.report("v1", **REPORTED)
    assert not any(shown.HasField("window") for shown in await coordinator.placed())


async def test_window_control_can_be_left_out(start, refused) -> None:
    coordinator = await start(window_control=False)
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id
    assert not (await coordinator.report("v1", [report(session)], **REPORTED)).directives
    asked = bound(session, pb.WindowBounds(window=pb.Window(k=1, depth=1)))
    assert isinstance(await refused(coordinator.admin.UpdateSession(asked)), BadRequest)


async def test_a_verifier_keeps_its_lease_and_keys_where_nothing_can_be_decided(start, monkeypatch) -> None:
    coordinator = await start()
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id

    def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(window, "decide", broken)
    answer = await coordinator.report("v1", [report(session)], **REPORTED)
    assert answer.known
    assert answer.public_keys
    assert not answer.directives


async def test_bounds_that_make_no_sense_are_refused(coordinator, refused) -> None:
    await coordinator.join("v1")
    session = (await coordinator.open()).session_id
    nobody = bound("nobody", pb.WindowBounds(window=pb.Window(k=1, depth=1)))
    assert isinstance(await refused(coordinator.admin.UpdateSession(nobody)), NotFound)
    for bounds in (
        pb.WindowBounds(window=pb.Window(k=5, depth=4)),
        pb.WindowBounds(window=pb.Window(k=1, depth=10_000)),
        pb.WindowBounds(window=pb.Window(k=1, depth=1, draft_wait_ms=-1.0), pinned=True),
        pb.WindowBounds(window=pb.Window(k=1, depth=1, draft_wait_ms=math.nan), pinned=True),
        pb.WindowBounds(window=pb.Window(k=1, depth=1, nodes_per_level=0.5), pinned=True),
    ):
        error = await refused(coordinator.admin.UpdateSession(bound(session, bounds)))
        assert isinstance(error, BadRequest)


def latest(history: bytes) -> bytes:
    return window.latest([history])[0]


def test_observations_of_another_text_are_dropped_soon_and_those_of_the_same_one_kept() -> None:
    good, bad = (bytes(random.Random(1).choices((HIT, MISS), (share, 1.0 - share), k=200)) for share in (0.8, 0.15))
    assert len(latest(good)) == window.RECENT
    assert len(latest(good + bad[:8])) == window.RECENT
    turned = latest(good + bad[:40])
    assert len(turned) <= 48
    assert turned.count(HIT) / len(turned) < 0.35


def test_a_draft_that_fails_or_recovers_is_judged_by_the_new_text_within_thirty_two_observations() -> None:
    good, failed = bytes(random.Random(3).choices((HIT, MISS), (0.6, 0.4), k=96)), bytes([MISS]) * 105
    kept = latest(good + failed[:32])
    assert kept.count(HIT) <= 0.1 * len(kept)
    recovered = latest(good + failed + good[:32])
    assert recovered.count(HIT) / len(recovered) > 0.4


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_chance_alone_seldom_looks_like_another_text(share: float) -> None:
    rng = random.Random(2)
    texts = [bytes(rng.choices((HIT, MISS), (share, 1.0 - share), k=window.RECENT)) for _ in range(300)]
    assert sum(len(latest(text)) < window.RECENT for text in texts) <= 9
