"""Provide light clients: the SDK's own client with a draft that is replayed from a recording.

The rest is what a device does: tokens come through the real stream, what was drafted ahead survives as far as it was
right, and what was rejected is dropped and drafted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest
from benchmarks.support.draft_replay.source import ReplayedDrafts, SpoiledSource
from benchmarks.support.network_link import Link
from benchmarks.support.network_proxy import MAX_RTT_MS, DelayProxy
from edge_agent.config import EdgeSettings
from edge_agent.drafting.sources.base import DraftSource
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.sessions import Sessions
from edge_agent.sdk.types import Options
from edge_agent.session.coordinator_client import Placement
from edge_agent.session.failover import AttachTarget, Route
from edge_agent.target.bundle import TargetBundle
from outrider.core.errors import BadRequest, OutriderError, Overloaded

Ending = Literal["finish", "cancel", "drop", "silence"]
"""How a session ends: by itself; by a Cancel; its connection is cut without a word; it hangs, connected."""

HANG_S = 26.0
"""How long a client that hangs keeps its connection: beyond a verifier's `silence_timeout_s` of 20."""


@dataclass(frozen=True)
class SessionJob:
    """One session that a light client shall run."""

    recording: int
    """Its number in the recording."""
    drafted: bool = True
    """False: plain cloud streaming."""
    ending: Ending = "finish"
    after: int = 0
    """Tokens that are delivered before it ends otherwise than by itself."""
    rtt_ms: float | None = None
    """Of its line; None: what `Where` says."""
    spoiled: tuple[int, int] = (0, 0)
    """Of the output, the positions from the first to before the second get wrong proposals."""
    seconds: float | None = None
    """Since its begin: with the first tokens after so many it is cancelled."""


@dataclass
class SessionOutcome:
    """The result of a session. Seconds count from its begin, placement included."""

    tokens: int = 0
    steps: int = 0
    """Commits that brought tokens."""
    evaluated: int = 0
    accepted: int = 0
    wrong: int = 0
    """Positions at which a token differs from the recorded output, and, for one that finished, those it lacks."""
    finish: str = ""
    """eos | length | cancelled; empty where it ended by an error, or by dying."""
    first_token_s: float | None = None
    seconds: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    """Between deliveries."""
    delivered_s: list[float] = field(default_factory=list)
    """When each token came, on the clock that all processes of a machine share."""
    refused_s: list[float] = field(default_factory=list)
    """From an attach, or the request for a place, to its refusal as Overloaded."""
    wire_up: int = 0
    """Bytes on its line, HTTP/2 and all; 0 where it has none of its own."""
    wire_down: int = 0
    appends: int = 0
    """Messages with nodes, or that say that there are none."""
    error: str = ""
    """Class name and message."""
    asked: int = 0
    missed: int = 0
    """Questions to the draft, and those that the recording does not answer."""
    session_id: str = ""
    """The coordinator's; empty without one."""
    predicted: list[float] = field(default_factory=list)
    """Of the first nodes sent that came to be decided: their path acceptance as it was then estimated."""
    happened: list[bool] = field(default_factory=list)
    """Whether they became text."""

    @property
    def finished(self) -> bool:
        return self.finish in ("eos", "length")


