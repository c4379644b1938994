"""Judge the coordinator's speculation lengths on simulated verifiers, whose best possible lengths are known.

A simulated verifier has sessions with a round trip, a drafting time and a kind of text, and steps that take
`a + b * tokens` until it is full and more beyond. `coordinator.window` is the product's own; of a session it
sees what a verifier reports: the outcomes of its last draft tokens, its round trip and its drafting time. What its
choice brings in the long run is computed by means that it does not use, from the process that outcomes are drawn from.

After a rejected token a device starts afresh from the target's own, and until the next one everything is determined:
which draft token arrives before which step hangs on the times alone. So the protocol is a renewal process whose runs
are weighed by the chance that they end at each position, with two states, since easy passages outlast runs.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.window import RECENT, TOLERANCE, decide
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.protocol.messages import SessionLimits
from outrider.core.step_cost import StepCost
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

KINDS = {"code": (0.92, 0.70), "arithmetic": (0.88, 0.60), "chat": (0.75, 0.45), "prose": (0.60, 0.30)}
"""Share of first proposals that are right, in easy and in hard passages of a text."""
FLIP = 1.0 / 25
"""Chance for each token that the passage ends."""
CAUGHT = 0.4
"""Share of the wrong first proposals beside which a sibling is right."""
PER_LEVEL = 1.6
"""Draft tokens of a level."""
LENGTHS = np.array((0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Speculation lengths that a session may have."""
HORIZON = 96
"""Most positions of a run; what is unbroken then counts as broken, which is rare."""
RARE = 1e-7
ENDLESS = 1 << 20
FIXED = 6
"""A length for everybody, to compare with."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Session:
    """Hold the truth about a session, and the outcomes that the controller sees of it."""

    kind: str
    rtt_s: float
    draft_s: float
    outcomes: bytes

    @classmethod
    def drawn(cls, rng: random.Random) -> Session:
        kind = rng.choice(tuple(KINDS))
        rtt_s = min(0.5, rng.lognormvariate(math.log(0.045), 0.8))
        return cls(kind, rtt_s, rng.lognormvariate(math.log(0.004), 0.7), _outcomes(kind, rng))

    def told(self, number: int) -> SessionTelemetry:
        """Return what the coordinator sees."""
        return SessionTelemetry(
            session_id=str(number),
            rtt_ms=1e3 * self.rtt_s,
            acceptance_history=self.outcomes,
            draft_ms=1e3 * self.draft_s,
            nodes_per_level=PER_LEVEL,
        )


def _outcomes(kind: str, rng: random.Random) -> bytes:
    """Draw the outcomes of a session's last draft tokens, passage by passage."""
    easy, found = rng.random() < 0.5, bytearray()
    for _ in range(RECENT):
        easy = easy != (rng.random() < FLIP)
        right = rng.random() < KINDS[kind][0 if easy else 1]
        found.append(HIT if right else SIBLING if rng.random() < CAUGHT else MISS)
    return bytes(found)


