"""Describe the state of a target's releases on this device. It is pure data: each change returns the next state.

`current` is in use; `last_good` is the stable release to come back to. None stands for no release: n-grams alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from outrider.wire.ticket import MAX_KEY_ID

MAX_REFUSED = 32
"""Refusals that are remembered, the latest."""
MAX_REASON = 400
MOST_LOADS = 2
"""A release whose loading has ended the process so often is given up; once may be a reboot or a lack of memory."""

_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Version = Annotated[int, Field(ge=0, lt=1 << 64)]


class InstalledRelease(BaseModel, frozen=True, extra="forbid", strict=True):
    """A release whose file is on this device."""

    digest: _Hex
    """SHA-256 of the file, by which the release is named."""
    version: _Version
    canary: bool
    """Whether only some devices were offered it, when it was last offered."""
    manifest: _Hex
    """SHA-256 of the signed part of its manifest."""
    key_id: Annotated[str, Field(max_length=MAX_KEY_ID)] = ""
    """Id of the publisher's key."""


class Refusal(BaseModel, frozen=True, extra="forbid", strict=True):
    """A release that was given up, and why."""

    manifest: _Hex
    digest: _Hex
    version: _Version
    kind: Annotated[str, Field(max_length=32)]
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    at_unix: float
    """Time in seconds."""


class ReleaseState(BaseModel, frozen=True, extra="forbid", strict=True):
    """The releases of one target. Every method returns another state."""

    format: Literal[1] = 1
    device_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = Field(default_factory=lambda: secrets.token_hex(16))
    """Random. It decides whether this device is among a canary's, and identifies nothing else."""
    floor: _Version = 0
    """Version of the newest stable release that was loaded; no older one is taken."""
    current: InstalledRelease | None = None
    last_good: InstalledRelease | None = None
    loads: Annotated[int, Field(ge=0, le=MOST_LOADS)] = 0
    """Times that a process began to load the current release since one has had it in memory."""
    refused: Annotated[tuple[Refusal, ...], Field(max_length=MAX_REFUSED)] = ()

    def refusal(self, manifest: str) -> Refusal | None:
        """Return why the release with this manifest was given up; None if it was not."""
        return next((refusal for refusal in self.refused if refusal.manifest == manifest), None)

    def trusting(self, keys: Collection[str]) -> ReleaseState:
        """Drop the releases of publishers that are no longer trusted. keys: ids of the trusted ones."""
        state = self
        if state.last_good is not None and state.last_good.key_id not in keys:
            state = state._with(last_good=None)
        if state.current is not None and state.current.key_id not in keys:
            state = state.dropped()
        return state

    # --- taking a release

    def take(self, release: InstalledRelease) -> ReleaseState:
        """Make a release the current one, to be loaded next; a stable one that was current is the last good one."""
        before = self.current
        if before is not None and before.digest == release.digest:
            return self._with(current=release)._with_floor()
        good = before if before is not None and not before.canary else self.last_good
        if good is not None and good.digest == release.digest:
            good = None
        return self._with(current=release, last_good=good, loads=0)

    def loading(self) -> ReleaseState:
        """Note that the current release is loaded next."""
        return self._with(loads=min(self.loads + 1, MOST_LOADS))

    def loaded(self) -> ReleaseState:
        """Note that the current release is in memory."""
        return self._with(loads=0)._with_floor()

    def ended(self) -> ReleaseState:
        """Note that the process ends in order, whatever it was loading."""
        return self._with(loads=0)

    # --- giving one up

    def gave_up(self, kind: str, reason: str, now_unix: float) -> ReleaseState:
        """Go back to the last good release and refuse the current one, which has failed."""
        if self.current is None:
            return self
        refusal = Refusal(
            manifest=self.current.manifest,
            digest=self.current.digest,
            version=self.current.version,
            kind=kind,
            reason=reason[:MAX_REASON],
            at_unix=now_unix,
        )
        kept = tuple(r for r in self.refused if r.manifest != refusal.manifest)
        return self.dropped()._with(refused=(*kept, refusal)[-MAX_REFUSED:])

    def dropped(self) -> ReleaseState:
        """Go back to the last good release, without blame for the current one."""
        return self._with(current=self.last_good, last_good=None, loads=0)

    def left(self) -> ReleaseState:
        """Use no release."""
        return self._with(current=None, last_good=None, loads=0)

    def forgotten(self) -> ReleaseState:
        """Allow another try to the releases that were refused."""
        return self._with(refused=())

    def _with_floor(self) -> ReleaseState:
        """Raise the floor where the current release is stable and was loaded; a canary does not raise it."""
        if self.current is None or self.current.canary or self.loads:
            return self
        return self._with(floor=max(self.floor, self.current.version))

    def _with(self, **changes: object) -> ReleaseState:
        return ReleaseState.model_validate(dict(self) | changes)
