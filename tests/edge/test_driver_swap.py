"""Test another draft in mid-session: it takes over between two updates, or leaves everything as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fake_verifier import FakeVerifier, Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedPool, ScriptedSource, continuation, target
from test_driver import PROMPT, Run, drafting, eventually

from edge_agent.session.stream import Channels
from outrider.core.protocol.messages import SessionLimits

TOKENS = 240
OLD, NEW = "a" * 64, "b" * 64


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(Script(target, step_s=0.003)) as running:
        yield running


async def begun(run: Run, at: int = 20) -> asyncio.Task[list[int]]:
    reading = asyncio.create_task(run.tokens_of())
    await eventually(lambda: len(run.session.received) >= at)
    return reading


async def test_it_takes_over_when_it_has_read_the_sequence(verifier: FakeVerifier, channels: Channels) -> None:
    async with (
        drafting(ScriptedSource(0.2, 0.0005)) as old,
        drafting(ScriptedSource(1.0, 0.0005), NEW, "the new one") as new,
    ):
        run = Run(verifier, channels, old, tokens=TOKENS)
        reading = await begun(run)
        await run.draft.change_to(new)
        await eventually(lambda: run.draft.pool is new)
        accepted = run.statistics.accepted
        assert len(run.session.received) < TOKENS
        assert await reading == continuation(PROMPT, TOKENS)
        assert (old.returned, new.returned) == (1, 1)
        assert len(run.statistics.swaps_s) == 1 and run.statistics.swaps_s[0] >= 0.0
        assert (run.statistics.draft, run.statistics.release) == ("the new one", NEW)
        assert [release for _, _, release in verifier.in_use] == [NEW]
        assert run.statistics.attaches == 1  # a node too many, or one that hangs nowhere, would have ended the stream
        assert run.statistics.accepted > accepted


async def test_after_a_break_what_survived_is_sent_before_the_new_one_is_announced(channels: Channels) -> None:
    script = Script(target, step_s=0.05)
    async with (
        FakeVerifier(script) as verifier,
        drafting(ScriptedSource(1.0, 0.0005)) as old,
        drafting(ScriptedSource(1.0, 0.0005), NEW) as new,
    ):
        run = Run(verifier, channels, old, tokens=TOKENS)
        reading = await begun(run, 5)
        await run.draft.change_to(new)
        await eventually(lambda: run.draft.pool is new and len(run.session.tree) > 0)
        verifier.drop_streams()
        await eventually(lambda: len(verifier.in_use) >= 2)
        epoch = run.session.epoch
        assert [kind for at, kind in verifier.said if at == epoch][:2] == ["append", "draft"]
        assert await reading == continuation(PROMPT, TOKENS)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    swaps=st.lists(st.tuples(st.integers(1, 60), st.floats(0.0, 1.0)), min_size=1, max_size=4),
    limits=st.sampled_from([SessionLimits(), SessionLimits(nodes=6, depth=4, in_flight=8, run_ahead=8)]),
    drops=st.booleans(),
)
def test_however_often_it_is_replaced_no_token_is_lost(
    swaps: list[tuple[int, float]], limits: SessionLimits, drops: bool
) -> None:
    tokens, returned = asyncio.run(_replaced(swaps, limits, drops))
    assert tokens == continuation(PROMPT, TOKENS)
    assert returned == [1] * len(returned)  # each worker is given back once


async def _replaced(swaps: list[tuple[int, float]], limits: SessionLimits, drops: bool) -> tuple[list[int], list[int]]:
    """Return the output, and how often each draft's worker was returned."""
    channels = Channels(None, insecure=False)
    async with (
        FakeVerifier(Script(target, step_s=0.001, limits=limits)) as verifier,
        drafting(ScriptedSource(0.7)) as first,
    ):
        run = Run(verifier, channels, first, tokens=TOKENS, budget_s=20.0)
        reading = asyncio.create_task(run.tokens_of())
        pools = [first]
        at = 0
        for after, quality in swaps:
            at += after
            await eventually(lambda: len(run.session.received) >= min(at, TOKENS), within_s=20.0)  # noqa: B023
            pools.append(ScriptedPool(ScriptedSource(quality), NEW))
            await run.draft.change_to(pools[-1])
            if drops:
                verifier.drop_streams()
        tokens = await reading
        for pool in pools[1:]:
            await pool.close()
    await channels.close()
    return tokens, [pool.returned for pool in pools]