@dataclass(frozen=True)
class Verifier:
    """Simulate a verifier. Speeds are tokens per second of each session in the long run."""

    sessions: tuple[Session, ...]
    step_s_at: Mapping[int, float]
    """Tokens of a step -> its seconds."""

    @functools.cached_property
    def cost(self) -> StepCost:
        return StepCost(self.step_s_at)

    @classmethod
    def drawn(cls, rng: random.Random, sessions: int) -> Verifier:
        """Return one whose steps take 30 ms and 0.05 ms a token until it is full, then 0.4 ms for each further one."""
        room = rng.choice((128, 256, 512))
        full_s = 0.030 + 0.00005 * room
        step_s_at = {1: 0.030, room: full_s, 8 * room: full_s + 0.0004 * 7 * room}
        return cls(tuple(Session.drawn(rng) for _ in range(sessions)), step_s_at)

    def step_s(self, drafted: Floats) -> Floats:
        """Return the seconds of steps with so many draft tokens of all sessions together."""
        count = len(self.sessions)
        return self.cost.curve(count + drafted, count)

    @property
    def undrafted(self) -> Floats:
        """Return the speeds without speculation."""
        return np.full(len(self.sessions), 1.0 / float(self.step_s(np.zeros(1))[0]))

    def chosen(self) -> Floats:
        """Return the speeds with the windows that the coordinator decides."""
        told = [session.told(number) for number, session in enumerate(self.sessions)]
        verifier = VerifierTelemetry(step_cost_ms={rows: 1e3 * step_s for rows, step_s in self.step_s_at.items()})
        decisions = decide(verifier, told, {}, {}, SessionLimits(), {})
        windows = [decisions[str(number)].window for number in range(len(told))]
        return self.speeds(np.array([one.k for one in windows]), np.array([one.depth for one in windows]))

    def speeds(self, lengths: Ints, depths: Ints) -> Floats:
        """Return the speeds with these windows. In a longer step more drafts arrive: the shortest that fits counts."""
        low, high = (float(each) for each in self.step_s(np.array([0.0, self._most])))
        for _ in range(5):
            steps_s = np.linspace(low, high, 17)
            tokens, drafted = per_step(self.sessions, lengths, depths, steps_s[:, None])
            first = int(np.argmax(self.step_s(drafted.sum(axis=1)) <= steps_s))
            low, high = steps_s[max(0, first - 1)], steps_s[first]
        return np.asarray(tokens[first] / high)

    def bound(self) -> float:
        """Return tokens per second of all sessions that no choice of windows exceeds, if nobody may be slower than
        without speculation by more than TOLERANCE.

        For each length of a step it is the Lagrangian dual of dividing the step's room among the sessions: with a price
        on each draft token every session takes what is best for itself, and the room is sold at that price.
        """
        prices = np.append(0.0, np.geomspace(1e-4, 1.0, 80))[:, None, None]
        best = 0.0
        for room in np.append(0.0, np.geomspace(0.5, self._most, 120)):
            step_s = float(self.step_s(np.array([room]))[0])
            tokens, drafted = per_step(self.sessions, LENGTHS[:, None], np.array(ENDLESS), np.array([step_s]))
            fair = tokens >= (1.0 - TOLERANCE) * step_s * self.undrafted
            if not fair.any(axis=0).all():
                break  # a longer step would ask still more of everybody
            worth = np.where(fair, tokens - prices * drafted, -np.inf).max(axis=1).sum(axis=1)
            best = max(best, float((worth + prices[:, 0, 0] * room).min()) / step_s)
        return best

    @property
    def _most(self) -> float:
        return float(LENGTHS[-1] * PER_LEVEL * len(self.sessions))


