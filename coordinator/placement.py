"""Rank the verifiers that may take a session. The functions are pure: one snapshot in, one value out.

Where the device has measured its round trip to regions, a verifier costs the predicted time of a usual answer, by
distance, load, min_acceptance and the acceptance of earlier sessions; elsewhere it costs its round trip and load.
`lua/place.lua` decides, since it sees true occupancy: of the first two verifiers of each region in this order that have
room (in the best tier that has any) it takes the one with the lowest `empty_ms + full_ms * used / capacity`. It is two
random choices, not the best of all, because every coordinator acts on figures a second old, and the best of all would
get every session of that second (Mitzenmacher, "The power of two choices in randomized load balancing").
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.config import CoordinatorConfig
from coordinator.records import PlacementRequest, Prior, VerifierRegistration, VerifierStatus, Window
from coordinator.window.streaming import LinkTiming, replay
from outrider.core.acceptance.history import HIT, MISS
from outrider.core.errors import BadRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.core.telemetry import VerifierTelemetry
from outrider.wire.ticket import Target

Fleet = Mapping[str, Target]
"""The verifiers with a lease, by their ids."""
Known = Mapping[str, VerifierStatus]
"""Verifiers as they were a moment ago, by their ids."""
CANDIDATES_AT_ONCE = 32
"""Verifiers that one atomic step looks at; the next batch is asked only if all of these are full."""
CHOICES = 2
"""Candidates of each region that are compared."""
PROBES = 8
"""Regions that a device is told of at once, and whose round trips it sends."""
ANSWER_TOKENS = 128
"""Tokens of a usual answer, for which regions are compared: a round trip counts once, and a slow step each time."""
UNKNOWN_ACCEPTANCE = 0.6
"""Acceptance of first proposals that is assumed of a draft of which nothing was measured."""
UNKNOWN_DRAFT_MS = 5.0
"""Time of a device for one level of its tree, where nothing was measured."""
UNKNOWN_STEP_MS = 50.0
_LEAST_STEP_MS = 1e-3  # a broken cost model must not divide by zero
"""Step of a verifier that has not measured any, and half of the step that it is assumed to have once it is full."""
OBSERVATIONS = 24
"""Outcomes from which a prior's acceptance counts."""
WINDOW = Window(6, 24)
"""The window that a session is assumed to have, as far as the verifier's min_acceptance lets it."""
NO_PRIOR = Prior()
NOBODY: Known = {}
_DEAD = 1_000
"""The rank of regions that a session leaves: two of its verifiers have failed there."""


class Candidate(NamedTuple):
    """A verifier as place.lua compares it with others."""

    verifier_id: str
    empty_ms: float
    """What a session costs there while there are no others: the time of a usual answer, or the round trip."""
    full_ms: float
    """What it costs more once all places are taken."""
    failed: bool
    """It has failed this session."""
    rank: int = 0
    """Order of its region; a greater one is used only while all of a lesser one are full."""
    region: str = ""
    """Region whose candidates are drawn from; empty for all of them where the device has measured none."""


def candidates(
    fleet: Fleet,
    request: PlacementRequest,
    draw: random.Random,
    config: CoordinatorConfig,
    prior: Prior = NO_PRIOR,
    known: Known = NOBODY,
) -> list[Candidate]:
    """Return the verifiers that can serve the request, best tier first, in random order within a tier and region.

    Verifiers of regions that are too far for a new session are left out. prior: of the session's workload key. known:
    the verifiers whose regions are compared, if the device has measured any.
    """
    # Of many verifiers most have the very same target.
    serving = {id(target) for target in {id(one): one for one in fleet.values()}.values() if fits(target, request)}
    fitting = [verifier_id for verifier_id, target in fleet.items() if id(target) in serving]
    fitting.sort(key=lambda _: draw.random())
    regional = [known[name] for name in fitting if name in known]
    if any(verifier.registration.region in request.round_trips for verifier in regional):
        regional.sort(key=lambda verifier: not _has_room(verifier))
        found = _by_region(regional, request, config, prior)
    else:
        typical_ms, load_ms = typical_rtt_ms(request, config.unknown_rtt_ms), config.load_weight_ms
        found = [
            Candidate(name, request.rtt_ms.get(name, typical_ms), load_ms, name in request.failed) for name in fitting
        ]
        if request.failed or request.numerics_class:
            found.sort(key=lambda one: tier(one.verifier_id, fleet[one.verifier_id], request))
        return found
    before: Counter[tuple[int, str]] = Counter()
    ordered = []
    for one in found:
        place = tier(one.verifier_id, fleet[one.verifier_id], request)
        ordered.append((place, one.rank, before[place, one.region], one))
        before[place, one.region] += 1  # regions of one rank take turns, so that each batch has all of them
    return [one for *_, one in sorted(ordered, key=lambda entry: entry[:3])]


