"""Provide light clients: the SDK's own client with a draft that is replayed from a recording, or with the draft itself.

The rest is what a device does: tokens come through the real stream, what was drafted ahead survives as far as it was
right, and what was rejected is dropped and drafted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.support.draft_replay.calibration_probe import ProbedDrafter
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest, copied
from benchmarks.support.draft_replay.rounds import RoundDrafter
from benchmarks.support.draft_replay.source import ReplayedDrafts, WrongSpanSource
from benchmarks.support.network_link import Link
from benchmarks.support.network_proxy import MAX_RTT_MS, DelayProxy
from benchmarks.support.ucb_specstop import UcbSpecStop
from edge_agent.config import EdgeSettings
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.sources.base import DraftSource
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.sessions import Sessions
from edge_agent.sdk.types import Options
from edge_agent.session.coordinator_client import Placement
from edge_agent.session.failover import AttachTarget, Route
from edge_agent.target.bundle import TargetBundle
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import BadRequest, OutriderError, Overloaded

Ending = Literal["finish", "cancel", "drop", "silence"]
"""The way a session ends: by itself, by a Cancel, by a cut connection, or by silence on an open one."""

HANG_S = 26.0
"""Time for which a client that hangs keeps its connection: longer than a verifier's `silence_timeout_s` of 20."""


@dataclass(frozen=True)
class SessionJob:
    """Describe one session for a light client to run."""

    recording: int
    """Index of the recording."""
    drafted: bool = True
    """Whether the client drafts; False is plain streaming."""
    ending: Ending = "finish"
    after: int = 0
    """Tokens that are delivered before it ends otherwise than by itself."""
    rtt_ms: float | None = None
    """Round trip of its link; None for that of the ServiceAddress."""
    wrong_span: tuple[int, int] = (0, 0)
    """Positions of the output, from the first to before the second, at which the proposals are wrong."""
    seconds: float | None = None
    """Time since its beginning after which the next tokens cancel it; None for no limit."""
    ngram_only: bool = False
    """Whether a client that drafts has no model, and proposes by n-grams alone."""
    rounds: Literal["", "specedge", "ucb"] = ""
    """Scheme of a client that drafts in rounds (benchmarks.support.draft_replay.rounds)."""
    live: bool = False
    """Whether a client that drafts computes the draft's passes instead of replaying them."""
    probed: bool = False
    """Whether the outcome says what was predicted of nodes, which takes a client some CPU time."""


@dataclass
class SessionOutcome:
    """Hold the result of a session. Seconds count from its beginning, placement included."""

    tokens: int = 0
    steps: int = 0
    """Number of Commits that brought tokens."""
    evaluated: int = 0
    accepted: int = 0
    wrong: int = 0
    """Number of positions at which a token differs from the recorded output or, if it finished, is missing."""
    finish: str = ""
    """The finish: eos | length | cancelled; empty if it ended by an error or by a cut connection."""
    first_token_s: float | None = None
    seconds: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    """Milliseconds between deliveries."""
    delivered_s: list[float] = field(default_factory=list)
    """When each token arrived, on the clock that all processes of a machine share."""
    refused_s: list[float] = field(default_factory=list)
    """Seconds from an attach, or from the request for a place, to its refusal as Overloaded."""
    wire_up: int = 0
    """Bytes on its own link, HTTP/2 included; 0 if it has no link of its own."""
    wire_down: int = 0
    appends: int = 0
    """Number of Appends with nodes, or with the statement that none follow."""
    error: str = ""
    """Class name and message of the error."""
    asked: int = 0
    missed: int = 0
    """Questions to the draft, and those that the recording does not answer."""
    session_id: str = ""
    """The coordinator's session id; empty without a coordinator."""
    predicted: list[float] = field(default_factory=list)
    """Path acceptance as estimated when sent, of the first nodes whose outcome became known; empty unless probed."""
    happened: list[bool] = field(default_factory=list)
    """Whether those nodes became text."""

    @property
    def finished(self) -> bool:
        return self.finish in ("eos", "length")


class _WatchedSessions(Sessions):
    """Measure how long refusals take, and let sessions fall silent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.refused_s: list[float] = []
        self.session_id = ""
        self.dead = False
        """Whether messages are no longer sent."""

    async def place(self, *arguments: Any, **options: Any) -> Placement | None:
        began = time.monotonic()
        try:
            placement = await super().place(*arguments, **options)
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
    """Wrap the SDK's client around a loaded target bundle. There is one per session: each is a device of its own."""

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


class LiveDrafts(DraftPool):
    """Draft with the model itself."""

    def teach(self, taught: Sequence[Calibrator]) -> None:
        """Begin with the observations of a recording, as its replay does. taught: `DraftRecording.calibrators()`."""
        greedy, sampled, ngram_greedy, ngram_sampled = map(copied, taught)
        self._models[0].calibrators = (greedy, sampled)
        self._ngram_calibrators = (ngram_greedy, ngram_sampled)


class LiveClient(LightClient):
    """Load a draft as any client does, and draft with it."""

    def __init__(self, bundle: TargetBundle, draft: Path, taught: Sequence[Calibrator], **options: Any) -> None:
        super().__init__(bundle, **options)
        self._file = draft
        self._taught = taught

    async def _load_from_verifiers(self) -> TargetBundle:
        bundle = self._ready_bundle
        options = replace(self._draft_options, positions=bundle.description.max_sequence)
        drafts = await LiveDrafts.load(self._file, self._file.name, bundle.tokenizer.table, options)
        drafts.teach(self._taught)
        await drafts.warm_up()
        return replace(bundle, drafts=drafts)


