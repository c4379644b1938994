"""Check that a worse draft is rolled back, bad releases are refused, and outputs stay the target's during swaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.distill import gain, learning
from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.bad_releases import BAD_RELEASES, BadRelease, BadReleaseTrials, Refusal
from benchmarks.distill.fleet import DEVICES, DeviceFleet
from benchmarks.distill.gain import HeldOutText
from benchmarks.distill.identity import OutputComparison
from benchmarks.distill.run_log import RunLog
from benchmarks.distill.size import DistillSize
from benchmarks.distill.system import DistillSystem
from benchmarks.distill.worse_draft import worse_draft
from benchmarks.support.old_harness import quantile
from cloud_verifier.distill.publishing.release_client import DECIDED, ROLLED_BACK, STABLE, ReleaseRecord
from outrider.artifacts.store import file_digest
from outrider.wire.ticket import Signer

_GRACE_S = 10.0
"""Time added to a window, because a coordinator decides at the next report after its end."""
_BACK_S = 60.0
_ON_EVIDENCE = " for what verifiers measured"


@dataclass(frozen=True)
class WorseDraft:
    """Publish a draft that was made worse on purpose."""

    file: Path
    figures: str
    """Its figures, in words."""


def prepare(system: DistillSystem, scale: DistillSize, texts: Sequence[HeldOutText], stable: str) -> WorseDraft:
    """Make the draft out of the stable release's file."""
    good = system.artifacts / f"{stable}.gguf"
    bad = worse_draft(good, system.pair.target, system.folder / "worse", scale.noise)
    new, old = map(gain.per_step, gain.measured((bad, good), texts)[:2])
    return WorseDraft(bad, f"tokens per step {_figures(new)}; of the stable one {_figures(old)}")


async def worse(
    system: DistillSystem, fleet: DeviceFleet, scale: DistillSize, run_log: RunLog, bad: WorseDraft, stable: str
) -> bool:
    """Publish the draft; return whether it was rolled back within its window."""
    digest = file_digest(bad.file)
    await system.distill("publish", str(bad.file), "--parent", stable)
    began = run_log.log(f"published on purpose: {digest[:12]}, {bad.figures}", "a worse draft on trial")
    known = await _decided(system, digest, scale.canary_s + _GRACE_S)
    took = time.time() - began
    back = known is not None and known.state == ROLLED_BACK
    result = f"{known.state}, {known.reason}" if known else "undecided"
    run_log.log(f"release {digest[:12]}: {result}", known.state.replace("_", " ") if known else "")
    await learning.adopted(fleet, stable, _BACK_S, run_log)
    tried = {answer.device for answer in fleet.answers if answer.release == digest}
    gave_up = sum(answer.refused.get("worse", 0) > 0 for answer in _latest(fleet.answers))
    now = (await system.releases()).get(stable)
    tried_by_some = 0 < len(tried) < DEVICES
    run_log.check(
        "a worse draft",
        f"rolled back within {scale.canary_s:.0f} s{_ON_EVIDENCE if scale.promised else ''}, tried by some devices and"
        " not by all; the stable one stays",
        f"{result}, after {took:.0f} s, tried by {len(tried)} devices, of which {gave_up} went back by themselves;"
        f" the stable one is {now.state if now else 'gone'}",
        back
        and (judged_worse(known) or not scale.promised)
        and tried_by_some
        and now is not None
        and now.state == STABLE,
    )
    return back


def judged_worse(known: ReleaseRecord | None) -> bool:
    """Return whether samples decided; a trial that finds nothing is also rolled back when its window ends."""
    return known is not None and known.state == ROLLED_BACK and known.reason.startswith("worse")


async def refusals(
    system: DistillSystem, draft: Path, run_log: RunLog, bad_releases: tuple[BadRelease, ...] = BAD_RELEASES
) -> list[Refusal]:
    """Offer each bad release to a real device of its own. draft: the good file from which they are made."""
    trials = BadReleaseTrials(system.address, draft, Signer.load(system.key), system.folder / "trapped")
    found = await trials.offer_all(bad_releases)
    for refusal in found:
        kinds = ", ".join(map(repr, refusal.got)) or "not refused"
        run_log.check(
            refusal.what,
            f"refused for {refusal.wanted!r} with a message, the same text, never drafted with",
            f"{kinds}, {'the same' if refusal.identical else 'OTHER'} text, {'not used' if refusal.kept else 'USED'}",
            refusal.held,
        )
        print(f"                     {refusal.message}", flush=True)
    return found


def judge_outputs(found: OutputComparison, failed: Sequence[DeviceAnswer], run_log: RunLog) -> None:
    run_log.check(
        "outputs",
        "those of plain streaming, no token lost, no request failed (but while nobody could answer), some during swaps",
        f"{found.requests} requests asked again ({found.swapped} with a swap), {found.tokens} tokens, {found.lost} lost"
        f" or wrong, {found.ties} ties by rounding, {len(failed)} requests failed"
        + "".join(f"; {answer.error[:120]}" for answer in failed[:2]),
        found.identical and not failed and found.swapped > 0,
    )


def swaps(answers: Sequence[DeviceAnswer], run_log: RunLog) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds over all swaps of live sessions."""
    gaps = [1000.0 * seconds for answer in answers for seconds in answer.swaps_s]
    p50, p99 = quantile(gaps, 0.5) or 0.0, quantile(gaps, 0.99) or 0.0
    run_log.log(f"{len(gaps)} swaps in the midst of requests: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return p50, p99


async def _decided(system: DistillSystem, digest: str, seconds: float) -> ReleaseRecord | None:
    """Return what the coordinator decides about a release, or None if it decides nothing within `seconds`."""
    end = time.time() + seconds
    while time.time() < end:
        known = (await system.releases()).get(digest)
        if known is not None and known.state in DECIDED:
            return known
        await asyncio.sleep(0.5)
    return None


def _latest(answers: Sequence[DeviceAnswer]) -> list[DeviceAnswer]:
    """Return the last answer of each device."""
    return list({answer.device: answer for answer in answers if not answer.error}.values())


def _figures(per_step: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.2f}" for kind, value in sorted(per_step.items()))
