"""Define what the parts of releases exchange: plain data, without protobuf and Redis."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from pydantic import ConfigDict


class LifecycleState(enum.StrEnum):
    """Names the states of a release, in the order in which it passes them."""

    CANDIDATE = "candidate"
    """It waits for the end of the canary before it."""
    CANARY = "canary"
    """A share of the devices has it, on trial."""
    STABLE = "stable"
    """All devices have it."""
    SUPERSEDED = "superseded"
    """It was stable until another release took its place."""
    ROLLED_BACK = "rolled_back"
    """It failed its trial, or a newer candidate was preferred before it had one."""


class ReleaseAction(enum.StrEnum):
    """An action that an operator can take on a release."""

    PROMOTE = "promote"
    ROLL_BACK = "rollback"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True)
class CanaryEvidence:
    """The evidence that verifiers have measured of a canary and of the release beside it.

    Acceptance is the share of positions whose first proposal was accepted, averaged over samples.
    """

    canary_samples: int = 0
    stable_samples: int = 0
    canary_acceptance: float = 0.0
    stable_acceptance: float = 0.0
    log_better: float = 0.0
    """Natural logarithm of the likelihood ratio of "no difference" against "worse by the bound", without the tenants
    that show the most."""
    log_worse: float = 0.0
    """The same of "worse by the bound" against "no difference"."""
    tenants: int = 0
    """Tenants that take part: those with enough samples."""
    tenants_needed: int = 0
    """Tenants that must take part before the evidence decides; until then the operator does."""

    @property
    def tenants_missing(self) -> int:
        """Return how many more tenants must take part before the evidence decides."""
        return max(0, self.tenants_needed - self.tenants)


@dataclass(frozen=True)
class Release:
    """A manifest and the state that its release is in."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    manifest: bytes
    """The manifest as its publisher signed it."""
    version: int
    name: str
    """Hex digits of the file's hash: the name by which devices report their draft."""
    state: LifecycleState
    since_unix: float
    """When this state began, in seconds."""
    reason: str = ""
    """Why it is in this state."""
    share: float = 0.0
    """Share of the devices that try it: as the canary, and as a candidate for its trial to come."""
    pinned: bool = False
    """Whether it stays in this state, whatever is measured."""
    evidence: CanaryEvidence | None = None
    """The evidence that decided its trial."""


def in_canary(device_id: str, release: str, share: float) -> bool:
    """Return whether a device is drawn for the share that tries a release. A device without a name never is.

    It depends on the two names alone, so it is the same at every coordinator and every time. Another release draws
    anew, so that no device is always first. A greater share keeps the devices that were drawn.
    """
    if not device_id:
        return False
    digest = hashlib.sha256(f"{release}:{device_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


@dataclass(frozen=True)
class ReleaseTrack:
    """Holds one target's drafts, the newest first.

    At most one release is stable, and at most one is the canary.
    """

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    weights: str
    """Hash of the target's weights."""
    newest: int = 0
    """Greatest version that was ever published: no version at or below it is taken."""
    releases: tuple[Release, ...] = ()
    revision: int = 0
    """Grows with every change; of two copies that differ, the one with the greater revision was decided later."""

    @property
    def stable(self) -> Release | None:
        return self._first(LifecycleState.STABLE)

    @property
    def canary(self) -> Release | None:
        return self._first(LifecycleState.CANARY)

    @property
    def states(self) -> list[tuple[int, LifecycleState]]:
        """Return versions with their states, the newest first."""
        return [(release.version, release.state) for release in self.releases]

    def find(self, manifest: bytes) -> Release | None:
        """Return the release with this manifest, None if there is none."""
        return next((release for release in self.releases if release.manifest == manifest), None)

    def arm(self, draft: str, device_id: str) -> str:
        """Return "c" for sessions that draft with the canary, "s" for those it is compared with, "" for all others.

        draft: what the session drafts with, as its device says, which counts only if that was offered to the device.
        Without a stable release every other draft takes its place.
        """
        canary, stable = self.canary, self.stable
        tries = canary is not None and draft == canary.name
        if canary is None or not draft or tries is not in_canary(device_id, canary.name, canary.share):
            return ""
        if tries:
            return "c"
        return "s" if stable is None or draft == stable.name else ""

    def _first(self, state: LifecycleState) -> Release | None:
        return next((release for release in self.releases if release.state is state), None)
