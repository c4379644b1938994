"""Combine a session's directive from the verifier's settings or the coordinator's decision, and the verifier's load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from outrider.core.protocol.messages import LEAST_ACCEPTANCE, Directive, SessionLimits

SEND_FACTOR = 0.5
"""Least acceptance probability of a node that a device sends, over that of a node that is evaluated: a node that is
held gains when a commit passes through its parent. With a factor of 1, 16 devices of a verifier on one core got 1.45
tokens a step; with 0 they got 1.63 at the same speed, and drafted a third more. This is between."""
CHANGE = 0.25
"""Share by which step time or `min_acceptance` must have changed before a device gets a new directive. Changes of the
latter by less than LEAST_ACCEPTANCE are not sent, since a device would hardly notice them."""
DIRECTIVE_TTL_S = 10.0
"""Seconds for which a directive of the coordinator holds: it repeats each one every second while it means it."""


class DirectiveState:
    """Holds the directive that one device plans with, and decides when it gets a new one."""

    def __init__(self, own: Directive, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """own: the directive of the verifier's settings. limits: those of the session, which no directive exceeds."""
        self.own = own
        self._limits = limits
        self._clock = clock
        self._base = own
        """The verifier's settings or the coordinator's decision, before the load."""
        self._sent = own
        self._set_at = -math.inf
        self.changed = False
        """Whether the device should get a new directive at once; a new load alone waits for `outdated`."""

    def set_directive(self, directive: Directive) -> Directive | None:
        """Follow a directive of the coordinator. Return the one that the engine must obey, None if nothing is new."""
        self._set_at = self._clock()
        return self._set_base(directive)

    def lapse(self) -> Directive | None:
        """Go back to the verifier's own settings if the coordinator has been silent; return as `set_directive` does."""
        return self._set_base(self.own) if self._clock() > self._set_at + DIRECTIVE_TTL_S else None

    def next(self, step_ms: float, min_acceptance: float) -> Directive:
        """Return the directive to send now; it counts as sent.

        step_ms, min_acceptance: the engine's recent step time, and the least acceptance probability that pays for a
        row there.
        """
        self.changed = False
        self._sent = _copy(self._base)
        self._sent.step_ms, self._sent.min_acceptance = step_ms, self._min_acceptance(min_acceptance)
        return self._sent

    def outdated(self, step_ms: float, min_acceptance: float) -> bool:
        """Return whether the device plans with a step time or a threshold that has changed by more than CHANGE."""
        sent, threshold = self._sent, self._min_acceptance(min_acceptance)
        if abs(threshold - sent.min_acceptance) > max(LEAST_ACCEPTANCE, CHANGE * sent.min_acceptance):
            return True
        return abs(step_ms - sent.step_ms) > CHANGE * sent.step_ms

    def _set_base(self, directive: Directive) -> Directive | None:
        bounded = _copy(directive)
        bounded.window_nodes = min(directive.window_nodes, self._limits.nodes)
        bounded.window_depth = min(directive.window_depth, self._limits.depth)
        before, self._base = _copy(self._base), bounded
        before.min_acceptance = bounded.min_acceptance
        if bounded == before:
            return None  # at most the threshold has changed, which the device gets with the load
        self.changed = True
        return bounded

    def _min_acceptance(self, load: float) -> float:
        return SEND_FACTOR * max(self._base.min_acceptance, load)


def _copy(directive: Directive) -> Directive:
    copy = Directive()
    copy.CopyFrom(directive)
    return copy
