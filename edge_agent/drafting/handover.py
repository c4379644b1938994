"""Who drafts for a session: one worker, and while the draft is replaced the next one, which reads meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge_agent.drafting.draft_session import Drafting, Lent
from edge_agent.drafting.drafter import DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.worker import DraftFailed
from outrider.core.protocol.device import Delivery, DeviceSession

Hear = Callable[[Drafting, "DraftUpdate | DraftFailed"], None]

_LATEST = 8
"""Growths after which a successor takes over although the present one is ahead of it."""


class Desk:
    """Passes on to both what both must know. hear: gets what they tell."""

    def __init__(self, lent: Lent | None, session: DeviceSession, hear: Hear) -> None:
        self._session = session
        self._hear = hear
        self.present = self._drafting(lent) if lent is not None else None
        """Whose nodes go to the verifier; None where nobody drafts."""
        self.successor: Drafting | None = None
        """Reads the sequence."""
        self._swapped: Callable[[bool], None] = _unheard
        self._left_at: float | None = None
        """When the one that was replaced last told something; None where the gap is known or there was none."""

    def begin(self, plan: SpeculationPlan, ends: frozenset[int]) -> None:
        if self.present is not None:
            self.present.begin(plan, ends)

    def moved(self, delivery: Delivery) -> None:
        for drafting in self._both():
            drafting.moved(delivery)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for drafting in self._both():
            drafting.commit(tokens)

    def replan(self, plan: SpeculationPlan) -> None:
        for drafting in self._both():
            drafting.replan(plan)

    def end(self) -> None:
        """The workers are lent to other sessions from now on: what still comes of them is not this one's business."""
        if self.present is not None:
            self.present.end()
        self.present = None
        self.dismiss()

    def has(self, drafting: Drafting) -> bool:
        return drafting in (self.present, self.successor)

    # --- another draft

    def replace(self, lent: Lent | None) -> None:
        """At once: nothing has been read yet, or nothing shall be drafted any more."""
        self.end()
        self.present = self._drafting(lent) if lent is not None else None

    def follow(self, lent: Lent, plan: SpeculationPlan, ends: frozenset[int], swapped: Callable[[bool], None]) -> None:
        """Let a worker read the sequence. swapped: called once, with whether it has taken over."""
        self.dismiss()
        self.successor, self._swapped = self._drafting(lent, follows=True), swapped
        self.successor.begin(plan, ends)

    @property
    def ready(self) -> bool:
        """Whether the successor knows the sequence as far as the one that drafts still does."""
        if self.successor is None or self.successor.heard_at is None:
            return False
        slower = self.successor.told >= _LATEST  # it will never know as much, and is to draft all the same
        return self.present is None or slower or self.successor.base >= self.present.base

    def swap(self, plan: SpeculationPlan, ends: frozenset[int]) -> None:
        """The successor takes over."""
        old, new = self.present, self.successor
        if new is None:
            return
        if old is not None:
            old.end()
        self._left_at = old.heard_at if old is not None else None
        self.present, self.successor = new, None
        new.lead(plan, ends)
        swapped, self._swapped = self._swapped, _unheard
        swapped(True)

    def gap(self) -> float | None:
        """Once after each swap, as soon as it is known: seconds from the last growth of the one draft to the first of
        the other that can go to the verifier."""
        if self._left_at is None or self.present is None or self.present.heard_at is None:
            return None
        gap, self._left_at = self.present.heard_at - self._left_at, None
        return gap

    def dismiss(self) -> None:
        """The successor is not wanted, or of no use."""
        if self.successor is not None:
            self.successor.end()
            self.successor = None
            swapped, self._swapped = self._swapped, _unheard
            swapped(False)

    def _both(self) -> Iterable[Drafting]:
        """The one that drafts comes first."""
        return (drafting for drafting in (self.present, self.successor) if drafting is not None)

    def _drafting(self, lent: Lent, *, follows: bool = False) -> Drafting:
        return Drafting(lent, self._session, self._hear, follows=follows)


def _unheard(_: bool) -> None:
    """Nobody waits for a swap."""
