"""Measure what is refused with more users than slots, how soon, and what the others keep.

One verifier serves `slots` sessions at a time. Users without a draft generate in a closed loop, so that each has a
session or wants one; their devices wait for room as they do by default. They ask the coordinator for a session, or the
verifier itself, since each has to refuse. Coordinator and users share a core, and the verifier has another.

`wait_s` is from a request to its first token, `rate` a text's tokens per second from its first token on, and `gap_ms`
the time between two deliveries of a text. `gave_up` counts texts whose device found no room in its time. Beside the
crowd, one device asks for a token twice a second and does not wait: `refused` is the share of its requests that were
refused, and `refusal_ms` the time from a request to its refusal, for which a device asks a verifier twice.
`users_busy` is the share of a core that all users take: near 1 it bounds the figures.

`--soak MINUTES` measures something else: memory and slots of a verifier whose sessions come and go. Half of its users
end or cancel each text at random, the others draft in a process that is killed every 20 seconds. `mb_per_hour` is the
slope of resident memory in the last half of the run, `mb_per_hour_upper` the upper end of its 95% interval.
`slots_kept` are session slots and KV slots in use with nobody there, `slots_missing` session slots that cannot be had
after that.

Caveat: a text without a draft keeps its user's device almost idle; with drafts, users are served faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.support import harness, proc
from benchmarks.support.harness import Pair, quantile, rounded, say
from coordinator.cluster import Cluster
from edge_agent.bench.users import SAMPLED, Users, run_users
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError, Overloaded

ASK_S = 0.5
"""Time between two requests of that device."""
ROOM_S = 60.0
"""Time after which a device that could not load what it needs never will. No figure depends on it."""
REST_S = 10.0
"""Time after the last session in which all of its slots must be free."""
KILL_S = 20.0
BLOCKS = 12
T_95 = 2.228
"""Student's t of 97.5% with `BLOCKS - 2` degrees of freedom."""
SEED = 20_261_121


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    slots: int = 16
    crowds: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0)
    """Users by slot."""
    tokens: int = 96
    prompts: int = 24
    warm_s: float = 10.0
    """Time until something is counted."""
    seconds: float = 40.0


QUICK = Setting(slots=4, crowds=(1.0, 4.0), tokens=32, prompts=8, warm_s=2.0, seconds=10.0)


@dataclass
class Text:
    """Hold what a user got of a request. Times are on the monotonic clock."""

    asked_s: float
    delivered_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: OutriderError | None = None
    ended_s: float = 0.0

    @classmethod
    async def of(
        cls,
        client: AsyncClient,
        prompt: Sequence[int],
        tokens: int,
        *,
        until_s: float = math.inf,
        most: float = math.inf,
    ) -> Text:
        """Generate a text to its end, to `until_s`, or to about `most` tokens, whichever comes first."""
        text = cls(time.monotonic())
        try:
            stream = await client.stream(prompt, **SAMPLED, max_tokens=tokens, ignore_eos=True, retries=0, timeout=None)
            left_s = None if until_s == math.inf else max(0.0, until_s - text.asked_s)
            async with asyncio.timeout(left_s), stream:
                while len(text.tokens) < most and (chunk := await stream.next()) is not None:
                    text.tokens += chunk.token_ids
                    text.delivered_s += [time.monotonic()] * len(chunk.token_ids)
        except TimeoutError:
            pass
        except OutriderError as error:
            text.error = error
        text.ended_s = time.monotonic()
        return text

    @property
    def rate(self) -> float:
        """Return the tokens per second from the first token on."""
        seconds = self.delivered_s[-1] - self.delivered_s[0]
        return (len(self.tokens) - 1) / seconds if seconds else 0.0


# --- a crowd


