"""Test the session driver against a real stream: no token is lost or doubled, whatever the draft and the network do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import ScriptedDraft, ScriptedPool, ScriptedSource, continuation, target
from session_messages import attach, directive

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.pool import DraftPool
from edge_agent.session import stream
from edge_agent.session.channels import Channels
from edge_agent.session.driver import SessionDriver
from edge_agent.session.failover import Route
from edge_agent.session.statistics import Statistics
from outrider.core.backoff import Backoff
from outrider.core.errors import ModelRefused, ProtocolViolation
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import SessionLimits

PROMPT = (1, 2, 3)
PATIENT = directive(draft_wait_ms=10_000, step_ms=2.0)
"""A verifier that waits for nodes, however late a busy machine drafts them."""


@dataclass
class Run:
    """Run one session on one verifier."""

    verifier: FakeVerifier
    channels: Channels
    pool: ScriptedPool | None = None
    tokens: int = 60
    budget_s: float = 5.0

    def __post_init__(self) -> None:
        self.session = DeviceSession(attach(0, PROMPT, max_tokens=self.tokens))
        self.statistics = Statistics(session_id="session")
        pool = self.pool
        self.draft = DraftSession(self.session, DraftPool(2)) if pool is None else pool.begin(self.session)
        self.driver = SessionDriver(
            self.session,
            self.draft,
            Route.direct(self.verifier.address, Backoff(self.budget_s)),
            self.channels,
            self.statistics,
        )

    async def tokens_of(self, *, until: int | None = None) -> list[int]:
        """Return the tokens delivered, up to `until`, where the session is cancelled."""
        got: list[int] = []
        async with aclosing(self.driver.deliveries()) as deliveries:
            async for delivery in deliveries:
                got += delivery.tokens
                if until is not None and len(got) >= until:
                    break
        assert self.driver.winding_down is not None
        await self.driver.winding_down
        return got


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 20.0)  # a busy machine's heartbeats come late


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(Script(target)) as running:
        yield running


@asynccontextmanager
async def drafting(source: ScriptedSource) -> AsyncIterator[ScriptedPool]:
    pool = ScriptedPool(ScriptedDraft(source))
    try:
        yield pool
    finally:
        await pool.close()


async def eventually(condition: object, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
async def test_the_draft_changes_how_fast_the_tokens_come_and_nothing_else(
    verifier: FakeVerifier, channels: Channels, quality: float
) -> None:
    verifier.script.directive = PATIENT
    async with drafting(ScriptedSource(quality, 0.0005)) as draft:
        run = Run(verifier, channels, draft, tokens=120)
        assert await run.tokens_of() == continuation(PROMPT, 120)
        if quality == 1.0:
            assert run.statistics.tokens_per_step > 1.5
            assert run.statistics.accepted >= 120 - run.statistics.steps  # a step adds one token of the target's own


async def test_a_draft_that_breaks_leaves_a_session_that_streams_on(verifier: FakeVerifier, channels: Channels) -> None:
    async with drafting(ScriptedSource(1.0, 0.0005, raises_after=12)) as draft:
        run = Run(verifier, channels, draft, tokens=100)
        assert await run.tokens_of() == continuation(PROMPT, 100)
        assert "the draft broke" in run.statistics.draft_failure
        verifier.script.directive = PATIENT
        again = Run(verifier, channels, draft, tokens=40)  # the worker itself is fine
        again.statistics.session_id = "another"
        assert await again.tokens_of() == continuation(PROMPT, 40)
        assert again.statistics.accepted > 0


async def test_what_cannot_be_mended_is_raised_at_once(verifier: FakeVerifier, channels: Channels) -> None:
    verifier.script.refuse = ModelRefused("not this one")
    with pytest.raises(ModelRefused, match="not this one"):
        await Run(verifier, channels).tokens_of()
    assert len(verifier.opens) == 1


async def test_a_committed_id_beyond_the_vocabulary_ends_in_an_error(channels: Channels) -> None:
    async with FakeVerifier(Script(lambda _: 97, vocabulary_size=97)) as verifier:
        run = Run(verifier, channels)
        with pytest.raises(ProtocolViolation, match="is 97, must be less than 97"):
            await run.tokens_of()
        assert run.session.received == []


async def test_the_verifiers_knowledge_of_our_base_keeps_to_rule_5(channels: Channels) -> None:
    """Commits that leave nodes in the tree are not all answered; their receipt is reported in time all the same."""
    limits = SessionLimits(run_ahead=8)
    async with (
        FakeVerifier(Script(target, step_s=0.004, limits=limits)) as verifier,
        drafting(ScriptedSource(1.0, 0.02)) as draft,
    ):
        run = Run(verifier, channels, draft, tokens=100)
        behind: list[int] = []
        flush = run.driver._pacing.flush

        def watched(*plan: SpeculationPlan) -> None:
            flush(*plan)
            if run.driver._pacing.is_open and not run.session.finished:
                behind.append(len(run.session.received) - run.session._last_base)

        run.driver._pacing.flush = watched  # type: ignore[method-assign]
        assert await run.tokens_of() == continuation(PROMPT, 100)
        assert behind and max(behind) < limits.run_ahead // 2


async def test_after_a_break_what_survived_is_sent_before_another_draft_is_announced(channels: Channels) -> None:
    async with (
        FakeVerifier(Script(target, step_s=0.05)) as verifier,
        drafting(ScriptedSource(1.0, 0.0005)) as pool,
    ):
        old, new = pool.draft, ScriptedDraft(ScriptedSource(1.0, 0.0005), "b" * 64)
        run = Run(verifier, channels, pool, tokens=1000)
        reading = asyncio.create_task(run.tokens_of())
        await eventually(lambda: len(run.session.received) >= 5)
        await run.draft.change_to(new)
        await eventually(lambda: len(verifier.in_use) == 1 and len(run.session.tree) > 12)  # more than a step commits
        verifier.script.step_s = 0.001  # the rest may come soon
        verifier.drop_streams()
        await eventually(lambda: len(verifier.in_use) >= 2)
        epoch = run.session.epoch
        assert [kind for at, kind in verifier.said if at == epoch][:2] == ["append", "draft"]
        assert await reading == continuation(PROMPT, 1000)
        assert isinstance(old, ScriptedDraft)
        assert (old.returned, new.returned) == (1, 1) and len(run.statistics.swaps_s) == 1
        await pool.free(new)
