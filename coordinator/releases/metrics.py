"""Make metrics of draft releases: how many are in which state, and what is known of those on trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from coordinator.releases.records import CanaryEvidence, LifecycleState, Release
from outrider.telemetry.prometheus import gauge
from outrider.wire import manifest as manifests

NAME = "outrider_coordinator"
TARGET_DIGITS = 12
"""Digits of a target's hash in its label."""


def families(releases: Sequence[Release] | None, now: float) -> Iterator[Metric]:
    """Yield the metrics. releases: None if the store cannot be reached. now: seconds since 1970."""
    states = Counter(release.state for release in releases or ())
    shown = {} if releases is None else {state.value: states[state] for state in LifecycleState}
    yield gauge(f"{NAME}_releases", "Draft releases by state", shown, "state")
    trials = {_target(release): release for release in releases or () if release.state is LifecycleState.CANARY}
    ages = {target: now - release.since_unix for target, release in trials.items()}
    yield gauge(f"{NAME}_canary_age_seconds", "Since the trial's begin", ages, "target")
    samples: dict[tuple[str, str], float] = {}
    acceptance: dict[tuple[str, str], float] = {}
    logs: dict[tuple[str, str], float] = {}
    for target, release in trials.items():
        e = release.evidence or CanaryEvidence()
        samples |= {(target, "canary"): e.canary_samples, (target, "stable"): e.stable_samples}
        acceptance |= {(target, "canary"): e.canary_acceptance, (target, "stable"): e.stable_acceptance}
        logs |= {(target, "better"): e.log_better, (target, "worse"): e.log_worse}
    yield gauge(f"{NAME}_canary_samples", "Sessions compared", samples, "target", "arm")
    text = "Share of positions whose first proposal was accepted, 0 to 1"
    yield gauge(f"{NAME}_canary_acceptance_ratio", text, acceptance, "target", "arm")
    text = "Logarithm of the e-value that the canary is better, or worse, than the bound allows"
    yield gauge(f"{NAME}_canary_log_evidence", text, logs, "target", "way")


def _target(release: Release) -> str:
    """Return the beginning of the hash of a release's target."""
    return manifests.read_unverified(release.manifest).weights_hash.removeprefix("sha256:")[:TARGET_DIGITS]