class _WatchedSessions(Sessions):
    """Sessions that note how long refusals take, and that can fall silent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.refused_s: list[float] = []
        self.session_id = ""
        self.dead = False
        """Whether no more messages are sent."""

    async def place(self, prompt_tokens: int = 0, draft_release: str = "", traffic_class: str = "") -> Placement | None:
        began = time.monotonic()
        try:
            placement = await super().place(prompt_tokens, draft_release, traffic_class)
        except Overloaded:
            self.refused_s.append(time.monotonic() - began)
            raise
        self.session_id = placement.session_id if placement else ""
        return placement

    def close_session(self, placement: Placement) -> None:
        if not self.dead:
            super().close_session(placement)

    def route(self, placement: Placement | None, budget_s: float) -> Route:
        return _Watched(super().route(placement, budget_s), self.refused_s)


class LightClient(AsyncClient):
    """The SDK's client with a target's bundle that is loaded already. One per session: each is a device of its own."""

    _sessions_type = _WatchedSessions
    _sessions: _WatchedSessions

    def __init__(self, bundle: TargetBundle, **options: Any) -> None:
        super().__init__(draft=None, retries=0, **options)
        self._ready_bundle = bundle

    @property
    def sessions(self) -> _WatchedSessions:
        return self._sessions

    async def _load_from_verifiers(self) -> TargetBundle:
        return self._ready_bundle


class _Watched:
    """A route that notes how long refusals take."""

    def __init__(self, under: Route, refused_s: list[float]) -> None:
        self._under = under
        self._refused_s = refused_s
        self._attached_s = 0.0

    async def next(self) -> AttachTarget:
        target = await self._under.next()
        self._attached_s = time.monotonic()
        return target

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        if isinstance(error, Overloaded):
            self._refused_s.append(time.monotonic() - self._attached_s)
        self._under.failed(error, progressed=progressed)


@dataclass(frozen=True)
class ServiceAddress:
    """Addresses, emulated link and time limit of a client."""

    verifier: str
    coordinator: str = ""
    """Empty: straight to the verifier, without a ticket."""
    rtt_ms: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()
    """(seconds since a session began, the round trip in ms from then on)"""
    wait_s: float = 30.0
    """How long a session without a place goes on asking."""


class Player:
    """Runs any number of jobs of one recording at once. An async context manager.

    release: of the draft, as in DraftPool.
    """

    def __init__(
        self, recorded: DraftRecording, where: ServiceAddress, scratch: Path, release: str = "recorded"
    ) -> None:
        self._recorded = recorded
        self._release = release
        self._taught = recorded.calibrators()
        self._where = where
        self._settings = EdgeSettings(resume_budget_s=where.wait_s, cache_dir=scratch)
        self._bundle: TargetBundle | None = None

    async def __aenter__(self) -> Player:
        async with AsyncClient(verifier=self._where.verifier, draft=None, settings=self._settings) as plain:
            self._bundle = await plain.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._bundle = None

    async def play(self, job: SessionJob) -> SessionOutcome:
        """Never raises for what happens to the session; a job that the recording does not hold is a BadRequest."""
        if not 0 <= job.recording < len(self._recorded.recordings):
            raise BadRequest.bound("recording", job.recording, f"less than {len(self._recorded.recordings)}")
        drafts = self._drafts(job) if job.drafted else None
        outcome = SessionOutcome()
        async with contextlib.AsyncExitStack() as stack:
            proxy = await self._proxy(stack, job)
            client = await stack.enter_async_context(self._client(drafts, proxy))
            await self._run(client, job, outcome, proxy)
            outcome.refused_s, outcome.session_id = client.sessions.refused_s, client.sessions.session_id
            outcome.wire_up, outcome.wire_down = (proxy.bytes_up, proxy.bytes_down) if proxy else (0, 0)
        for source in drafts.sources if drafts else ():
            outcome.asked += source.asked
            outcome.missed += source.missed
        for drafter in drafts.drafters if drafts else ():
            outcome.predicted += [round(predicted, 4) for predicted, _ in drafter.settled]
            outcome.happened += [happened for _, happened in drafter.settled]
        return outcome

    def _drafts(self, job: SessionJob) -> ReplayedDrafts:
        if not any(job.spoiled):
            return ReplayedDrafts(self._recorded, self._taught, release=self._release)
        output, vocabulary = self._recorded.recordings[job.recording].call.output, self._recorded.vocabulary

        def spoil(source: DraftSource) -> DraftSource:
            return SpoiledSource(source, output, job.spoiled, vocabulary)

        return ReplayedDrafts(self._recorded, self._taught, spoil=spoil, release=self._release)

    def _client(self, drafts: ReplayedDrafts | None, proxy: DelayProxy | None) -> LightClient:
        if self._bundle is None:
            raise BadRequest("the player is not open; use it as a context manager")
        where = self._where
        return LightClient(
            replace(self._bundle, drafts=drafts),
            coordinator=where.coordinator or None,
            verifier=None if where.coordinator else where.verifier,
            reroute={where.verifier: proxy.address} if proxy else None,
            settings=self._settings,
        )

    async def _proxy(self, stack: contextlib.AsyncExitStack, job: SessionJob) -> DelayProxy | None:
        """A line of its own for who is far away, or will be cut off."""
        where = self._where
        if job.rtt_ms is not None:
            where = replace(where, rtt_ms=job.rtt_ms)
        if not where.rtt_ms and job.ending not in ("drop", "silence"):
            return None
        script = tuple((at_s, Link(rtt_ms=rtt_ms)) for at_s, rtt_ms in where.changes)
        return await stack.enter_async_context(DelayProxy(where.verifier, where.rtt_ms, script=script))

    async def _run(
        self, client: LightClient, job: SessionJob, outcome: SessionOutcome, proxy: DelayProxy | None
    ) -> None:
        call = self._recorded.recordings[job.recording].call
        began = last = time.monotonic()
        stream = await client.stream(call.prompt, **options_of(call))
        got: list[int] = []
        try:
            async with stream:
                async for chunk in stream:
                    now = time.monotonic()
                    if got and chunk.token_ids:
                        outcome.gaps_ms.append(1000.0 * (now - last))
                    last = now
                    got += chunk.token_ids
                    outcome.delivered_s += [now] * len(chunk.token_ids)
                    if job.seconds is not None and now - began >= job.seconds:
                        break
                    if job.ending != "finish" and len(got) >= job.after:
                        if job.ending != "cancel" and proxy is not None:
                            await self._die(client, job, proxy)
                        break
        except OutriderError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        completion = stream.completion
        died = job.ending in ("drop", "silence") and completion.finish_reason == "cancelled"
        outcome.finish = "" if outcome.error or died else completion.finish_reason
        outcome.seconds = last - began
        outcome.wrong = differing(got, call.output, whole=outcome.finished)
        measured = stream.statistics
        outcome.tokens, outcome.steps, outcome.first_token_s = measured.tokens, measured.steps, measured.first_token_s
        outcome.evaluated, outcome.accepted = measured.evaluated, measured.accepted
        outcome.appends = measured.appends

    async def _die(self, client: LightClient, job: SessionJob, proxy: DelayProxy) -> None:
        """Stop all messages of the client from here on, as if its device had died."""
        client.sessions.dead = True
        if job.ending == "drop":
            await proxy.__aexit__(None, None, None)
        else:
            proxy.rtt_ms = MAX_RTT_MS  # half of it each way: the verifier does not wait as long
            await asyncio.sleep(HANG_S)


def differing(got: Sequence[int], expected: Sequence[int], *, whole: bool) -> int:
    """Positions at which `got` is not `expected`. whole: what one has more than the other counts too."""
    wrong = sum(a != b for a, b in zip(got, expected, strict=False))
    surplus = len(got) - len(expected)
    return wrong + (abs(surplus) if whole else max(0, surplus))


def options_of(call: RecordedRequest) -> Options:
    """The call's request as the SDK takes it."""
    sampling = call.sampling
    return Options(
        max_tokens=call.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        ignore_eos=call.ignore_eos,
    )