def fits(target: Target, request: PlacementRequest) -> bool:
    """Return whether a verifier of this target could give the session the right tokens at all."""
    if request.weights is not None:
        return target.weights == request.weights
    return not request.target or target.name == request.target


def tier(verifier_id: str, target: Target, request: PlacementRequest) -> int:
    """Return 0 for the best tier; to have failed the session is worse than to be of another numerics class."""
    other_class = bool(request.numerics_class) and target.numerics_class != request.numerics_class
    return 2 * (verifier_id in request.failed) + other_class


def typical_rtt_ms(request: PlacementRequest, unknown_rtt_ms: float) -> float:
    """Return the round trip to assume for a verifier that the device has not measured: the median of the others."""
    return statistics.median(request.rtt_ms.values()) if request.rtt_ms else unknown_rtt_ms


def answer_ms(rtt_ms: float, step_ms: float, min_acceptance: float, prior: Prior | None) -> float:
    """Return the predicted time of a usual answer in milliseconds. prior: None for a device that drafts nothing."""
    return rtt_ms + ANSWER_TOKENS * step_ms / tokens_per_step(rtt_ms, step_ms, min_acceptance, prior)


def tokens_per_step(rtt_ms: float, step_ms: float, min_acceptance: float, prior: Prior | None) -> float:
    """Return the tokens that a session is predicted to get from a step, by the replay that decides windows.

    A level is evaluated while the chance that it is accepted is at least min_acceptance.
    """
    if prior is None:
        return 1.0
    history = prior.acceptance_history
    acceptance = history.count(HIT) / len(history) if len(history) >= OBSERVATIONS else UNKNOWN_ACCEPTANCE
    acceptance = min(max(acceptance, 0.01), 0.99)
    k = int(math.log(max(min_acceptance, 1e-9)) / math.log(acceptance)) if min_acceptance < 1.0 else 0
    draft_ms = prior.draft_ms or min(UNKNOWN_DRAFT_MS, step_ms / 2)
    rtt, draft = (min(round(parts * ms / step_ms), 64) for parts, ms in ((4, rtt_ms), (8, draft_ms)))
    return _tokens_per_step(round(20 * acceptance), rtt, draft, min(k, WINDOW.k))


@functools.lru_cache(maxsize=8192)
def _tokens_per_step(acceptance: int, rtt: int, draft: int, k: int) -> float:
    """Replay a history with an acceptance in twentieths; round trip in quarters, drafting in eighths of a step."""
    draw = random.Random(0)
    history = [HIT if draw.random() < acceptance / 20 else MISS for _ in range(256)]
    timing = LinkTiming(rtt / 4, draft / 8, lambda nodes: 1.0)
    return replay(history, timing, Window(k, WINDOW.depth)).tokens_per_step


def step_ms(verifier: VerifierTelemetry, sessions: int) -> float:
    """Return the milliseconds of a step of so many sessions: by the verifier's cost model, times what its steps take
    longer now than the model says of its sessions without nodes."""
    plain_ms = _plain_ms(verifier, sessions)
    if not verifier.live_sessions or not verifier.step_ms:
        return plain_ms
    return plain_ms * max(1.0, verifier.step_ms / _plain_ms(verifier, verifier.live_sessions))


def _plain_ms(verifier: VerifierTelemetry, sessions: int) -> float:
    knots = [(rows, max(ms, _LEAST_STEP_MS)) for rows, ms in sorted(verifier.step_cost_ms.items())]
    at = min(max(bisect(knots, (sessions, math.inf)), 1), len(knots) - 1)
    (rows, ms), (more_rows, more_ms) = knots[at - 1], knots[at]
    slope = (more_ms - ms) / (more_rows - rows) if more_rows > rows else 0.0
    further = verifier.session_cost_ms * (sessions - 1) + verifier.timing_ms.get("between", 0.0)
    return max(ms + slope * (sessions - rows), min(ms, more_ms)) + further


def probes(known: Known, weights: str, draw: random.Random) -> tuple[VerifierRegistration, ...]:
    """Return one verifier of each region that serves a target, PROBES at most; none if there is one region."""
    found: dict[str, VerifierRegistration] = {}
    for verifier in draw.sample(list(known.values()), len(known)):
        if verifier.registration.region and verifier.registration.target.weights_hash == weights:
            found.setdefault(verifier.registration.region, verifier.registration)
    return tuple(found.values())[:PROBES] if len(found) > 1 else ()


def batches(ranked: Sequence[Candidate], fleet: Fleet) -> list[tuple[str, Sequence[Candidate]]]:
    """Return the batches of candidates that are asked one after another, each with its target's weights hash.

    A target may have been given to verifiers under the name of another one: that of the best candidate goes first.
    """
    by_target: dict[str, list[Candidate]] = {}
    for one in ranked:
        by_target.setdefault(fleet[one.verifier_id].weights_hash, []).append(one)
    return [
        (weights, those[start : start + CANDIDATES_AT_ONCE])
        for weights, those in by_target.items()
        for start in range(0, len(those), CANDIDATES_AT_ONCE)
    ]


