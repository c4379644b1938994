"""Record everything that the windows benchmark replays, before it begins, with one verifier that is not paced."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import ServiceAddress
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest
from benchmarks.support.harness import Pair
from benchmarks.support.texts import repetitive
from benchmarks.window.draft_recordings import (
    Lessons,
    acceptance_histories,
    calls,
    lessons_from,
    long_prompts,
    match_rate,
    match_rates,
    nearest,
    options,
    record_draft,
    starting_plan,
)
from benchmarks.window.plan import PACED, TOKENS, WindowPlan
from edge_agent.sdk.types import Options
from outrider.core.errors import BadRequest

LONG_OUTPUT = 16
ARMS = "arms"
"""Name of the recording, and of the part, that compares who proposes nodes."""
POLICIES = "policies"
"""Name of the recording, and of the part, that compares policies and schemes."""


class RecordingLibrary:
    """Hold the draft recordings by name.

    `good` and `narrow` are for the cells, each with the long prompts at its end; `near`, `changes`, `arms` and
    `policies` are of `good`.
    """

    def __init__(
        self,
        pair: Pair,
        plan: WindowPlan,
        prompts: Mapping[str, Sequence[int]],
        teaching: Mapping[str, Sequence[int]],
        scratch: Path,
        *,
        keep_repetitive: bool = False,
    ) -> None:
        """Set up the library. prompts: to play, by name, as many as the plan may need. teaching: those that devices
        learn from. keep_repetitive: whether texts that repeat themselves are played too.

        Raises ValueError where a prompt is in both.
        """
        if both := set(map(tuple, prompts.values())) & set(map(tuple, teaching.values())):
            raise ValueError(f"{len(both)} prompts are to be played and to teach")
        self.drafts = {"good": pair.draft, "narrow": pair.narrow}
        self._pair = pair
        self._plan = plan
        self._prompts = prompts
        self._teaching = dict(islice(teaching.items(), plan.teaching))
        self._lessons: dict[str, Lessons] = {}
        self._scratch = scratch
        self._keep_repetitive = keep_repetitive
        self.excluded: dict[str, int] = {}
        """Recording -> texts that were left out because they repeat themselves."""
        self.near: dict[str, float] | None = None
        """Texts of `near`, how many of them are greedy, and the median and extremes of their match rates."""
        self._recorded: dict[str, DraftRecording] = {}
        self._histories: dict[str, list[bytes]] = {}

    def file(self, name: str) -> Path:
        return self._scratch / f"{name}.json"

    def recorded(self, name: str) -> DraftRecording:
        return self._recorded[name]

    def acceptance_histories(self, name: str) -> list[bytes]:
        """Return the acceptance history of each recording of this name."""
        return self._histories[name]

    def prompts(self, draft: str) -> int:
        """Return the number of recordings without long prompts, which come first."""
        return len(self._recorded[draft].recordings) - self._plan.long

    async def make(self, where: ServiceAddress, parts: Collection[str]) -> None:
        """Record the drafts that these parts of the benchmark need."""
        plan = self._plan
        await self._teach(where, (0.0, 0.8) if {"model", ARMS} & set(parts) else (0.8,))
        if not {"changes", "model", ARMS, POLICIES}.issuperset(parts):
            asked = options(max(map(plan.tokens_of, TOKENS)))
            requests, ends = await self._varied("cells", where, plan.prompts, asked)
            texts = list(self._prompts.values())
            long = {f"long {i}": prompt for i, prompt in enumerate(long_prompts(texts, plan.long))}
            requests += (await calls(where, long, options(LONG_OUTPUT), 1))[0]
            for draft in plan.drafts:
                await self._record(draft, draft, requests, ends)
        if "changes" in parts:
            requests, ends = await calls(where, self._first(plan.changes), options(plan.change_tokens))
            await self._record("changes", "good", requests, ends)
        if POLICIES in parts:
            count = plan.policy_lessons + plan.policies
            requests, ends = await self._varied(POLICIES, where, count, options(plan.policy_tokens))
            await self._record(POLICIES, "good", requests, ends)
        if ARMS in parts:
            greedy = -(-plan.arms // 2)
            sampled = min(plan.arm_prompts, len(self._prompts) - greedy)
            if sampled < plan.arms + plan.arm_lessons:
                raise BadRequest(
                    f"the arms need {plan.arms + plan.arm_lessons + greedy} prompts, and there are {len(self._prompts)}"
                )
            named = list(self._prompts.items())
            found = [
                await calls(where, dict(some), options(plan.tokens_of(PACED), temperature))
                for temperature, some in ((0.8, named[:sampled]), (0.0, named[sampled : sampled + greedy]))
            ]
            await self._record(ARMS, "good", [one for requests, _ in found for one in requests], found[0][1])
        if "model" in parts:
            await self._near(where)

    async def _varied(
        self, name: str, where: ServiceAddress, count: int, asked: Options
    ) -> tuple[list[RecordedRequest], tuple[int, ...]]:
        """Return so many requests whose outputs do not repeat themselves, since any draft guesses those that do.

        Raises BadRequest if there are too few.
        """
        found: list[RecordedRequest] = []
        ends: tuple[int, ...] = ()
        named, excluded = list(self._prompts.items()), 0
        for begin in range(0, len(named), count):
            requests, ends = await calls(where, dict(named[begin : begin + count]), asked)
            for one in requests:
                if len(found) == count:
                    break
                if self._keep_repetitive or not repetitive(one.output):
                    found.append(one)
                else:
                    excluded += 1
            if len(found) == count:
                self.excluded[name] = excluded
                return found, ends
        raise BadRequest(f"only {len(found)} outputs of {len(named)} do not repeat themselves; {count} are needed")

    async def _near(self, where: ServiceAddress) -> None:
        """Record the candidates whose match rate is nearest to 0.8, chosen by the draft's answers alone.

        Texts that repeat themselves are none: any draft guesses them.
        """
        found: list[RecordedRequest] = []
        ends: tuple[int, ...] = ()
        for temperature in (0.0, 0.8):
            asked = options(self._plan.tokens_of(PACED), temperature)
            requests, ends = await calls(where, self._first(self._plan.candidates), asked, 16)
            found += requests
        found = [one for one in found if not repetitive(one.output)]
        if not found:
            raise BadRequest("all candidates for a match near 0.8 repeat themselves")
        shares = await asyncio.to_thread(match_rates, self._pair, found, ends, self._lessons["good"])
        taken, inside = nearest(shares, self._plan.near)
        rates = [shares[i] for i in taken]
        self.near = {
            "texts": len(taken),
            "greedy": sum(found[i].sampling.greedy for i in taken),
            "match": round(statistics.median(rates), 3),
            "least": round(min(rates), 3),
            "most": round(max(rates), 3),
        }
        print(
            f"match near 0.8: {inside} of {len(shares)} recordings lie in 0.75 to 0.85; {len(taken)} are played,"
            f" {self.near['greedy']} of them greedy, which are {harness.spread(rates)}",
            flush=True,
        )
        await self._record("near", "good", [found[i] for i in taken], ends)

    async def _teach(self, where: ServiceAddress, temperatures: Sequence[float]) -> None:
        """Let a device with each draft go through the teaching prompts at these temperatures."""
        requests: list[RecordedRequest] = []
        ends: tuple[int, ...] = ()
        for temperature in temperatures:
            more, ends = await calls(
                where, self._teaching, options(max(map(self._plan.tokens_of, TOKENS)), temperature)
            )
            requests += more
        for draft in dict.fromkeys(("good", *self._plan.drafts)):
            self._lessons[draft] = await asyncio.to_thread(lessons_from, self._pair, self.drafts[draft], requests, ends)
            count = sum(map(len, self._lessons[draft]))
            print(f"{count} lessons for the {draft} draft from {len(requests)} calls that are not played", flush=True)

    async def _record(self, name: str, draft: str, requests: Sequence[RecordedRequest], ends: Sequence[int]) -> None:
        lessons = self._lessons[draft]
        recorded = await record_draft(self._pair, self.drafts[draft], requests, ends, lessons, self.file(name))
        self._recorded[name], self._histories[name] = (
            recorded,
            acceptance_histories(recorded, starting_plan(self._pair)),
        )
        shares = [match_rate(history) for history in self._histories[name]]
        print(
            f"recorded {name}: {len(shares)} outputs, match {harness.spread(shares)},"
            f" {1e3 * recorded.decodes[0][1]:.2f} ms a decode",
            flush=True,
        )

    def _first(self, count: int) -> dict[str, Sequence[int]]:
        return dict(islice(self._prompts.items(), count))
