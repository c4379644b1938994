"""Kill the coordinator and Redis, and check that nothing is lost and everything goes on by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.fleet import DeviceFleet
from benchmarks.distill.run_log import RunLog
from benchmarks.distill.system import DistillSystem
from cloud_verifier.distill.publishing.release_client import ReleaseRecord
from outrider.core.errors import Unavailable

AWAY_S = 1.0
"""Time between a kill and the restart."""
_BACK_S = 600.0
"""Longer than the pause of a device that has asked just before."""
_OPENING_S = 2.0
"""A request that began less than this before a kill may not have had a session yet."""
_SETTLING_S = 5.0
"""Time after a restart in which verifiers register again."""
_ANSWERS = 8
"""Requests begun after a restart that must be answered; also requests before a kill, so that it falls among others."""


def lines(known: Mapping[str, ReleaseRecord]) -> dict[str, tuple[int, str]]:
    """Return the fields of each release that must not be lost: version and state."""
    return {digest: (one.manifest.version, one.state) for digest, one in known.items()}


async def kill_coordinator(system: DistillSystem, fleet: DeviceFleet, run_log: RunLog) -> None:
    """Kill the coordinator amid sessions and a trial, and start a new one over the same Redis."""
    await _answered(time.time(), fleet)
    before = lines(await system.releases())
    killed = run_log.log(f"kill -9 of the coordinator, with {show(before)}", "coordinator killed")
    await system.kill_coordinator()
    await asyncio.sleep(AWAY_S)
    await system.start_coordinator()
    await _judge("the coordinator", "nothing", killed, before, system, fleet, run_log)


async def kill_redis(system: DistillSystem, fleet: DeviceFleet, run_log: RunLog) -> None:
    """Kill Redis, which loses its data, start it again, and check the recovery."""
    await _answered(time.time(), fleet)
    before = lines(await system.releases())
    killed = run_log.log(f"kill -9 of Redis with all its data, with {show(before)}", "Redis killed")
    system.redis.stop(kill=True)
    await asyncio.sleep(AWAY_S)
    system.redis.start()
    await _judge("Redis", "samples of a trial under way alone", killed, before, system, fleet, run_log)


async def _judge(
    what: str,
    window: str,
    killed: float,
    before: dict[str, tuple[int, str]],
    system: DistillSystem,
    fleet: DeviceFleet,
    run_log: RunLog,
) -> None:
    """Check that releases are kept or were decided, that new requests are answered, and that the loop lives.

    What was asked while nobody could answer may fail, since a device does not wait for ever; what had begun may not.
    """
    began = time.time()
    after = await _restored(before, system)
    took = time.time() - began
    answered = await _answered(began, fleet)
    run_log.outages.append((killed - _OPENING_S, began + _SETTLING_S))
    late = [answer for answer in fleet.answers if answer.error and answer.ended >= killed]
    failed = unexplained(late, run_log.outages)
    through = went_through(fleet.answers, killed)
    served = through > 0 and answered >= _ANSWERS and not failed
    run_log.check(
        f"{what}, killed",
        f"{window} lost, no request fails that had begun, later ones are answered, the loop lives",
        f"{show(after)} {took:.1f} s after the new start, {through} requests that were under way came to their end and"
        f" {len(failed)} failed, {len(late) - len(failed)} failed of what was asked meanwhile, {answered} new ones were"
        " answered",
        bool(before) and kept(before, after) and served and system.loop_runs,
    )


async def _restored(before: dict[str, tuple[int, str]], system: DistillSystem) -> dict[str, tuple[int, str]]:
    """Return the releases once all are there again, or as they are after the longest wait."""
    after: dict[str, tuple[int, str]] = {}
    until = time.time() + _BACK_S
    while time.time() < until and not (before and kept(before, after)):
        try:
            after = lines(await system.releases())
        except Unavailable:
            after = {}
        await asyncio.sleep(0.1)
    return after


async def _answered(began: float, fleet: DeviceFleet) -> int:
    """Return the requests begun since then and answered, as soon as there are enough."""
    until = time.time() + _BACK_S
    count = 0
    while time.time() < until and count < _ANSWERS:
        await asyncio.sleep(0.1)
        count = sum(answer.begun >= began and not answer.error for answer in fleet.answers)
    return count


def went_through(answers: Sequence[DeviceAnswer], killed: float) -> int:
    """Return the requests that had tokens at `killed`, in Unix seconds, and were answered after it."""
    return sum(not a.error and 0.0 < a.first < killed < a.ended for a in answers)


def unexplained(answers: Sequence[DeviceAnswer], outages: Sequence[tuple[float, float]]) -> list[DeviceAnswer]:
    """Return failed requests that did not begin in one of the `outages`, each (begin, end) in Unix seconds."""
    return [a for a in answers if a.error and not any(begin <= a.begun <= end for begin, end in outages)]


def kept(before: Mapping[str, tuple[int, str]], after: Mapping[str, tuple[int, str]]) -> bool:
    """Return whether no release is lost or changed, apart from a trial that was decided meanwhile."""
    return all(
        digest in after
        and after[digest][0] == version
        and (after[digest][1] == state or (state == "canary" and after[digest][1] in ("stable", "rolled_back")))
        for digest, (version, state) in before.items()
    )


def show(known: Mapping[str, tuple[int, str]]) -> str:
    return ", ".join(f"version {version} {state}" for version, state in known.values()) or "no release"