def judge(sessions: int, verifiers: int) -> list[dict[str, Any]]:
    """Return the rows of so many verifiers with so many sessions each: for each choice of windows the tokens of all
    over those without speculation, the slowest session over its own, and the share of the bound that is reached."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(verifiers):
        verifier = Verifier.drawn(random.Random(seed), sessions)
        alike = np.full(sessions, FIXED)
        choices = {f"fixed {FIXED}": verifier.speeds(alike, alike + 18), "coordinator": verifier.chosen()}
        bound, undrafted = verifier.bound(), verifier.undrafted
        for name, speeds in choices.items():
            over = (
                float(speeds.sum() / undrafted.sum()),
                float((speeds / undrafted).min()),
                float(speeds.sum()) / bound,
            )
            found.setdefault(name, []).append(over)
    return [
        {
            "sessions": sessions,
            "lengths": name,
            "speed_up": round(statistics.fmean(one[0] for one in each), 3),
            "slowest_session": round(min(one[1] for one in each), 3),
            "of_the_bound": round(statistics.fmean(one[2] for one in each), 3),
        }
        for name, each in found.items()
    ]


def per_step(sessions: Sequence[Session], length: Ints, depth: Ints, step_s: Floats) -> tuple[Floats, Floats]:
    """Return (tokens, draft tokens) of a step `[..., sessions]` in the long run. Lengths, depths and seconds of a step
    broadcast to that shape.

    Draft tokens below a rejected one count, too: the device knows no better when it sends them.
    """
    rtt = np.array([one.rtt_s for one in sessions]) / step_s
    rtt, length, depth = np.broadcast_arrays(rtt, length, np.maximum(depth, 1))
    draft = np.broadcast_to(np.array([one.draft_s for one in sessions]) / step_s, rtt.shape)
    tokens, levels = np.ones(rtt.shape), np.zeros(rtt.shape)
    for kind in {one.kind for one in sessions}:
        mine = [i for i, one in enumerate(sessions) if one.kind == kind]
        shape = rtt[..., mine].shape
        run = _Run.of(
            rtt[..., mine].ravel(), draft[..., mine].ravel(), length[..., mine].ravel(), depth[..., mine].ravel(), kind
        )
        tokens[..., mine], levels[..., mine] = (each.reshape(shape) for each in run.per_step(kind))
    return tokens, PER_LEVEL * levels


@dataclass(frozen=True)
class _Run:
    """Follow a device from a fresh start as long as its draft tokens are accepted. All arrays are `[positions, n]`."""

    step: Floats
    """Step in which a position is committed, from 0."""
    in_time: Bools
    """Whether its draft token arrives before the step begins, and is within the step's length."""
    levels: Floats
    """Proposed levels in all steps up to that one."""

    @classmethod
    def of(cls, rtt: Floats, draft: Floats, length: Ints, depth: Ints, kind: str) -> _Run:
        """Simulate a run, with times in steps. The token before it is committed when step 0 begins; the device receives
        it rtt/2 later.

        The next draft token is begun when the last one is drafted or its token known, whichever is first, and no sooner
        than the token `depth` before it is known.
        """
        positions = _ends(kind).shape[1]
        shape = (positions, len(length))
        step, in_time, known = np.empty(shape), np.empty(shape, bool), np.empty(shape)
        drafted, before = np.full(len(length), np.inf), rtt / 2.0
        now, taken = np.zeros(len(length)), np.zeros(len(length))
        shallow = np.flatnonzero(depth < positions)
        for position in range(positions):
            begun = np.minimum(drafted, before)
            late = shallow[depth[shallow] <= position]
            begun[late] = np.maximum(begun[late], known[position - depth[late], late])
            drafted = begun + draft
            step[position] = now
            there = in_time[position] = (drafted + rtt / 2.0 <= now + 1e-9) & (taken < length)
            known[position] = before = now + 1.0 + rtt / 2.0
            taken = (taken + 1.0) * there
            now = now + ~there
        so_far = in_time.cumsum(axis=0, dtype=np.float64)
        so_far[:-1][in_time[:-1]] = np.inf  # as many as at the next position without a draft token in time
        return cls(step, in_time, np.minimum.accumulate(so_far[::-1], axis=0)[::-1])

    def per_step(self, kind: str) -> tuple[Floats, Floats]:
        """Return (tokens, levels) `[n]`: the yield up to each position, weighted by the runs that end there."""
        ends = _ends(kind)
        chance = ends.sum(axis=2)
        # A right sibling takes one token of the target's own with it, and nothing was drafted below it.
        more = CAUGHT * self.in_time
        turned = ends @ _FLIPS - ends
        tokens = (chance @ np.arange(1.0, len(self.step) + 1.0))[:, None] + chance @ more
        crossed = [ends[m, :, 1 - m].sum() + turned[m, :, 1 - m] @ more for m in (0, 1)]
        begins = np.stack([crossed[1], crossed[0]]) + 1e-15  # in easy, in hard text: as often as runs lead there
        steps = (begins * (chance @ self.step + 1.0)).sum(axis=0)
        return (begins * tokens).sum(axis=0) / steps, (begins * (chance @ self.levels)).sum(axis=0) / steps


_FLIPS = np.array([[1.0 - FLIP, FLIP], [FLIP, 1.0 - FLIP]])


@functools.cache
def _ends(kind: str) -> Floats:
    """Return the chance `[state before, position, state there]` that a run's first rejection is at this position."""
    right = np.array(KINDS[kind])
    lives, ends = np.eye(2), []
    while len(ends) < HORIZON and lives.sum(axis=1).max() > RARE:
        there = lives @ _FLIPS
        ends.append(there * (1.0 - right))
        lives = there * right
    ends[-1] += lives
    below = min(int(LENGTHS[-1]), HORIZON - len(ends))  # a step holds levels below the one where a run ends, too
    return np.stack([*ends, *np.zeros((below, 2, 2))], axis=1)
