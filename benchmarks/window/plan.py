"""Define what the windows benchmark plays: the full run takes over an hour, the quick one under two minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.window.cells import CellKey
from benchmarks.window.testbed import VerifierMachine
from outrider.core.protocol.messages import Directive


@dataclass(frozen=True)
class StaticWindow:
    """Describe a window by levels, as operators see it."""

    k: int
    depth: int
    nodes_per_level: int
    draft_wait: float
    """Draft wait as a share of a plain step."""

    def __str__(self) -> str:
        return f"k {self.k}, depth {self.depth}, {self.nodes_per_level} a level, {self.draft_wait:g} of a step"

    def directive(self, machine: VerifierMachine) -> Directive:
        return Directive(
            window_nodes=min(64, self.depth * self.nodes_per_level),
            window_depth=self.depth,
            nodes_per_step=self.k * self.nodes_per_level,
            draft_wait_ms=round(self.draft_wait * machine.plain_ms),
        )


STATICS = (
    StaticWindow(2, 4, 2, 0.25),
    StaticWindow(4, 8, 2, 0.4),
    StaticWindow(4, 24, 1, 0.0),
    StaticWindow(8, 24, 2, 0.25),
    StaticWindow(16, 24, 2, 0.0),
)
"""Static windows, played beside streaming: shallow to deep, slim and broad, with and without a draft wait."""

RTTS_MS = (1.0, 20.0, 50.0, 100.0, 200.0)
REAL, REALS = VerifierMachine(1), VerifierMachine(8)
PACED, PACEDS = VerifierMachine(1, 30.0, 0.05), VerifierMachine(8, 80.0, 0.05)
MACHINES = (REAL, REALS, PACED, PACEDS)
CHANGING = VerifierMachine(1, 80.0, 0.05)
SIXTEEN = VerifierMachine(16, 80.0, 0.05)
CROWD = VerifierMachine(32, 80.0, 3.0)
"""A machine with more sessions than pay: a plain row costs 3 ms, so a node takes time from everybody."""
CROWD_RTT_MS = 50.0
TOKENS = {REAL: 112, REALS: 112, PACED: 80, PACEDS: 64, CROWD: 64, SIXTEEN: 64}
"""Tokens of a session. The coordinator decides its windows after a second at most: paced ones stream for about two and
a half seconds or longer, those on the real CPU for about two."""
STATIC_CELLS = (
    (REAL, (("good", 1.0), ("good", 50.0))),
    (REALS, (("good", 20.0), ("narrow", 50.0))),
    (PACED, (("good", 50.0), ("narrow", 20.0))),
    (PACEDS, (("good", 50.0), ("good", 100.0))),
)


THREE_RTTS_MS = (1.0, 50.0, 200.0)
LONG_RTTS_MS = (20.0, 100.0)
"""Round trips of the cells with long prompts; on paced machines, which read at the CPU's speed, only the first."""
MINUTES = {
    "recordings": 1.5,
    "cells": 20.5,
    "statics": 11.5,
    "model": 3.5,
    "changes": 1.5,
    "crowd": 1.0,
    "engines": 3.5,
    "arms": 18.5,
    "policies": 9.5,
    "live": 4.5,
}
"""Minutes of each part of a full run, on two cores with nothing beside it."""


@dataclass(frozen=True)
class ChangingLink:
    """Describe a link over which sessions are played, and the change in mid-session."""

    rtt_ms: float
    changes: tuple[tuple[float, float], ...] = ()
    """Seconds since a session's begin -> ms of its round trip from then on."""
    wrong_span: tuple[int, int] = (0, 0)
    """Positions of the output with wrong proposals, as in SessionJob."""

    def __str__(self) -> str:
        if not self.changes:
            return f"draft fails and recovers, RTT {self.rtt_ms:g} ms"
        return f"RTT {', '.join(f'{rtt_ms:g}' for rtt_ms in (self.rtt_ms, *dict(self.changes).values()))} ms"