def _has_room(verifier: VerifierStatus) -> bool:
    return verifier.state == "serving" and verifier.telemetry.live_sessions < verifier.registration.capacity


def _by_region(
    fitting: Sequence[VerifierStatus], request: PlacementRequest, config: CoordinatorConfig, prior: Prior
) -> list[Candidate]:
    """Return the verifiers with the predicted time of a usual answer, without those that are too far."""
    found: list[Candidate] = []
    now_ms: defaultdict[str, float] = defaultdict(lambda: math.inf)
    farthest = max(request.round_trips.values())
    rtts = {v.registration.region: request.round_trips.get(v.registration.region, farthest) for v in fitting}
    if "" in rtts:  # nobody can measure verifiers without a region: they are as far as a usual one
        rtts[""] = statistics.median(request.round_trips.values())
    drafts = prior if request.draft else None
    for verifier in fitting:
        registration, load = verifier.registration, verifier.telemetry
        name, region = registration.verifier_id, registration.region
        rtt_ms = request.rtt_ms.get(name, rtts[region])
        empty_ms, full_ms = UNKNOWN_STEP_MS, 2 * UNKNOWN_STEP_MS
        if load.step_cost_ms:
            empty_ms, full_ms = step_ms(load, 1), step_ms(load, registration.capacity)
        empty_ms, full_ms = (answer_ms(rtt_ms, ms, load.min_acceptance, drafts) for ms in (empty_ms, full_ms))
        full_ms = max(empty_ms, full_ms)
        failed = name in request.failed
        found.append(Candidate(name, empty_ms, full_ms - empty_ms, failed, 0, region))
        if _has_room(verifier) and not failed:
            loaded_ms = empty_ms + (full_ms - empty_ms) * load.live_sessions / registration.capacity
            now_ms[region] = min(now_ms[region], loaded_ms)
    ranks = region_ranks(rtts, now_ms, request, config)
    lost = Counter(one.region for one in found if one.failed)
    return [
        one._replace(rank=rank if lost[one.region] < 2 else _DEAD)
        for one in found
        if (rank := ranks.get(one.region)) is not None
    ]


def region_ranks(
    rtts: Mapping[str, float], now_ms: Mapping[str, float], request: PlacementRequest, config: CoordinatorConfig
) -> dict[str, int]:
    """Return the rank of each region: 0 for those that are fast enough beside the best one, then one after another.

    rtts: milliseconds by region. now_ms: predicted time of an answer at the region's best verifier with room, by region
    that has one. A new session may not go farther beyond the nearest region than `spill_ms`; a live one may.
    """
    cap_ms = min(rtts.values()) + config.spill_ms
    best_ms = min((ms for region, ms in now_ms.items() if rtts[region] <= cap_ms), default=0.0)
    order = sorted(rtts, key=lambda region: (rtts[region] > cap_ms, now_ms.get(region, math.inf), rtts[region], region))
    ranks: dict[str, int] = {}
    for place, region in enumerate(order):
        if rtts[region] > cap_ms and request.weights is None:
            continue
        near = rtts[region] <= cap_ms and best_ms >= config.spill_share * now_ms.get(region, math.inf)
        ranks[region] = 0 if near else 1 + min(place, _DEAD - 2)
    return ranks


def sole_target(fleet: Fleet, wanted: str) -> str:
    """Return the name of the target to use. Raises BadRequest if none was named and the cluster serves several."""
    names = sorted({target.name for target in fleet.values()})
    if wanted or not names:
        return wanted
    if len(names) > 1:
        raise BadRequest(
            f"no target named, and the cluster serves {len(names)}; name one of {_list(names)}", field="target"
        )
    return names[0]


def refusal(fleet: Fleet, request: PlacementRequest, alive: int, too_far: int = 0) -> OutriderError:
    """Return the error for a session that no verifier took; `alive` would fit and are full, draining or cordoned.

    too_far: verifiers that were not asked since they are in regions that are too far for a new session.
    """
    if alive or too_far:
        farther = f" near enough ({too_far} more are too far for a new session, spill_ms)" if too_far else ""
        return Overloaded(
            f"all {alive} verifiers of target {request.target!r}{farther} are full, draining or cordoned; ask again,"
            " or start another",
            retry_after_s=1.0,
        )
    if request.weights is not None:
        return Unavailable(
            f"no live verifier serves target {request.target!r} with weights {request.weights[0]!r} and tokenizer"
            f" {request.weights[1]!r}, which the session is bound to; ask again once one has registered"
        )
    names = sorted({target.name for target in fleet.values()})
    if not names:
        return Unavailable(
            "no verifier is registered; start one, or ask again once it has registered", retry_after_s=1.0
        )
    return NotFound(f"no verifier serves target {request.target!r}; the cluster serves {_list(names)}")


def _list(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
