"""The figures that adaptive windows are wanted to reach, beside what was got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PACED = {1.0: 2.6, 20.0: 2.2, 50.0: 1.7, 100.0: 1.35, 200.0: 1.1}
"""RTT in ms -> speed over streaming at a match near 0.8."""


@dataclass(frozen=True)
class Wanted:
    """One figure."""

    name: str
    got: float
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool:
        return (self.least is None or self.got >= self.least) and (self.most is None or self.got <= self.most)

    def __str__(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{self.name}: {self.got:.3g}, wanted {bound}{'' if self.reached else ', SHORT'}"


def wanted(result: Mapping[str, Any]) -> Iterator[Wanted]:
    """Of what the result has figures for."""
    for cell in result.get("cells") or ():
        yield from _cell(cell)
    for single in result.get("statics") or ():
        yield Wanted(f"{single['cell']}, over the best static", single["vs_best"], least=0.95)
    for name, least in (("vs_best_single_static", 1.0), ("vs_model", 0.9), ("brier_skill", 0.0)):
        if result.get(name) is not None:
            yield Wanted(name, result[name], least=least)
    if result.get("calibration_error") is not None:
        yield Wanted("calibration_error", result["calibration_error"], most=0.05)
    for rtt, got in (result.get("paced") or {}).items():
        yield Wanted(f"paced, match near 0.8, {rtt} ms, over streaming", got, least=PACED[float(rtt)])
    if transition := result.get("transition"):
        yield Wanted("transition, seconds to settle", transition["settle_s"], most=3.0)
        yield Wanted("transition, over streaming", transition["vs_streaming"], least=0.9)
        yield Wanted("transition, changes of k in a stretch", transition["changes"], most=3.0)
    if crowd := result.get("crowd"):
        yield Wanted("a crowd, the slowest over streaming", crowd["slowest"], least=0.97)
    if result.get("predicted_over_measured") is not None:
        yield Wanted("predicted_over_measured", result["predicted_over_measured"], least=0.9, most=1.1)


def _cell(cell: Mapping[str, Any]) -> Iterator[Wanted]:
    name = f"{cell['verifier']}, {cell['sessions']} at once, {cell['draft']}, {cell['rtt_ms']:g} ms"
    yield Wanted(f"{name}, upper bound over streaming", cell["vs_streaming_upper95"], least=0.97)
    if cell["ttft_ratio"] is not None:
        yield Wanted(f"{name}, first token over streaming's", cell["ttft_ratio"], most=1.05)
    yield Wanted(f"{name}, p99 gap over streaming's", cell["p99_gap_ratio"], most=1.25)
    if cell["rtt_ms"] <= 20:
        yield Wanted(f"{name}, bytes up a token", cell["bytes_up_per_token"], most=40.0)
    if (cell["verifier"], cell["sessions"], cell["rtt_ms"], cell["draft"]) == ("paced", 8, 50.0, "good"):
        yield Wanted(f"{name}, the slowest session over streaming", cell["slowest"], least=1.5)
