"""What the parts of releases say to one another. Plain data."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class State(enum.StrEnum):
    """Of a release."""

    CANDIDATE = "candidate"
    """Waits until the canary before it is decided."""
    CANARY = "canary"
    """A share of the devices has it."""
    STABLE = "stable"
    """All have it."""
    SUPERSEDED = "superseded"
    """Was stable until another took its place."""
    ROLLED_BACK = "rolled_back"
    """Failed its trial, or was passed over before it had one."""


class Order(enum.StrEnum):
    """What an operator may say of a release."""

    PROMOTE = "promote"
    ROLL_BACK = "rollback"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True)
class Evidence:
    """What verifiers measured of a canary, against the release beside it."""

    canary_samples: int = 0
    """That had any of the other side near enough to be compared with, as is the next."""
    stable_samples: int = 0
    canary_right: float = 0.0
    """Share of positions whose first guess was right, as is the next, over the groups that were compared."""
    stable_right: float = 0.0
    log_better: float = 0.0
    """Natural logarithm of an e-value: that it is better than the bound allows, over all classes."""
    log_worse: float = 0.0
    """That it is worse than the bound allows, in some class."""
    doubt: str = ""
    """What holds a promotion up: a class in which it looks worse, though nothing is shown yet, or too few samples."""


@dataclass(frozen=True)
class Release:
    """One manifest and what became of it."""

    manifest: bytes
    """As its publisher signed it."""
    version: int
    name: str
    """Hex digits of its file's hash: what devices call their draft."""
    state: State
    since_unix: float
    """Of this state, in seconds."""
    reason: str = ""
    """Of this state."""
    share: float = 0.0
    """Of the devices, while a canary."""
    pinned: bool = False
    """Stays as it is, whatever is measured."""
    evidence: Evidence | None = None
    """That it was decided by."""


@dataclass(frozen=True)
class ReleaseTrack:
    """The releases of one target, the newest first. At most one is stable, and at most one a canary."""

    weights_hash: str
    newest: int = 0
    """Greatest version ever seen: nothing at or below it is taken."""
    releases: tuple[Release, ...] = ()
    revision: int = 0
    """Grows with every change: tells what was decided later, where two copies differ."""

    @property
    def stable(self) -> Release | None:
        return self._first(State.STABLE)

    @property
    def canary(self) -> Release | None:
        return self._first(State.CANARY)

    def _first(self, state: State) -> Release | None:
        return next((release for release in self.releases if release.state is state), None)


@dataclass(frozen=True)
class Rule:
    """How a canary is tried."""

    share: float
    """Of the devices that get it."""
    bound: float
    """Of the share of positions guessed right: a canary may be worse by less than this."""
    alpha: float
    """Most probability of a wrong decision, however often the evidence is looked at."""
    window_s: float
    """After so long without a decision it is rolled back."""

    @property
    def needed(self) -> float:
        """Logarithm of the e-value that decides (Ville's inequality)."""
        return math.log(1.0 / self.alpha)


@dataclass(frozen=True)
class Trial:
    """Which sessions' guesses are compared, on one target."""

    name: str
    """Of the canary."""
    version: int
    stable: str
    """Name of the stable release; empty: every other draft stands for it."""

    def arm(self, draft: str) -> str:
        """ "c" for sessions that draft with the canary, "s" for those it is compared with, "" for all others."""
        if not draft:
            return ""
        if draft == self.name:
            return "c"
        return "s" if draft == self.stable or not self.stable else ""


@dataclass(frozen=True)
class Sample:
    """A stretch of one session's positions with one release."""

    canary: bool
    tenant: str
    traffic: str
    """Class, by the application."""
    right: int
    positions: int
    at_s: float
    """When it was reported, by Redis' clock."""

    @property
    def value(self) -> float:
        """Share of positions whose first guess was right, from 0 to 1."""
        return self.right / self.positions


@dataclass(frozen=True)
class Offer:
    """Which draft a device shall use."""

    serial: int
    release: Release | None
    """None: the one that its verifier offers."""
    base_url: str
    """What relative URLs begin with; empty where no files are served."""
