"""The figures that adaptive windows are wanted to reach, beside what was got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACED = {1.0: 2.6, 20.0: 2.2, 50.0: 1.7, 100.0: 1.35, 200.0: 1.1}
"""RTT in ms -> speed over streaming at a match near 0.8."""

SLOW = 0.97
"""Of streaming: less is slower."""


@dataclass(frozen=True)
class Wanted:
    """One figure."""

    name: str
    got: float | None
    """None: it was to be measured, and nothing came."""
    least: float | None = None
    most: float | None = None
    above: bool = False
    """Whether `least` itself is too little."""

    @property
    def reached(self) -> bool:
        if self.got is None or (self.above and self.got == self.least):
            return False
        return (self.least is None or self.got >= self.least) and (self.most is None or self.got <= self.most)

    def __str__(self) -> str:
        least = "above" if self.above else "at least"
        bound = f"{least} {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        got = "nothing" if self.got is None else f"{self.got:.4g}"
        return f"{self.name}: {got}, wanted {bound}{'' if self.reached else ', SHORT'}"


def wanted(result: Mapping[str, Any]) -> Iterator[Wanted]:
    """Of what the result has figures for."""
    for cell in result.get("cells") or ():
        yield from _cell(cell)
    for single in result.get("statics") or ():
        yield Wanted(f"{single['cell']}, over the best static", single["vs_best"], least=0.95)
    if result.get("vs_best_single_static") is not None:
        yield Wanted("over the best single static", result["vs_best_single_static"], least=1.0, above=True)
    if result.get("vs_model") is not None:
        yield Wanted("PACED, over the streaming model's speed", result["vs_model"], least=0.9)
    if result.get("brier_skill") is not None:
        yield Wanted("brier_skill", result["brier_skill"], least=0.0, above=True)
    if result.get("calibration_error") is not None:
        yield Wanted("calibration_error", result["calibration_error"], most=0.05)
    for rtt, got in (result.get("paced") or {}).items():
        yield Wanted(f"PACED, match near 0.8, {rtt} ms, over streaming", got, least=PACED[float(rtt)])
    if transition := result.get("transition"):
        yield Wanted("PACED, transition, seconds until the worst session settled", transition["settle_s"], most=3.0)
        yield Wanted("PACED, transition, the worst session over streaming", transition["vs_streaming"], least=0.9)
        yield Wanted("PACED, transition, changes of the window in a stretch", transition["changes"], most=3.0)
    if crowd := result.get("crowd"):
        yield Wanted(f"a crowd, {crowd['machine']}, the slowest over streaming", crowd["slowest"], least=1.0)
    if result.get("predicted_over_measured") is not None:
        yield Wanted("predicted_over_measured", result["predicted_over_measured"], least=0.9, most=1.1)
    if result.get("minutes") is not None:
        yield Wanted("minutes of the full run", result["minutes"], most=40.0)


def summed_up(cells: Sequence[Mapping[str, Any]]) -> str:
    """How many cells may be slower than streaming, and where nothing is said of first tokens."""
    slow = sum(cell["vs_streaming"] < SLOW for cell in cells)
    low = sum(cell["vs_streaming_lower95"] < SLOW for cell in cells)
    without = sum(not cell["ttft_wanted"] for cell in cells)
    return (
        f"of {len(cells)} cells {slow} have a median under {SLOW:g} of streaming, {low} a lower 95% bound under it;"
        f" first tokens are not measured in {without} of them"
    )


def _cell(cell: Mapping[str, Any]) -> Iterator[Wanted]:
    paced = cell["verifier"] == "paced"
    verifier = "PACED" if paced else cell["verifier"]
    name = f"{verifier}, {cell['sessions']} at once, {cell['draft']}, {cell['rtt_ms']:g} ms"
    yield Wanted(f"{name}, upper bound over streaming", cell["vs_streaming_upper95"], least=SLOW)
    if cell["ttft_wanted"]:
        read = " (prompts read at this CPU's speed)" if paced else ""
        yield Wanted(f"{name}, first token over streaming's{read}", cell["ttft_ratio"], most=1.05)
    yield Wanted(f"{name}, p99 gap over streaming's", cell["p99_gap_ratio"], most=1.25)
    if cell["rtt_ms"] <= 20:
        yield Wanted(f"{name}, bytes up a token", cell["bytes_up_per_token"], most=40.0)
    if (cell["verifier"], cell["sessions"], cell["rtt_ms"], cell["draft"]) == ("paced", 8, 50.0, "good"):
        yield Wanted(f"{name}, the slowest session over streaming", cell["slowest"], least=1.5)
