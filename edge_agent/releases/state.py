"""What a device remembers of a target's releases: two slots, a trial, a floor. Pure: each change is a new state.

The current slot is in use; the other holds the one to come back to. A slot that is None is the verifier's own draft. A
release that is taken stays on trial until it has shown itself on this device; `busy` says that the process loads the
current one or has it on trial, so that a state which is found busy at a start tells of a crash.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edge_agent.drafting.health import WINDOW, HitRate
from outrider.wire.ticket import MAX_KEY_ID

MAX_REFUSED = 32
"""Refusals that are remembered, the latest."""
MAX_REASON = 400
WORSE_HOLDS_S = 86_400.0
"""How long a release is left that guessed worse here: it may have met other texts than the draft before it."""

_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, le=WINDOW)]
_Version = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InstalledRelease(_Frozen):
    """A release whose file is here."""

    digest: _Hex
    """Of the file: the release's name."""
    version: _Version
    canary: bool
    """Not yet everybody's, when it was last offered."""
    manifest: _Hex
    """Hash of what is signed of its manifest."""
    key_id: Annotated[str, Field(max_length=MAX_KEY_ID)] = ""
    """Of the publisher."""


class Tally(_Frozen):
    """A HitRate, as it is kept."""

    guessed: _Count = 0
    right: _Count = 0

    @classmethod
    def of(cls, score: HitRate) -> Tally:
        return cls(guessed=score.guessed, right=score.right)

    @property
    def score(self) -> HitRate:
        return HitRate(self.guessed, min(self.right, self.guessed))


class ReleaseTrial(_Frozen):
    """Of the current slot."""

    before: Tally
    """How the draft did that it replaced."""
    now: Tally = Tally()
    """How it has done itself when the process last ended in order."""
    since_unix: float = 0.0
    """Seconds; 0 where it is not known."""

    def lasted_s(self, now_unix: float) -> float:
        return now_unix - self.since_unix if self.since_unix else 0.0


class Refusal(_Frozen):
    """A release that was given up, and why."""

    manifest: _Hex
    digest: _Hex
    version: _Version
    kind: Annotated[str, Field(max_length=32)]
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    at_unix: float
    """Seconds."""


class ReleaseState(_Frozen):
    """Of one target. Every method gives the state that follows."""

    format: Literal[1] = 1
    device_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = Field(default_factory=lambda: secrets.token_hex(16))
    """Random; it draws this device for a canary or not, and says nothing else."""
    floor: _Version = 0
    """Version of the newest release that was found healthy as stable: nothing below it is taken."""
    current: InstalledRelease | None = None
    last_good: InstalledRelease | None = None
    trial: ReleaseTrial | None = None
    busy: bool = False
    strikes: Annotated[int, Field(ge=0, le=1)] = 0
    """Times that the process ended while it loaded the current one, which had been good before."""
    refused: Annotated[tuple[Refusal, ...], Field(max_length=MAX_REFUSED)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.current is None and (self.trial is not None or self.busy):
            raise ValueError("a trial needs a current slot")
        return self

    def refusal(self, manifest: str) -> Refusal | None:
        """Why the release of this manifest was given up, if it was."""
        return next((refusal for refusal in self.refused if refusal.manifest == manifest), None)

    def at(self, now_unix: float) -> ReleaseState:
        """Without the refusals that hold no longer."""
        kept = (r for r in self.refused if r.kind != "worse" or abs(now_unix - r.at_unix) < WORSE_HOLDS_S)
        return self._with(refused=tuple(kept))

    def trusting(self, keys: Collection[str]) -> ReleaseState:
        """Without releases of publishers that are not trusted any more. keys: ids of those that are."""
        state = self
        if state.last_good is not None and state.last_good.key_id not in keys:
            state = state._with(last_good=None)
        if state.current is not None and state.current.key_id not in keys:
            state = state.dropped()
        return state

    # --- taking a release

    def take(self, slot: InstalledRelease, before: HitRate, now_unix: float = 0.0) -> ReleaseState:
        """Its file is here and is loaded next. One that was good before needs no trial."""
        if self.current is not None and self.current.digest == slot.digest:
            return self._with(current=slot)._settled()
        if self.last_good is not None and self.last_good.digest == slot.digest:
            last_good = None if self.trial else self.current
            return self._with(current=slot, last_good=last_good, trial=None, busy=True, strikes=0)
        good = self.last_good if self.trial else self.current
        if self.trial is not None:
            before = self.trial.before.score
        trial = ReleaseTrial(before=Tally.of(before), since_unix=now_unix)
        return self._with(current=slot, last_good=good, trial=trial, busy=True, strikes=0)

    def loading(self) -> ReleaseState:
        """The current one is loaded next."""
        return self._with(busy=self.current is not None)

    def loaded(self) -> ReleaseState:
        """It is in memory; on trial it may still take the process down."""
        return self._with(busy=self.trial is not None, strikes=0)._settled()

    def proven(self) -> ReleaseState:
        """The trial is passed."""
        return self._with(trial=None, busy=False)._settled()

    def paused(self, now: HitRate | None) -> ReleaseState:
        """The process ends in order; the trial goes on with the next one. now: None where nothing was seen of it."""
        trial = self.trial
        if trial is not None and now is not None:
            trial = ReleaseTrial(before=trial.before, now=Tally.of(now), since_unix=trial.since_unix)
        return self._with(trial=trial, busy=False)

    # --- giving one up

    def struck(self) -> ReleaseState | None:
        """The process ended while it was busy. None where the current one is to be given up for it: one on trial at
        once, one that had been good the second time, since a reboot or the want of memory does the same."""
        return None if self.trial is not None or self.strikes else self._with(busy=False, strikes=1)

    def gave_up(self, kind: str, reason: str, now_unix: float) -> ReleaseState:
        """The current release did not do: back to the last good one, and never again."""
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
        """The current one is left, for no fault of its own."""
        return self._with(current=self.last_good, last_good=None, trial=None, busy=False, strikes=0)

    def left(self) -> ReleaseState:
        """Back to the verifier's own draft."""
        return self._with(current=None, last_good=None, trial=None, busy=False, strikes=0)

    def forgotten(self) -> ReleaseState:
        """What was refused gets another try."""
        return self._with(refused=())

    def _settled(self) -> ReleaseState:
        """A stable release that is healthy raises the floor; a canary does not."""
        if self.current is None or self.current.canary or self.trial is not None or self.busy:
            return self
        return self._with(floor=max(self.floor, self.current.version))

    def _with(self, **changes: object) -> ReleaseState:
        return ReleaseState.model_validate(dict(self) | changes)
