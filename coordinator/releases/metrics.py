"""Draft releases as metrics: how many are in which state, and what is known of those on trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from coordinator.releases.records import Evidence, Release, State
from outrider.telemetry.prometheus import gauge
from outrider.wire import manifest as manifests

NAME = "outrider_coordinator"
TARGET_DIGITS = 12
"""Of a target's hash, as its label."""

Sides = tuple[tuple[str, float], tuple[str, float]]
"""A label and its number, of either side of a trial."""


def families(releases: Sequence[Release] | None, now: float) -> Iterator[Metric]:
    """releases: None where the store is away. now: seconds since 1970."""
    states = Counter(release.state for release in releases or ())
    shown = {} if releases is None else {state.value: states[state] for state in State}
    yield gauge(f"{NAME}_releases", "Draft releases by state", shown, "state")
    trials = {_target(release): release for release in releases or () if release.state is State.CANARY}
    ages = {target: now - release.since_unix for target, release in trials.items()}
    yield gauge(f"{NAME}_canary_age_seconds", "Since the trial's begin", ages, "target")
    evidence = {target: release.evidence or Evidence() for target, release in trials.items()}
    samples = _by_side(evidence, lambda e: (("canary", e.canary_samples), ("stable", e.stable_samples)))
    yield gauge(f"{NAME}_canary_samples", "Sessions compared", samples, "target", "arm")
    right = _by_side(evidence, lambda e: (("canary", e.canary_right), ("stable", e.stable_right)))
    yield gauge(
        f"{NAME}_canary_acceptance_ratio", "Positions whose first guess was right, 0 to 1", right, "target", "arm"
    )
    text = "Logarithm of the e-value that the canary is better, or worse, than the bound allows"
    logs = _by_side(evidence, lambda e: (("better", e.log_better), ("worse", e.log_worse)))
    yield gauge(f"{NAME}_canary_log_evidence", text, logs, "target", "way")


def _by_side(evidence: Mapping[str, Evidence], sides: Callable[[Evidence], Sides]) -> dict[tuple[str, str], float]:
    return {(target, side): value for target, one in evidence.items() for side, value in sides(one)}


def _target(release: Release) -> str:
    """A target's hash by the manifest, shortened."""
    return manifests.read_unverified(release.manifest).weights_hash.removeprefix("sha256:")[:TARGET_DIGITS]
