"""Judge how sessions ended under faults, and explain their pauses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.sessions import TIMEOUT_S, SessionOutcome
from benchmarks.support.old_harness import Criterion, Size

LONG_PAUSE_S = 5.0
RECOVERY_S = 15.0
"""Time after a fault's end in which a pause that ends then may still be of that fault."""
AGAIN_S = 3.0
"""Time after which sessions can be opened again once the control plane is back: a verifier's report, and a retry."""
LAST_S = 0.5
"""What was in force so long before an error explains it."""
MOST_MINUTES, LEAST_FAULTS = 30.0, 300


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected, with monotonic times. device: the only one that it concerns, if there is one. missed:
    it has struck nothing."""

    kind: str
    what: str
    began: float
    ended: float
    leaves_verifier: bool = True
    refuses: bool = False
    device: int | None = None
    missed: bool = False

    def concerns(self, device: int, began: float, ended: float, after_s: float = 0.0) -> bool:
        """Return whether it may have disturbed this device between two moments."""
        return self.device in (None, device) and self.began <= ended and began <= self.ended + after_s


@dataclass(frozen=True)
class Pause:
    """A wait for tokens, with the fault that explains it best."""

    seconds: float
    fault: InjectedFault | None
    outcome: SessionOutcome

    @property
    def kind(self) -> str:
        return self.fault.kind if self.fault else "no fault"


@dataclass
class Findings:
    """Compares outcomes with the undisturbed outputs, and counts what must not happen.

    expected: output by the request's name. ties: whether a difference from it is one of rounding.
    """

    expected: Mapping[str, tuple[int, ...]]
    faults: Sequence[InjectedFault]
    tie: Callable[[SessionOutcome], bool] = lambda outcome: False
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost_by_kind: Counter[str] = field(default_factory=Counter)
    refused_by_kind: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)

    def add(self, outcome: SessionOutcome) -> None:
        """Judge one session."""
        self.counts["sessions"] += 1
        for began, ended in outcome.waits:
            self.pauses.append(Pause(ended - began, self._explain(outcome.device, began, ended), outcome))
        if outcome.error in ("killed", "stuck"):
            self.counts[outcome.error] += 1
            if outcome.error == "stuck":
                self._note(outcome, "stuck")
            return
        self._compare(outcome)
        if outcome.error:
            self._judge_error(outcome)

    def _compare(self, outcome: SessionOutcome) -> None:
        """Compare the tokens: all of them must be there without an error, and a beginning of them with one."""
        wanted = self.expected[outcome.request.name]
        if outcome.error:
            wanted = wanted[: len(outcome.tokens)]
        if outcome.tokens == wanted:
            self.counts["equal"] += not outcome.error
        elif self.tie(outcome):
            self.counts["ties"] += 1
        else:
            self.counts["differing"] += 1
            at = next((i for i, (a, b) in enumerate(zip(outcome.tokens, wanted, strict=False)) if a != b), "its end")
            self._note(outcome, f"differs at {at} ({len(outcome.tokens)} tokens, wanted {len(wanted)})")

    def _judge_error(self, outcome: SessionOutcome) -> None:
        self.errors[outcome.error] += 1
        if not outcome.typed:
            self.counts["untyped"] += 1
        near = [f for f in self.faults if f.concerns(outcome.device, outcome.began, outcome.ended, RECOVERY_S)]
        kinds = ", ".join(sorted({fault.kind for fault in near})) or "no fault"
        if not outcome.tokens and (refusing := self._refusing(outcome)):
            self.counts["refused"] += 1
            self.refused_by_kind[f"{refusing.kind}: {outcome.error}"] += 1
            return
        if self._out_of_reach(outcome):
            self.counts["out_of_reach"] += 1
            return
        self.counts["lost"] += 1
        cause = self._explain(outcome.device, max(outcome.began, outcome.ended - LAST_S), outcome.ended)
        self.lost_by_kind[cause.kind if cause else "no fault"] += 1
        self._note(outcome, f"lost after {outcome.ended - outcome.began:.1f} s, {len(outcome.tokens)} tokens ({kinds})")

    def _refusing(self, outcome: SessionOutcome) -> InjectedFault | None:
        """Return the fault that was in force as the session ended, and lets none be opened."""
        last = max(outcome.began, outcome.ended - LAST_S)
        for fault in self.faults:
            if fault.refuses and fault.concerns(outcome.device, last, outcome.ended, AGAIN_S):
                return fault
        return None

    def _out_of_reach(self, outcome: SessionOutcome) -> bool:
        """Return whether no verifier could be reached from the error on until the caller's time was over."""
        until = outcome.began + TIMEOUT_S
        return any(
            fault.concerns(outcome.device, outcome.ended, outcome.ended)
            and not fault.leaves_verifier
            and fault.ended >= until
            for fault in self.faults
        )

    def _explain(self, device: int, began: float, ended: float) -> InjectedFault | None:
        """Return the fault that was in force for most of a wait, else the last one before its end."""
        near = [fault for fault in self.faults if fault.concerns(device, began, ended, RECOVERY_S)]

        def overlap(fault: InjectedFault) -> tuple[float, float]:
            return min(fault.ended, ended) - max(fault.began, began), fault.began

        return max(near, key=overlap, default=None)

    def _note(self, outcome: SessionOutcome, what: str) -> None:
        error = f"; {outcome.error}: {outcome.message}" if outcome.error else ""
        self.notes.append(
            f"session {outcome.session or '?'} of device {outcome.device}, {outcome.request.name},"
            f" {outcome.attaches} attaches, from {outcome.began:.1f}: {what}{error}"
        )

    @property
    def worst_pause_s(self) -> float:
        return max((pause.seconds for pause in self.pauses), default=0.0)

    def long_pauses(self) -> Iterator[str]:
        """Yield a line for each pause that is long, with what explains it."""
        for pause in sorted(self.pauses, key=lambda pause: -pause.seconds):
            if pause.seconds > LONG_PAUSE_S:
                fault = pause.fault
                what = "no fault explains it"
                if fault is not None:
                    left = "a verifier was left" if fault.leaves_verifier else "no verifier could be reached"
                    what = f"{fault.kind} ({fault.what}) for {fault.ended - fault.began:.1f} s, {left}"
                ended = f", ended by {pause.outcome.error}" if pause.outcome.error else ""
                yield f"pause of {pause.seconds:.1f} s on device {pause.outcome.device}{ended}: {what}"

    def by_kind(self) -> dict[str, float]:
        """Return the worst pause of each kind of fault, in seconds."""
        worst: dict[str, float] = defaultdict(float)
        for pause in self.pauses:
            worst[pause.kind] = max(worst[pause.kind], pause.seconds)
        return {kind: round(seconds, 1) for kind, seconds in sorted(worst.items(), key=lambda item: -item[1])}


def criteria(result: Mapping[str, Any], minutes: float) -> Iterator[Criterion]:
    """Yield what must hold, in a run of any size."""
    for key, name in (
        ("differing", "sessions with another output than the undisturbed one"),
        ("untyped", "sessions that ended by an error which is none of the SDK's"),
        ("lost", "sessions that ended by an error although a verifier was alive"),
        ("stuck", "sessions that did not end"),
        ("leaked_places", "places taken at the end"),
        ("leaked_slots", "KV slots in use at the end"),
        ("violations", "owners, places and slots that were not as they must be meanwhile"),
        ("error_lines", "kinds of lines logged at ERROR"),
    ):
        yield Criterion.none(name, result[key])
    yield Criterion.none("pauses of more than 5 s that no fault explains", result["pauses_unexplained"])
    yield Criterion.bound("faults that struck something", result["faults"], at_least=LEAST_FAULTS)
    yield Criterion.bound("looks at them", result["looks"], at_least=1, enforced_from=Size.SMOKE)
    yield Criterion.bound("minutes", minutes, at_most=MOST_MINUTES, enforced_from=None)
