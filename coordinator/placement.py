"""Rank the verifiers that may take a session. The functions are pure: one snapshot in, one value out.

`lua/place.lua` decides, since it sees true occupancy: of the first two verifiers in this order that have room (in the
best tier that has any) it takes the one with the lower `rtt + load_weight * used / capacity`. It is two random choices,
not the best of all, because every coordinator acts on figures a second old, and the best of all would get every session
of that second (Mitzenmacher, "The power of two choices in randomized load balancing").
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence

from coordinator.records import PlacementRequest
from outrider.core.errors import BadRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.wire.ticket import Target

Fleet = Mapping[str, Target]
"""The verifiers with a lease, by their ids."""
CANDIDATES_AT_ONCE = 32
"""Verifiers that one atomic step looks at; the next batch is asked only if all of these are full."""


def candidates(fleet: Fleet, request: PlacementRequest, draw: random.Random) -> list[str]:
    """Return the ids of the verifiers that can serve the request, best tier first, in random order within a tier."""
    fitting = [verifier_id for verifier_id, target in fleet.items() if fits(target, request)]
    draw.shuffle(fitting)
    fitting.sort(key=lambda verifier_id: tier(verifier_id, fleet[verifier_id], request))
    return fitting


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


def batches(ranked: Sequence[str], fleet: Fleet) -> list[tuple[str, Sequence[str]]]:
    """Return the batches of candidates that are asked one after another, each with its target's weights hash.

    A target may have been given to verifiers under the name of another one: that of the best candidate goes first.
    """
    by_target: dict[str, list[str]] = {}
    for verifier_id in ranked:
        by_target.setdefault(fleet[verifier_id].weights_hash, []).append(verifier_id)
    return [
        (weights, names[start : start + CANDIDATES_AT_ONCE])
        for weights, names in by_target.items()
        for start in range(0, len(names), CANDIDATES_AT_ONCE)
    ]


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


def refusal(fleet: Fleet, request: PlacementRequest, alive: int) -> OutriderError:
    """Return the error for a session that no verifier took; `alive` would fit and are full, draining or cordoned."""
    if alive:
        return Overloaded(
            f"all {alive} verifiers of target {request.target!r} are full, draining or cordoned; ask again, or start"
            " another",
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
