"""Compare speculation lengths by the distance of the device: none, fixed, adaptive, and who drafts.

The target takes at least `--step-ms` a step, as a larger one does, by default so long that also a slow core computes
the rows of a tree meanwhile, and the device is `rtt_ms` away. `none` is tokens per second without drafts; every other
column is the speed over it, as the median of each text's own ratio, from the first token on, at temperature 0.8. `fixed
4` is a speculation length that never changes, under a coordinator that leaves it alone, and is only run at the nearest.
With `adaptive` the coordinator sets the length from the measured acceptance, distance and load. In these the device
drafts, and the verifier's n-grams join it with `adaptive`. With `verifier` the verifier drafts, by n-grams and the GGUF
draft, and with `both` both do. `rounds` is calculated: a device that sends a tree and waits for the answer before it
drafts again gets as many tokens as the best fixed length nearest to the verifier, for a step and a round trip. Its
drafting is taken to cost nothing. `--users N` lets N users run at the same time.

`--fleet` simulates verifiers of 20 and of 100 sessions instead, which needs no model: tokens per second of the
coordinator's lengths over none, the slowest session over its own speed without speculation, and the share of a bound
that no choice of lengths exceeds (benchmarks.support.fleet).

Caveat: a new session streams for about a second before its length is decided, which counts here, and which matters less
in a long answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.support import fleet, harness
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.throttled_verifier import environment
from coordinator.cluster import Cluster
from edge_agent.bench.users import SAMPLED, Run, Users, differing, run_users

NONE, ADAPTIVE, VERIFIER, BOTH, ROUNDS = "none", "adaptive", "verifier", "both", "rounds"
Cells = dict[tuple[float, str], Run]
"""(round trip in ms, arm) -> the run"""


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    rtts_ms: tuple[float, ...] = (1.0, 50.0, 150.0)
    fixed: tuple[int, ...] = (4,)
    prompts: int = 40
    tokens: int = 40
    verifiers: int = 8
    """Simulated ones of each size."""


QUICK = Setting(rtts_ms=(1.0, 100.0), fixed=(4,), prompts=2, tokens=32, verifiers=1)
FLEETS = (20, 100)
"""Sessions of a simulated verifier."""


@dataclass(frozen=True)
class Site:
    """Describe a verifier, and the arms that are run at it: name -> the devices' draft."""

    arms: Mapping[str, str | None]
    options: tuple[str, ...] = ()
    fixed: int | None = None
    """The speculation length that never changes; its arms are only run at the nearest distance."""

    @contextlib.asynccontextmanager
    async def running(self, pair: Pair, step_ms: float) -> AsyncIterator[Cluster]:
        """Run the verifier, throttled."""
        options = list(self.options)
        if self.fixed is not None:
            # Two draft tokens a level.
            pinned = {"nodes_per_step": 2 * self.fixed, "draft_wait_ms": 0, "ngram": False, "prefix_cache": False}
            options += ["--engine-args", json.dumps(pinned)]
        throttle = environment(step_ms)
        control = ("--no-window-control",) if self.fixed is not None else ()
        async with harness.one_verifier(
            pair, *options, prefix_cache=False, throttle=throttle, coordinator=control
        ) as cluster:
            yield cluster


def sites(pair: Pair, setting: Setting) -> list[Site]:
    """Return all verifiers, the one without drafts first."""
    fixed = [Site({f"fixed {length}": "auto"}, fixed=length) for length in setting.fixed]
    return [Site({NONE: None, ADAPTIVE: "auto"}), *fixed, Site({VERIFIER: None, BOTH: "auto"}, pair.own_speculation)]


