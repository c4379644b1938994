"""What the windows' benchmark plays: sizes that bring the whole to under 40 minutes, a short look to about five."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.window.cells import Key
from benchmarks.window.stage import Machine
from outrider.core.protocol.messages import Directive


@dataclass(frozen=True)
class Static:
    """A window by levels, as operators are shown it."""

    k: int
    depth: int
    nodes_per_level: int
    patience_ms: int

    def __str__(self) -> str:
        return f"k {self.k}, depth {self.depth}, {self.nodes_per_level} a level, {self.patience_ms} ms"

    @property
    def directive(self) -> Directive:
        return Directive(
            window_nodes=min(64, self.depth * self.nodes_per_level),
            window_depth=self.depth,
            nodes_per_step=self.k * self.nodes_per_level,
            patience_ms=self.patience_ms,
        )


STATICS = (
    Static(2, 4, 2, 8),
    Static(4, 8, 2, 12),
    Static(4, 24, 1, 0),
    Static(8, 24, 2, 8),
    Static(16, 24, 2, 0),
)
"""Beside streaming, in every cell: from shallow to deep, slim and broad, with patience (12 ms: 0.4 of a step of 30) and
without."""

RTTS_MS = (1.0, 20.0, 50.0, 100.0, 200.0)
REAL, REALS = Machine(1), Machine(8)
PACED, PACEDS = Machine(1, 30.0, 0.05), Machine(8, 80.0, 0.05)
MACHINES = (REAL, REALS, PACED, PACEDS)
TURNING = Machine(1, 80.0, 0.05)
CROWD = Machine(24, 80.0, 2.0)
"""More sessions than pay: a plain row costs 2 ms, so a node takes from everybody."""
CROWD_RTT_MS = 50.0
TURNS = ((2.5, 300.0), (6.5, 5.0))
"""Seconds since a session's begin -> ms of its round trip from then on; 5 at first."""
TURN_TOKENS = 360
PLAIN_TURN_TOKENS = 60
"""Of the same by streaming, whose speed does not turn."""
COLLAPSE = (120, 200)
"""Positions of the output that the draft guesses wrong."""
COLLAPSE_RTT_MS = 50.0
TOKENS = {REAL: 112, REALS: 128, PACED: 96, PACEDS: 64, CROWD: 64}
"""Of a session, which the coordinator steers after a second or two: paced ones stream for three to eight
seconds, those on the real CPU for about two."""
STATIC_CELLS = (
    (REAL, (("good", 1.0), ("good", 50.0))),
    (REALS, (("good", 20.0), ("narrow", 50.0))),
    (PACED, (("good", 50.0), ("narrow", 20.0))),
    (PACEDS, (("good", 50.0), ("good", 100.0))),
)


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    drafts: tuple[str, ...] = ("good", "narrow")
    prompts: int = 16
    """Of a cell with several sessions."""
    singles: int = 8
    """Of a cell with one, played one after the other."""
    rounds: int = 1
    long: int = 3
    """Prompts of a thousand tokens in each arm of a cell."""
    near: int = 8
    """Recordings whose match is near 0.8."""
    candidates: int = 40
    """Prompts that they are sought among, greedy and at T=0.8."""
    teaching: int = 8
    """Other prompts, from which devices have learned."""
    turns: int = 3
    """Sessions on each line that changes."""
    statics: tuple[Static, ...] = STATICS
    static_cells: tuple[tuple[Machine, tuple[tuple[str, float], ...]], ...] = STATIC_CELLS
    model_rtts_ms: tuple[float, ...] = RTTS_MS
    quick: bool = False

    def cells(self, draft: str, machine: Machine) -> list[Key]:
        return [Key(machine, draft, rtt) for rtt in RTTS_MS if not self.quick or (machine, rtt) in QUICK_CELLS]

    def sites(self) -> list[tuple[list[Key], ...]]:
        """Cells of up to two verifiers that are started together."""
        each = [self.cells(draft, machine) for machine in MACHINES for draft in self.drafts]
        return [tuple(each[i : i + 2]) for i in range(0, len(each), 2)]


QUICK_CELLS = {(REAL, 1.0), (REALS, 20.0), (PACED, 50.0), (PACEDS, 50.0)}
QUICK = Plan(
    drafts=("good",),
    prompts=8,
    singles=4,
    long=1,
    near=4,
    candidates=8,
    turns=1,
    statics=STATICS[2:3],
    static_cells=((PACED, (("good", 50.0),)),),
    model_rtts_ms=(50.0,),
    quick=True,
)