@dataclass(frozen=True)
class WindowPlan:
    """Set how many prompts, tokens and rounds a run plays."""

    drafts: tuple[str, ...] = ("good", "narrow")
    prompts: int = 16
    """Recorded prompts, beside the long ones."""
    several: int = 12
    """Prompts of a cell with several sessions."""
    singles: int = 8
    """Prompts of a cell with one session, played one after the other."""
    real_rounds: int = 2
    """Rounds of a cell with several sessions on this CPU, whose arms take turns by whole rounds: the CPU's speed may
    change from one to the next, that of a paced machine does not."""
    long: int = 4
    """Prompts of a thousand tokens in each arm of a cell that has any."""
    static_prompts: tuple[int, int] = (6, 12)
    """Prompts in each arm of a static cell with one session, and with several (played in two halves)."""
    near: int = 8
    """Recordings whose match rate is near 0.8."""
    candidates: int = 40
    """Prompts from which those are chosen, greedy and at T=0.8."""
    teaching: int = 8
    """Other prompts, from which devices have learned."""
    changes: int = 3
    """Sessions on each link that changes."""
    change_s: float = 20.0
    """Seconds after which such a session is ended; each of its periods lasts about eight in a full run."""
    change_tokens: int = 700
    """More tokens than arrive in that time: 12.5 a second streamed, up to four times that on a short round trip."""
    plain_change_tokens: int = 60
    """Tokens of the same prompt by streaming, whose speed does not change."""
    changing_links: tuple[ChangingLink, ChangingLink] = (
        ChangingLink(5.0, changes=((2.5, 300.0), (10.5, 5.0))),
        ChangingLink(50.0, wrong_span=(80, 185)),  # eight seconds' worth of streaming
    )
    crowd: VerifierMachine = CROWD
    """The machine with more sessions than speculation pays for."""
    arms: int = 8
    """Prompts at T=0.8, and half as many others that are greedy, in each arm of who proposes nodes."""
    arm_rounds: int = 2
    """Rounds of many sessions, with other texts for each of them."""
    arm_lessons: int = 6
    """Other prompts, which every verifier of an arm has served before."""
    arm_rtts_ms: tuple[float, ...] = (1.0, 50.0, 100.0, 200.0)
    arm_machines: tuple[VerifierMachine, ...] = (SIXTEEN, CROWD)
    """Machines with several sessions, on which nobody may be slower than streaming."""
    policies: int = 4
    """Prompts in each arm of the policies, one after the other."""
    policy_lessons: int = 3
    """Other prompts, which each arm has played before: a policy that has to try windows begins with bad ones."""
    policy_tokens: int = 160
    """Tokens of each: a policy that has to try what is best needs longer than a cell's sessions."""
    policy_rtts_ms: tuple[float, ...] = THREE_RTTS_MS
    live: int = 6
    """Prompts that devices play live beside their recording."""
    live_rtts_ms: tuple[float, ...] = THREE_RTTS_MS
    live_machines: tuple[VerifierMachine, ...] = (REAL, PACED)
    statics: tuple[StaticWindow, ...] = STATICS
    static_cells: tuple[tuple[VerifierMachine, tuple[tuple[str, float], ...]], ...] = STATIC_CELLS
    model_rtts_ms: tuple[float, ...] = RTTS_MS
    only: frozenset[tuple[VerifierMachine, float]] = frozenset()
    """(machine, RTT in ms) of the cells that are played; empty for all."""
    tokens: int | None = None
    """Tokens of a session if not those of TOKENS."""

    def cells(self, draft: str, machine: VerifierMachine) -> list[CellKey]:
        """Return the cells of this draft and machine."""
        return [CellKey(machine, draft, rtt) for rtt in RTTS_MS if not self.only or (machine, rtt) in self.only]

    @property
    def arm_prompts(self) -> int:
        """Return the number of prompts at T=0.8 that the arms ask for: many sessions have a text each that does not
        repeat itself, as about two in three do not."""
        several = max((machine.sessions for machine in self.arm_machines), default=0)
        return max(self.arms, 3 * several // 2) + self.arm_lessons

    def tokens_of(self, machine: VerifierMachine) -> int:
        """Return the tokens of a session on this machine."""
        return self.tokens or TOKENS[machine]

    def rounds_of(self, machine: VerifierMachine) -> int:
        """Return the number of rounds of this machine's cells; arms with one session take turns by prompt."""
        return self.real_rounds if machine.sessions > 1 and not machine.pass_ms else 1

    def has_long(self, key: CellKey) -> bool:
        """Return whether long prompts are played in this cell."""
        rtts_ms = LONG_RTTS_MS[:1] if key.machine.pass_ms else LONG_RTTS_MS
        return key.rtt_ms in rtts_ms or bool(self.only and not key.machine.pass_ms)

    def sites(self) -> list[tuple[list[CellKey], ...]]:
        """Return the cells of up to two verifiers that are started together."""
        each = [self.cells(draft, machine) for machine in MACHINES for draft in self.drafts]
        each = [cells for cells in each if cells]
        return [tuple(each[i : i + 2]) for i in range(0, len(each), 2)]


QUICK_CELLS = frozenset({(REAL, 1.0), (PACEDS, 50.0)})
QUICK = WindowPlan(
    drafts=("good",),
    prompts=6,
    several=8,
    singles=2,
    long=1,
    static_prompts=(2, 8),
    near=2,
    candidates=4,
    changes=1,
    arms=2,
    arm_rounds=1,
    arm_lessons=2,
    arm_rtts_ms=(50.0,),
    arm_machines=(PACEDS,),
    policies=2,
    policy_lessons=1,
    policy_rtts_ms=(50.0,),
    live=2,
    live_rtts_ms=(50.0,),
    live_machines=(REAL,),
    statics=STATICS[2:3],
    static_cells=((PACED, (("good", 50.0),)),),
    model_rtts_ms=(50.0,),
    only=QUICK_CELLS,
)
SMOKE = replace(
    QUICK,
    prompts=2,
    several=2,
    singles=2,
    long=1,
    static_prompts=(2, 2),
    near=2,
    candidates=2,
    teaching=1,
    arms=2,
    arm_lessons=1,
    arm_machines=(),
    policy_tokens=24,
    change_s=5.0,
    change_tokens=160,
    plain_change_tokens=8,
    # Each period has many steps of 80 ms: a stall of the machine must not leave one without a token.
    changing_links=(ChangingLink(5.0, changes=((0.2, 30.0), (1.4, 5.0))), ChangingLink(50.0, wrong_span=(8, 20))),
    crowd=VerifierMachine(2, 80.0, 3.0),
    static_cells=((REAL, (("good", 1.0),)),),
    only=frozenset({(REAL, 1.0)}),
    tokens=24,
)
"""One cell of the grid, on this CPU, and the least of every other part."""
