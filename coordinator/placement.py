"""Which verifiers may take a session, and in what order they are asked. Pure: one snapshot in, one value out.

The last word is `lua/place.lua`'s, which sees true occupancy: of the first two verifiers in this order that have room
(in the best tier that has any) it takes the one with the lower `rtt + load_weight * used / capacity`. Two random
choices, not the best of all: with every coordinator acting on figures a second old, the best of all gets the herd.
(Mitzenmacher, "The power of two choices in randomized load balancing".)
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

from coordinator.records import Candidate, PlacementRequest, VerifierStatus
from outrider.core.errors import BadRequest, NotFound, OutriderError, Overloaded, Unavailable

CANDIDATES_AT_ONCE = 32
"""How many verifiers one atomic step looks at; beyond it the next lot is asked only when all of these are full."""


def candidates(
    fleet: Sequence[VerifierStatus], need: PlacementRequest, draw: random.Random, unknown_rtt_ms: float
) -> list[Candidate]:
    """Those that serve what is needed, best tier first, at random within a tier."""
    fitting = [v for v in fleet if fits(v, need)]
    draw.shuffle(fitting)
    fitting.sort(key=lambda v: tier(v, need))
    guess = guessed_rtt_ms(need, unknown_rtt_ms)
    ids = [v.registration.verifier_id for v in fitting]
    return [Candidate(i, need.rtt_ms.get(i, guess), i in need.failed) for i in ids]


def fits(verifier: VerifierStatus, need: PlacementRequest) -> bool:
    """Whether the verifier could give this session the right tokens at all."""
    target = verifier.registration.target
    if need.weights is not None:
        return target.weights == need.weights
    return not need.target or target.name == need.target


def tier(verifier: VerifierStatus, need: PlacementRequest) -> int:
    """0 is best: has not failed this session, same numerics class. One that failed is still better than nobody."""
    registration = verifier.registration
    other_class = bool(need.numerics_class) and registration.target.numerics_class != need.numerics_class
    return 2 * (registration.verifier_id in need.failed) + other_class


def guessed_rtt_ms(need: PlacementRequest, unknown_rtt_ms: float) -> float:
    """The round trip to a verifier that the device has not measured: typical of those that it has."""
    return statistics.median(need.rtt_ms.values()) if need.rtt_ms else unknown_rtt_ms


def batches(ranked: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    """The candidates in the lots that are asked one after the other."""
    for start in range(0, len(ranked), CANDIDATES_AT_ONCE):
        yield ranked[start : start + CANDIDATES_AT_ONCE]


def sole_target(fleet: Sequence[VerifierStatus], wanted: str) -> str:
    """The name of the target to use. Raises BadRequest where none was named and the cluster serves several."""
    names = sorted({v.registration.target.name for v in fleet})
    if wanted or not names:
        return wanted
    if len(names) > 1:
        raise BadRequest(
            f"no target named, and the cluster serves {len(names)}; name one of {_list(names)}", field="target"
        )
    return names[0]


def refusal(fleet: Sequence[VerifierStatus], need: PlacementRequest, alive: int) -> OutriderError:
    """Why nobody took the session; `alive` verifiers would have fitted and are full, draining or cordoned."""
    if alive:
        return Overloaded(
            f"all {alive} verifiers of target {need.target!r} are full, draining or cordoned; ask again, or"
            " start another",
            retry_after_s=1.0,
        )
    if need.weights is not None:
        return Unavailable(
            f"no live verifier serves target {need.target!r} with weights {need.weights[0]!r} and tokenizer"
            f" {need.weights[1]!r}, which the session is bound to; ask again once one has registered"
        )
    names = sorted({v.registration.target.name for v in fleet})
    if not names:
        return Unavailable("no verifier is registered; start one, or ask again once it has registered")
    return NotFound(f"no verifier serves target {need.target!r}; the cluster serves {_list(names)}")


def _list(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
