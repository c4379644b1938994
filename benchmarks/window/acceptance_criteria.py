"""State the figures that adaptive windows should reach, beside what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.support.harness import Criterion, Size
from benchmarks.swarm import TOLERANCE

PACED = {1.0: 2.6, 20.0: 2.2, 50.0: 1.7, 100.0: 1.35, 200.0: 1.1}
"""RTT in ms -> expected speed over streaming, at a match rate near 0.8."""

BOTH = {1.0: 2.0, 20.0: 1.8, 50.0: 1.6, 100.0: 1.5, 200.0: 1.4}
"""RTT in ms -> expected speed over streaming with the nodes of device and verifier, on sampled texts."""
NO_DRAFT = 1.3
"""Expected speed over streaming of a device without a draft model, at any distance."""
SLOW = 0.97
"""Share of streaming's speed below which a session counts as slower."""


def criteria(result: Mapping[str, Any]) -> Iterator[Criterion]:
    """Yield a criterion for each figure that the result has. None of them fails a run."""
    for cell in result.get("cells") or ():
        yield from _cell(cell)
    for single in result.get("statics") or ():
        yield _wanted(f"{single['cell']}, over the best static", single["vs_best"], at_least=0.95)
    if result.get("vs_best_single_static") is not None:
        yield _wanted("over the best single static", result["vs_best_single_static"], at_least=1.0, strict=True)
    if result.get("vs_model") is not None:
        yield _wanted("PACED, over the streaming model's speed", result["vs_model"], at_least=0.9)
    if result.get("brier_skill") is not None:
        yield _wanted("brier_skill", result["brier_skill"], at_least=0.0, strict=True)
    if result.get("calibration_error") is not None:
        yield _wanted("calibration_error", result["calibration_error"], at_most=0.05)
    for rtt, got in (result.get("paced") or {}).items():
        yield _wanted(f"PACED, match near 0.8, {rtt} ms, over streaming", got, at_least=PACED[float(rtt)])
    if transition := result.get("transition"):
        yield _wanted("PACED, transition, seconds until the worst session settled", transition["settle_s"], at_most=3.0)
        yield _wanted("PACED, transition, the worst session over streaming", transition["vs_streaming"], at_least=0.9)
        yield _wanted("PACED, transition, changes of the window in a period", transition["changes"], at_most=3.0)
    if crowd := result.get("crowd"):
        yield _wanted(f"a crowd, {crowd['machine']}, the slowest over streaming", crowd["slowest"], at_least=1.0)
    if result.get("predicted_over_measured") is not None:
        yield _wanted("predicted_over_measured", result["predicted_over_measured"], at_least=0.9, at_most=1.1)
    if result.get("both_over_best") is not None:
        yield _wanted(
            "arms, both over the better of device and cloud, the least", result["both_over_best"], at_least=SLOW
        )
    for rtt, got in (result.get("both_vs_streaming") or {}).items():
        yield _wanted(f"arms, both over streaming, {rtt} ms", got, at_least=BOTH[float(rtt)])
    for rtt, got in (result.get("no_draft_vs_streaming") or {}).items():
        yield _wanted(f"arms, without a draft over streaming, {rtt} ms", got, at_least=NO_DRAFT)
    for several in result.get("arms_several") or ():
        for arm, figures in several["over_streaming"].items():
            name = f"arms, {several['machine']}, {arm}, the least of each place's better round over streaming"
            yield _wanted(name, figures["least_better"], at_least=SLOW)
    for row in result.get("policies") or ():
        for policy, (middle, *_) in row["outrider_over"].items():
            yield _wanted(f"policies, {row['rtt_ms']:g} ms, Outrider's windows over {policy}", middle, at_least=1.0)
    for row in result.get("live") or ():
        name = f"{row['machine']}, {row['rtt_ms']:g} ms, replayed devices over live ones"
        yield _wanted(name, row["replayed_over_live"], at_least=1.0 - TOLERANCE, at_most=1.0 + TOLERANCE)
    if result.get("minutes") is not None:
        yield _wanted("minutes of the full run", result["minutes"], at_most=90.0)


def summed_up(cells: Sequence[Mapping[str, Any]]) -> str:
    """Report how many cells may be slower than streaming, and how many have no first-token target."""
    slow = sum(cell["vs_streaming"] < SLOW for cell in cells)
    low = sum(cell["vs_streaming_lower95"] < SLOW for cell in cells)
    without = sum(not cell["ttft_wanted"] for cell in cells)
    return (
        f"of {len(cells)} cells {slow} have a median under {SLOW:g} of streaming, {low} a lower 95% bound under it;"
        f" first tokens are not measured in {without} of them"
    )


def _cell(cell: Mapping[str, Any]) -> Iterator[Criterion]:
    paced = cell["verifier"] == "paced"
    verifier = "PACED" if paced else cell["verifier"]
    name = f"{verifier}, {cell['sessions']} at once, {cell['draft']}, {cell['rtt_ms']:g} ms"
    yield _wanted(f"{name}, upper bound over streaming", cell["vs_streaming_upper95"], at_least=SLOW)
    yield _wanted(f"{name}, lower bound over streaming", cell["vs_streaming_lower95"], at_least=SLOW)
    if cell["ttft_wanted"]:
        read = " (prompts read at this CPU's speed)" if paced else ""
        yield _wanted(f"{name}, first token over streaming's{read}", cell["ttft_ratio"], at_most=1.05)
    yield _wanted(f"{name}, p99 gap between deliveries over streaming's", cell["p99_gap_ratio"], at_most=1.25)
    if cell["rtt_ms"] <= 20:
        yield _wanted(f"{name}, bytes up a token", cell["bytes_up_per_token"], at_most=40.0)
    if (cell["verifier"], cell["sessions"], cell["rtt_ms"], cell["draft"]) == ("paced", 8, 50.0, "good"):
        yield _wanted(f"{name}, the slowest session over streaming", cell["slowest"], at_least=1.5)


def _wanted(name: str, found: float | None, **bounds: Any) -> Criterion:
    return Criterion.bound(name, found, **bounds, enforced_from=None)


def valid(invalid: Sequence[str]) -> Criterion:
    """Return the criterion that everything was measured properly. invalid: descriptions of what was not."""
    found = "; ".join(invalid) or "nothing"
    return Criterion("not measured properly", "nothing", found, not invalid, enforced_from=Size.FULL)