def row(rtt_ms: float, runs: Mapping[str, Run], in_rounds: float) -> dict[str, Any]:
    """Return the row of one distance. in_rounds: tokens of a round."""
    rates = {(text.user, text.prompt): text.rate for text in runs[NONE].texts}
    over = {
        arm: statistics.median(text.rate / rates[text.user, text.prompt] for text in found.texts)
        for arm, found in runs.items()
        if arm != NONE
    }
    over[ROUNDS] = in_rounds / (1 + rtt_ms * 1e-3 * runs[NONE].rate)
    return {"rtt_ms": rtt_ms, NONE: rounded(runs[NONE].rate, 1)} | {arm: rounded(ratio) for arm, ratio in over.items()}


async def runs_of(
    places: Sequence[Site], pair: Pair, setting: Setting, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> Cells:
    """Run all arms at one distance before those at the next, so that what is compared ran at about the same time."""
    found: Cells = {}
    requests = SAMPLED | {"max_tokens": setting.tokens}
    async with contextlib.AsyncExitStack() as stack:
        running = [(site, await stack.enter_async_context(site.running(pair, options.step_ms))) for site in places]
        for rtt_ms in setting.rtts_ms:
            for site, cluster in running:
                if site.fixed is not None and rtt_ms != min(setting.rtts_ms):
                    continue  # what rounds would gain is calculated from the nearest
                users = Users({"coordinator": cluster.address}, prompts, count=options.users, rtt_ms=rtt_ms)
                for arm, draft in site.arms.items():
                    asked = replace(users, draft=draft, options=requests | {"speculation": arm != NONE})
                    one = found[rtt_ms, arm] = await run_users(asked, harness.CORES[1:])
                    say(f"{arm}, {rtt_ms:g} ms: {one.rate:.1f} tokens/s, {one.acceptance_length:.2f} a step")
    return found


async def live(options: argparse.Namespace, setting: Setting) -> None:
    """Measure real devices at throttled verifiers."""
    pair = Pair.of(options)
    prompts = list(harness.prompts(options, pair, 1 + setting.prompts).values())
    runs = await runs_of(sites(pair, setting), pair, setting, prompts, options)
    by_rtt = {rtt_ms: {arm: run for (at, arm), run in runs.items() if at == rtt_ms} for rtt_ms in setting.rtts_ms}
    nearest = by_rtt[min(setting.rtts_ms)]
    in_rounds = max(nearest[f"fixed {length}"].acceptance_length for length in setting.fixed)
    harness.finish(
        options,
        f"{options.users} user(s), target throttled to {options.step_ms:g} ms a step, {setting.prompts} prompts at"
        f" temperature 0.8, at most {setting.tokens} tokens each.",
        [row(rtt_ms, found, in_rounds) for rtt_ms, found in by_rtt.items()],
        acceptance_length={
            arm: {
                f"{rtt_ms:g}": rounded(found[arm].acceptance_length) for rtt_ms, found in by_rtt.items() if arm in found
            }
            for arm in nearest
        },
        degenerate=sum(one.degenerate for one in runs.values()),
        texts_unlike_undrafted=sum(differing(one.texts, runs[rtt_ms, NONE].texts) for (rtt_ms, _), one in runs.items()),
    )


def simulated(options: argparse.Namespace, setting: Setting) -> None:
    """Judge the coordinator's lengths on simulated verifiers."""
    rows = [row for sessions in FLEETS for row in fleet.judge(sessions, setting.verifiers)]
    of_the_bound = min(row["of_the_bound"] for row in rows if row["lengths"] == "coordinator")
    setting_ = f"Simulated: {setting.verifiers} verifiers of {FLEETS[0]} and of {FLEETS[1]} sessions."
    harness.finish(options, setting_, rows, of_the_bound=of_the_bound)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("window", __doc__)
    parser.add_argument("--step-ms", type=float, default=150.0, help="least time of a step of the target")
    parser.add_argument("--users", type=int, default=1, help="users at the same time")
    parser.add_argument("--fleet", action="store_true", help="simulate verifiers with many sessions instead")
    options = parser.parse_args(argv)
    setting = QUICK if options.quick else Setting()
    harness.main(lambda: simulated(options, setting) if options.fleet else live(options, setting))


if __name__ == "__main__":
    main()
