"""Order the verifiers that may take a session. The functions are pure: one snapshot in, one value out.

Of the first two verifiers in this order that have room, in the best tier that has any, the one with the lesser load is
taken. It is two random choices, not the best of all, because every coordinator acts on figures a second old, and the
best of all would get every session of that second (Mitzenmacher, "The power of two choices in randomized load
balancing"). Whether there is room is decided where the place is claimed (`store/lua/claim.lua`).
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from outrider.core.errors import BadRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.wire.ticket import Target
from outrider.wire.v1 import coordinator_pb2 as pb

Fleet = Mapping[str, Target]
"""The verifiers with a lease, by their ids."""
CHOICES = 2
"""Candidates that are compared."""
MOST_SHOWN = 10
"""Names of targets that a message shows."""


class Room(NamedTuple):
    """A verifier that has room for a session."""

    verifier: pb.RegisterRequest
    target: Target
    failed: bool
    """It has failed this session."""
    load: float
    """Share of its places that are taken."""

    @property
    def identity(self) -> tuple[str, tuple[str, str]]:
        """Return what another verifier must serve, too, to take the session over."""
        return self.target.name, self.target.weights


def best(found: Sequence[Room]) -> Room | None:
    """Return the least loaded of the first verifiers that have not failed the session, or else of the others."""
    willing = [one for one in found if not one.failed] or found
    return min(willing[:CHOICES], key=lambda one: one.load, default=None)


def candidates(fleet: Fleet, wanted: Target, failed: Container[str], draw: random.Random) -> list[str]:
    """Return the verifiers that can serve the target in random order, those that have failed the session last."""
    fitting = [verifier_id for verifier_id, target in fleet.items() if fits(target, wanted)]
    draw.shuffle(fitting)
    return sorted(fitting, key=failed.__contains__)


def fits(target: Target, wanted: Target) -> bool:
    """Return whether a verifier of this target could give the session the right tokens at all.

    wanted: what the session is bound to; without hashes, in a new session, any of its name, if it has one.
    """
    if wanted.weights_hash:
        return target.weights == wanted.weights
    return wanted.name in ("", target.name)


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


def refusal(fleet: Fleet, wanted: Target, alive: int) -> OutriderError:
    """Return the error for a session that no verifier took; `alive` would fit and are full, draining or cordoned."""
    if alive:
        return Overloaded(
            f"all {alive} verifiers of target {wanted.name!r} are full, draining or cordoned; ask again, or start"
            " another",
            retry_after_s=1.0,
        )
    if wanted.weights_hash:
        return Unavailable(
            f"no live verifier serves target {wanted.name!r} with weights {wanted.weights_hash!r} and tokenizer"
            f" {wanted.tokenizer_hash!r}, which the session is bound to; ask again once one has registered"
        )
    names = sorted({target.name for target in fleet.values()})
    if not names:
        return Unavailable(
            "no verifier is registered; start one, or ask again once it has registered", retry_after_s=1.0
        )
    return NotFound(f"no verifier serves target {wanted.name!r}; the cluster serves {_list(names)}")


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MOST_SHOWN])
    return shown + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")