class _Watched:
    """Measure how long the route takes to refuse."""

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
    """Hold addresses, emulated link and time limit of a client."""

    verifier: str
    coordinator: str = ""
    """Address of the coordinator; empty to connect to the verifier directly, without a ticket."""
    rtt_ms: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()
    """(seconds since a session began, the round trip in ms from then on)"""
    wait_s: float = 30.0
    """Time for which a session without a place goes on asking for one."""


class Player:
    """Run any number of jobs of one recording at once. Use it as an async context manager.

    release: of the draft, as in DraftPool. draft: the file of the recorded draft, for live jobs.
    """

    def __init__(
        self,
        recorded: DraftRecording,
        where: ServiceAddress,
        scratch: Path,
        release: str = "recorded",
        draft: Path | None = None,
    ) -> None:
        self._recorded = recorded
        self._release = release
        self._draft = draft
        self._taught = recorded.calibrators()
        self._where = where
        self._settings = EdgeSettings(resume_budget_s=where.wait_s, open_budget_s=where.wait_s, cache_dir=scratch)
        self._bundle: TargetBundle | None = None
        self._bandits: defaultdict[float, UcbSpecStop] = defaultdict(UcbSpecStop)
        """Round trip in ms -> the bandit of devices that choose their rounds by one; it learns over all sessions."""

    async def __aenter__(self) -> Player:
        where = self._where  # only with a ticket of its coordinator's does a verifier describe its target
        coordinator, verifier = where.coordinator or None, None if where.coordinator else where.verifier
        async with AsyncClient(
            coordinator=coordinator, verifier=verifier, draft=None, timeout=None, settings=self._settings
        ) as plain:
            self._bundle = await plain.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._bundle = None

    async def play(self, job: SessionJob) -> SessionOutcome:
        """Run a job and return its outcome, errors included.

        Raises BadRequest for an unknown recording, for a live job without the draft's file, and for a probed one that
        is live, in rounds or wrong in a span.
        """
        if not 0 <= job.recording < len(self._recorded.recordings):
            raise BadRequest.bound("recording", job.recording, f"less than {len(self._recorded.recordings)}")
        if job.probed and (job.live or job.rounds or any(job.wrong_span)):
            raise BadRequest("a probed job replays the recorded draft as it is", field="probed")
        if job.live and self._draft is None:
            raise BadRequest("a live job needs the draft's file", field="draft")
        drafts = self._drafts(job) if job.drafted and not job.live else None
        outcome = SessionOutcome()
        async with contextlib.AsyncExitStack() as stack:
            proxy = await self._proxy(stack, job)
            client = await stack.enter_async_context(self._client(job, drafts, proxy))
            await self._run(client, job, outcome, proxy)
            outcome.refused_s, outcome.session_id = client.sessions.refused_s, client.sessions.session_id
            outcome.wire_up, outcome.wire_down = (proxy.bytes_up, proxy.bytes_down) if proxy else (0, 0)
        for source in drafts.sources if drafts else ():
            outcome.asked += source.asked
            outcome.missed += source.missed
        for drafter in drafts.drafters if drafts else ():
            settled = drafter.settled if isinstance(drafter, ProbedDrafter) else []
            outcome.predicted += [round(predicted, 4) for predicted, _ in settled]
            outcome.happened += [happened for _, happened in settled]
        return outcome

    def _drafts(self, job: SessionJob) -> ReplayedDrafts:
        if job.rounds:
            rtt_ms = self._where.rtt_ms if job.rtt_ms is None else job.rtt_ms
            bandit = self._bandits[rtt_ms] if job.rounds == "ucb" else None
            drafter = partial(RoundDrafter, trip_s=rtt_ms / 1e3, bandit=bandit)
            return ReplayedDrafts(self._recorded, self._taught, release=self._release, drafter=drafter)
        if not any(job.wrong_span):
            return ReplayedDrafts(
                self._recorded,
                self._taught,
                release=self._release,
                ngram_only=job.ngram_only,
                drafter=ProbedDrafter if job.probed else Drafter,
            )
        output, vocabulary = self._recorded.recordings[job.recording].call.output, self._recorded.vocabulary

        def wrap(source: DraftSource) -> DraftSource:
            return WrongSpanSource(source, output, job.wrong_span, vocabulary)

        return ReplayedDrafts(self._recorded, self._taught, wrap=wrap, release=self._release)

    def _client(self, job: SessionJob, drafts: ReplayedDrafts | None, proxy: DelayProxy | None) -> LightClient:
        if self._bundle is None:
            raise BadRequest("the player is not open; use it as a context manager")
        where = self._where
        options: dict[str, Any] = {
            "coordinator": where.coordinator or None,
            "verifier": None if where.coordinator else where.verifier,
            "reroute": {where.verifier: proxy.address} if proxy else None,
            "settings": self._settings,
        }
        if job.drafted and job.live and self._draft is not None:
            return LiveClient(self._bundle, self._draft, self._taught, **options)
        return LightClient(replace(self._bundle, drafts=drafts), **options)

    async def _proxy(self, stack: contextlib.AsyncExitStack, job: SessionJob) -> DelayProxy | None:
        """Return a link of the session's own if it is delayed or will be cut, else None."""
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
        await client.prepare()  # a draft is loaded before the request
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
        if job.drafted and job.live and self._draft is not None and measured.draft != self._draft.name:
            why = f"drafted with {measured.draft or 'nothing'} at the end: {measured.draft_failure}"
            outcome.error = outcome.error or why
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
    """Count the positions at which `got` differs from `expected`. whole: a difference in length counts too."""
    wrong = sum(a != b for a, b in zip(got, expected, strict=False))
    surplus = len(got) - len(expected)
    return wrong + (abs(surplus) if whole else max(0, surplus))


def options_of(call: RecordedRequest) -> Options:
    """Return the options of the recorded request for the SDK."""
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
