"""Decide how the loop's state changes: pure functions from one state to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import get_args

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.retrain_trigger import adapted
from cloud_verifier.distill.errors import PermanentFailure, TooLittleTraffic
from cloud_verifier.distill.publishing.release_client import CANDIDATE, DECIDED, ROLLED_BACK, STABLE, ReleaseRecord
from cloud_verifier.distill.state import LoopState, Result, RunOutcome, RunState, Stage
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, ModelRefused

DAY_S = 86_400.0
HISTORY = 50
"""Outcomes that are kept."""
_NEXT: Mapping[Stage, Stage] = dict(pairwise(get_args(Stage)))
_PASSED_GATE: tuple[Stage, ...] = ("publish", "canary")
"""Stages in which a run is not given up for errors that lie elsewhere."""
_OWN_ERRORS = (BadRequest, ModelRefused, FileNotFoundError, ValueError)
"""Errors that lie with the draft, the publisher or a damaged file, and will not pass by themselves."""
_MORE_TRAFFIC = 1.5
"""Multiple of the traffic of a run that came too early at which the next one begins."""


def advance(state: LoopState, run: RunState, *, to: Stage | None = None, release: str = "") -> LoopState:
    """Return the state with the run in its next stage, or in `to`. release: digest of the published draft."""
    update = {
        "stage": to or _NEXT[run.stage],
        "release": release or run.release,
        "failures": 0,
        "not_before_unix": 0.0,
    }
    return state.changed(run=run.model_copy(update=update))


def end(state: LoopState, run: RunState, result: Result, reason: str, now: float, config: DistillConfig) -> LoopState:
    """Return the state after a run. It has used up its traffic, whatever came of it."""
    outcome = RunOutcome(
        number=run.number,
        cause=run.cause,
        result=result,
        reason=reason,
        release=run.release,
        ended_unix=now,
    )
    return state.changed(
        run=None,
        used_unix=run.newest_unix,
        usual=state.usual if result == "failed" else adapted(state.usual, run.seen, config),
        wanted=0,
        history=(*state.history, outcome)[-HISTORY:],
    )


def fail(state: LoopState, run: RunState, error: Exception, now: float, config: DistillConfig) -> LoopState:
    """Return the state after a failed stage: the run is put off, tried again later or given up."""
    if isinstance(error, TooLittleTraffic):
        # As if the run had not begun: its traffic counts again.
        return state.changed(run=None, wanted=math.ceil(_MORE_TRAFFIC * sum(one.tokens for one in run.seen.values())))
    failures = run.failures + 1
    kept = run.stage in _PASSED_GATE and not isinstance(error, _OWN_ERRORS)
    if not kept and (isinstance(error, PermanentFailure) or failures >= config.attempts):
        return end(state, run, "failed", str(error), now, config)
    wait_s = backoff_s(failures, config.retry_s, config.retry_max_s, jitter=0.0)
    return state.changed(run=run.model_copy(update={"failures": failures, "not_before_unix": now + wait_s}))


def add_stage_time(state: LoopState, seconds: float, now: float) -> LoopState:
    """Return the state with the time that a stage took, and without times of more than a day ago."""
    recent = [(ended, took) for ended, took in state.spent if ended > now - DAY_S]
    return state.changed(spent=(*recent, (now, seconds)))


def spent_s(state: LoopState, now: float) -> float:
    """Return the seconds that stages took within the last day."""
    return sum(took for ended, took in state.spent if ended > now - DAY_S)


def canary_result(known: Mapping[str, ReleaseRecord], digest: str) -> tuple[Result, str] | None:
    """Return what came of a release, and the reason; None as long as the coordinator has not decided.

    known: the target's releases by digest, the release among them.
    """
    release = known[digest]
    if release.state in DECIDED:
        return ("rolled_back" if release.state == ROLLED_BACK else "stable"), release.reason
    blocked = release.state == CANDIDATE and any(one.state == STABLE and one.pinned for one in known.values())
    if blocked or release.pinned:
        pinned = "the stable release" if blocked else "it"
        return "waiting", f"{pinned} is pinned: an operator decides what becomes of release {digest[:12]}"
    return None