@dataclass
class Crowd:
    """Runs users in a closed loop, and keeps what each of their requests came to."""

    clients: Sequence[AsyncClient]
    impatient: AsyncClient
    prompts: Sequence[Sequence[int]]
    setting: Setting
    texts: list[Text] = field(default_factory=list)
    asked: list[Text] = field(default_factory=list)
    """Those of the impatient device."""

    async def run(self) -> dict[str, Any]:
        """Return the figures of a row."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        begin_s = began_s + self.setting.warm_s
        end_s = begin_s + self.setting.seconds
        users = (self._user(number, end_s) for number in range(len(self.clients)))
        await asyncio.gather(self._ask(end_s), *users)
        busy = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        return {"users": len(self.clients), **self._row(begin_s, end_s), "users_busy": rounded(busy)}

    async def _user(self, number: int, end_s: float) -> None:
        turn = number
        while time.monotonic() < end_s:
            prompt = self.prompts[turn % len(self.prompts)]
            text = await Text.of(self.clients[number], prompt, self.setting.tokens, until_s=end_s)
            self.texts.append(text)
            turn += 1
            if text.error is not None:
                await asyncio.sleep(min(text.error.retry_after_s or 1.0, max(0.0, end_s - time.monotonic())))

    async def _ask(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self.asked.append(await Text.of(self.impatient, self.prompts[0], 1, until_s=end_s))
            await asyncio.sleep(ASK_S)

    def _row(self, begin_s: float, end_s: float) -> dict[str, Any]:
        def counts(at_s: float) -> bool:
            return begin_s < at_s <= end_s

        asked = [one for one in self.asked if counts(one.ended_s)]
        refused = [one for one in asked if isinstance(one.error, Overloaded)]
        refusals_ms = [1e3 * (one.ended_s - one.asked_s) for one in refused]
        ended = [one for one in self.texts if counts(one.ended_s)]
        whole = [one for one in ended if len(one.tokens) == self.setting.tokens]
        times_s = [dict.fromkeys(one.delivered_s) for one in self.texts if one.delivered_s]
        gaps_ms = [1e3 * (b - a) for times in times_s for a, b in itertools.pairwise(times) if counts(b)]
        waits_s = [one.delivered_s[0] - one.asked_s for one in self.texts if one.delivered_s]
        wrong = [one.error for one in (*ended, *asked) if one.error and not isinstance(one.error, Overloaded)]
        for error in wrong:
            say(f"{type(error).__name__}: {error}")
        return {
            "tokens_per_s": rounded(
                sum(counts(at) for one in self.texts for at in one.delivered_s) / (end_s - begin_s), 1
            ),
            "texts": len(whole),
            "rate": rounded(statistics.median(one.rate for one in whole) if whole else None, 1),
            "gap_ms_p99": rounded(quantile(gaps_ms, 0.99), 1),
            "wait_s_p50": rounded(quantile(waits_s, 0.5)),
            "wait_s_p99": rounded(quantile(waits_s, 0.99)),
            "gave_up": sum(isinstance(one.error, Overloaded) for one in ended),
            "refused": rounded(len(refused) / len(asked)) if asked else None,
            "refusal_ms_p50": rounded(quantile(refusals_ms, 0.5), 1),
            "refusal_ms_p99": rounded(quantile(refusals_ms, 0.99), 1),
            "errors": len(wrong),
        }


@contextlib.asynccontextmanager
async def clients(
    count: int, draft: str | None, at: Mapping[str, str], *, patient: bool = True
) -> AsyncIterator[list[AsyncClient]]:
    """Yield so many devices, which have loaded what they need. Raises Overloaded.

    at: address of the coordinator or of the verifier, by that name. patient: they wait for room.
    """
    async with contextlib.AsyncExitStack() as stack:
        made = [AsyncClient(draft=draft, **at) for _ in range(count)]  # type: ignore[arg-type]
        for client in made:
            if not patient:
                client._sessions.open_budget_s = client._sessions.resume_budget_s = 0.0
            await stack.enter_async_context(client)
            until_s = time.monotonic() + ROOM_S
            while True:
                try:
                    await client.prepare()
                    break
                except Overloaded:
                    if time.monotonic() > until_s:
                        raise
                await asyncio.sleep(1.0)
        yield made


def serving(pair: Pair, slots: int, *, coordinator: bool = True) -> contextlib.AbstractAsyncContextManager[Cluster]:
    """Run a verifier with so many slots, with a coordinator or without."""
    options = ("--dtype", "float32", "--max-sessions", str(slots))
    return harness.one_verifier(pair, *options, coordinator=() if coordinator else None)


async def measure_crowds(options: argparse.Namespace, pair: Pair, prompts: Sequence[Sequence[int]]) -> None:
    setting, rows = QUICK if options.quick else Setting(), []
    slots = options.slots or setting.slots
    for via in ("coordinator", "verifier"):
        async with serving(pair, slots, coordinator=via == "coordinator") as cluster:
            at = {via: cluster.address or cluster.verifiers[0].address}
            for times in setting.crowds:
                async with (
                    clients(1, None, at, patient=False) as [impatient],
                    clients(round(times * slots), None, at) as users,
                ):
                    rows.append({"via": via} | await Crowd(users, impatient, prompts, setting).run())
                say(rows[-1])
    size = f"One verifier with {slots} slots, texts of {setting.tokens} tokens at temperature 0.8."
    harness.finish(options, size, rows, slots=slots)


# --- soak


@dataclass
class Soak:
    """Runs sessions that come and go at a verifier, and watches its memory."""

    cluster: Cluster
    prompts: Sequence[Sequence[int]]
    setting: Setting
    slots: int
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """When, and MB of each process."""
    endings: Counter[str] = field(default_factory=Counter)
    expected: dict[int, list[int]] = field(default_factory=dict)
    """The first whole text of each prompt."""
    differing: int = 0
    tokens: int = 0

    async def run(self, minutes: float) -> list[dict[str, Any]]:
        """Run for so long; return a row for each process."""
        until_s = time.monotonic() + 60.0 * minutes
        background = [asyncio.create_task(work) for work in (self._watch(), self._killed(until_s))]
        async with clients(max(1, self.slots // 2), "ngram", {"coordinator": self.cluster.address}) as made:
            draws = [random.Random(SEED + number) for number in range(len(made))]
            await asyncio.gather(*map(self._user, made, draws, [until_s] * len(made)))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        return [
            {
                "process": name,
                "mb_begin": rounded(self.samples[0][1][name], 1),
                "mb_end": rounded(self.samples[-1][1][name], 1),
                **growth([(at, mb[name]) for at, mb in self.samples if name in mb]),
            }
            for name in self.samples[0][1]
        ]

    async def _user(self, client: AsyncClient, draw: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            number = draw.randrange(len(self.prompts))
            most = draw.randint(1, self.setting.tokens) if draw.random() < 0.4 else math.inf
            text = await Text.of(client, self.prompts[number], self.setting.tokens, most=most)
            self.tokens += len(text.tokens)
            self.endings["refused" if isinstance(text.error, Overloaded) else "error" if text.error else "end"] += 1
            if text.error is not None:
                say(f"{type(text.error).__name__}: {text.error}")
                await asyncio.sleep(text.error.retry_after_s or 1.0)
                continue
            known = self.expected.setdefault(number, text.tokens)
            shared = min(len(known), len(text.tokens))
            self.differing += text.tokens[:shared] != known[:shared]
            if len(text.tokens) > len(known):
                self.expected[number] = text.tokens

    async def _killed(self, until_s: float) -> None:
        """Run devices that draft, and kill their process with all of their sessions now and then."""
        count = max(1, self.slots - self.slots // 2 - 1)
        options = SAMPLED | {"max_tokens": self.setting.tokens}
        device = {"coordinator": self.cluster.address}
        users = Users(device, self.prompts, count, "auto", options=options, seconds=60.0 * KILL_S)
        while time.monotonic() < until_s:
            running = asyncio.create_task(run_users(users, sorted(os.sched_getaffinity(0))))
            await asyncio.wait({running}, timeout=min(KILL_S, max(0.0, until_s - time.monotonic())))
            running.cancel()
            self.endings["killed"] += count
            await asyncio.gather(running, return_exceptions=True)

    async def _watch(self) -> None:
        coordinator = self.cluster.coordinator
        while coordinator is not None:
            front, *others = proc.family(self.cluster.verifiers[0].pid)
            engine = max(others, key=proc.rss_mb, default=front)
            named = {"front": front, "engine": engine, "coordinator": coordinator.pid}
            self.samples.append((time.monotonic(), {name: proc.rss_mb(pid) for name, pid in named.items()}))
            await asyncio.sleep(1.0)

    async def kept(self) -> dict[str, int]:
        """Return what is in use once all users have gone for a while."""
        until_s = time.monotonic() + REST_S
        while True:
            load = (await harness.verifiers(self.cluster.address))[0].telemetry
            if time.monotonic() > until_s or not (load.live_sessions or load.kv_used):
                return {"sessions": load.live_sessions, "kv": load.kv_used}
            await asyncio.sleep(0.5)

    async def missing(self) -> int:
        """Return how many of all session slots cannot be had at once."""
        async with clients(self.slots, None, {"coordinator": self.cluster.address}) as made:
            texts = [Text.of(client, self.prompts[0], 2 * self.setting.tokens) for client in made]
            return sum(text.error is not None for text in await asyncio.gather(*texts))


def growth(samples: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Return the slope of memory in the last half of the samples (seconds and MB), and its interval's upper end.

    A line is fitted by least squares to the means of BLOCKS equal spans of time, since samples that follow one another
    are not independent. Both are None where there are fewer samples than that.
    """
    half = (samples[0][0] + samples[-1][0]) / 2.0
    span = [(at / 3_600.0, mb) for at, mb in samples if at >= half]
    if len(span) < BLOCKS:
        return {"mb_per_hour": None, "mb_per_hour_upper": None}
    hours, mb = np.array([part.mean(axis=0) for part in np.array_split(np.array(span), BLOCKS)]).T
    hours = hours - hours.mean()
    spread = float(np.square(hours).sum())
    slope = float((hours * (mb - mb.mean())).sum()) / spread
    error = float(np.square(mb - mb.mean() - slope * hours).sum()) / (BLOCKS - 2)
    return {
        "mb_per_hour": rounded(slope, 1),
        "mb_per_hour_upper": rounded(slope + T_95 * math.sqrt(error / spread), 1),
    }


async def measure_soak(options: argparse.Namespace, pair: Pair, prompts: Sequence[Sequence[int]]) -> None:
    setting = QUICK if options.quick else Setting()
    slots = options.slots or setting.slots
    async with serving(pair, slots) as cluster:
        soak = Soak(cluster, prompts, setting, slots)
        rows = await soak.run(options.soak)
        say(rows)
        kept, missing = await soak.kept(), await soak.missing()
    harness.finish(
        options,
        f"{options.soak:g} minutes of sessions that come and go at {slots} slots.",
        rows,
        minutes=options.soak,
        endings=soak.endings,
        tokens=soak.tokens,
        differing=soak.differing,
        slots_kept=kept,
        slots_missing=missing,
    )


async def measure(options: argparse.Namespace) -> None:
    pair, setting = Pair.of(options), QUICK if options.quick else Setting()
    prompts = list(harness.prompts(options, pair, setting.prompts).values())
    await (measure_soak if options.soak else measure_crowds)(options, pair, prompts)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("overload", __doc__)
    parser.add_argument("--slots", type=int, metavar="N", help="session slots of the verifier")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="measure memory and slots for so long instead")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
