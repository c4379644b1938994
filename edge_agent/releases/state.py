"""Describe the state of a target's releases on this device. It is pure data: each change returns the next state.

`current` is in use; `last_good` is the release to come back to. None stands for no release: n-grams alone. A release is
on trial until it has proved itself on this device. `busy` says that the process loads the current release or has it on
trial, so a state that is busy when a process starts means a crash.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PlainSerializer, WrapValidator, model_validator

from edge_agent.drafting.health import WINDOW, FirstAcceptance
from outrider.wire.ticket import MAX_KEY_ID

MAX_REFUSED = 32
"""Refusals that are remembered, the latest."""
MAX_REASON = 400
WORSE_HOLDS_S = 86_400.0
"""Time for which a release is refused that proposed worse here: it may have met other texts than the draft before."""


def _read_first_acceptance(value: Any, read: Callable[[Any], FirstAcceptance]) -> FirstAcceptance:
    """Return counts, which are stored as `guessed` and `right`. Raises ValueError if they are impossible."""
    if isinstance(value, dict):
        value = {{"guessed": "proposed", "right": "accepted"}.get(name, name): count for name, count in value.items()}
    counts = read(value)
    if not (0 <= counts.proposed <= WINDOW and 0 <= counts.accepted <= WINDOW):
        raise ValueError(f"first proposals count {counts.proposed} and {counts.accepted}, must be 0 to {WINDOW}")
    return FirstAcceptance(counts.proposed, min(counts.accepted, counts.proposed))


_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_store = PlainSerializer(lambda counts: {"guessed": counts.proposed, "right": counts.accepted})
_FirstAcceptance = Annotated[FirstAcceptance, WrapValidator(_read_first_acceptance), _store]
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


class ReleaseTrial(BaseModel, frozen=True, extra="forbid", strict=True):
    """Holds how the current release does on trial against the draft before it."""

    before: _FirstAcceptance
    """Counts of the draft that it replaced."""
    now: _FirstAcceptance = FirstAcceptance()
    """Its own counts when the last process ended in order."""
    since_unix: float = 0.0
    """Begin in seconds; 0 where it is not known."""

    def lasted_s(self, now_unix: float) -> float:
        """Return how long the trial has lasted, in seconds."""
        return now_unix - self.since_unix if self.since_unix else 0.0


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
    """Version of the newest stable release that proved itself; no older one is taken."""
    current: InstalledRelease | None = None
    last_good: InstalledRelease | None = None
    trial: ReleaseTrial | None = None
    busy: bool = False
    strikes: Annotated[int, Field(ge=0, le=1)] = 0
    """Times that the process ended while it loaded the current release, which had proved itself before."""
    refused: Annotated[tuple[Refusal, ...], Field(max_length=MAX_REFUSED)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.current is None and (self.trial is not None or self.busy):
            raise ValueError("a trial needs a current release")
        return self

    def refusal(self, manifest: str) -> Refusal | None:
        """Return why the release with this manifest was given up; None if it was not."""
        return next((refusal for refusal in self.refused if refusal.manifest == manifest), None)

    def at(self, now_unix: float) -> ReleaseState:
        """Drop the refusals that no longer hold."""
        kept = (r for r in self.refused if r.kind != "worse" or abs(now_unix - r.at_unix) < WORSE_HOLDS_S)
        return self._with(refused=tuple(kept))

    def trusting(self, keys: Collection[str]) -> ReleaseState:
        """Drop the releases of publishers that are no longer trusted. keys: ids of the trusted ones."""
        state = self
        if state.last_good is not None and state.last_good.key_id not in keys:
            state = state._with(last_good=None)
        if state.current is not None and state.current.key_id not in keys:
            state = state.dropped()
        return state

    # --- taking a release

    def take(self, release: InstalledRelease, before: FirstAcceptance, now_unix: float = 0.0) -> ReleaseState:
        """Make a release the current one, to be loaded next. One that proved itself before needs no trial.

        before: counts of the draft in use.
        """
        if self.current is not None and self.current.digest == release.digest:
            return self._with(current=release)._with_floor()
        if self.last_good is not None and self.last_good.digest == release.digest:
            last_good = None if self.trial else self.current
            return self._with(current=release, last_good=last_good, trial=None, busy=True, strikes=0)
        last_good = self.last_good if self.trial else self.current
        trial = ReleaseTrial(before=self.trial.before if self.trial else before, since_unix=now_unix)
        return self._with(current=release, last_good=last_good, trial=trial, busy=True, strikes=0)

    def loading(self) -> ReleaseState:
        """Note that the current release is loaded next."""
        return self._with(busy=self.current is not None)

    def loaded(self) -> ReleaseState:
        """Note that the current release is in memory; on trial it may still crash the process."""
        return self._with(busy=self.trial is not None, strikes=0)._with_floor()

    def proven(self) -> ReleaseState:
        """End the trial, which the release has passed."""
        return self._with(trial=None, busy=False)._with_floor()

    def paused(self, now: FirstAcceptance | None) -> ReleaseState:
        """End the process in order; the next one continues the trial. now: None where nothing was counted."""
        trial = self.trial
        if trial is not None and now is not None:
            trial = ReleaseTrial(before=trial.before, now=now, since_unix=trial.since_unix)
        return self._with(trial=trial, busy=False)

    # --- giving one up

    def after_crash(self) -> ReleaseState | None:
        """Return the state in which the current release is tried once more after a crash; None if it is to be given up.

        A release on trial is given up at once. One that had proved itself is given up the second time, since a reboot
        or a lack of memory look the same.
        """
        return None if self.trial is not None or self.strikes else self._with(busy=False, strikes=1)

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
        return self._with(current=self.last_good, last_good=None, trial=None, busy=False, strikes=0)

    def left(self) -> ReleaseState:
        """Use no release."""
        return self._with(current=None, last_good=None, trial=None, busy=False, strikes=0)

    def forgotten(self) -> ReleaseState:
        """Allow another try to the releases that were refused."""
        return self._with(refused=())

    def _with_floor(self) -> ReleaseState:
        """Raise the floor where the current release is stable and has proved itself; a canary does not raise it."""
        if self.current is None or self.current.canary or self.trial is not None or self.busy:
            return self
        return self._with(floor=max(self.floor, self.current.version))

    def _with(self, **changes: object) -> ReleaseState:
        return ReleaseState.model_validate(dict(self) | changes)
