"""Test where a session goes next, and that no token is lost or doubled on the way."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import ScriptedPool, ScriptedSource, continuation, target

from edge_agent.session.driver import DriverOptions, SessionDriver
from edge_agent.session.failover import DirectRoute, GrantRoute, NextAttach, next_attach
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import Channels, VerifierSilent
from outrider.core import errors
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError, Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.codecs import limits_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb

PROMPT = (4, 5, 6)
LIMITS = SessionLimits(nodes=20, depth=10, in_flight=40, run_ahead=16)


def grant(name: str, address: str, first: int, last: int) -> pb.Grant:
    limits = limits_to_proto(LIMITS)
    return pb.Grant(
        verifier_id=name, address=address, ticket=b"ticket", limits=limits, epoch_first=first, epoch_last=last
    )


class Coordinator:
    """Answer resume with the given results, one after another; an error is raised."""

    def __init__(self, *answers: Sequence[pb.Grant] | OutriderError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[tuple[str, ...], int]] = []

    async def resume(self, ticket: bytes, failed: Sequence[str], last_epoch: int) -> Sequence[pb.Grant]:
        self.asked.append((tuple(failed), last_epoch))
        answer = self.answers.pop(0)
        if isinstance(answer, OutriderError):
            raise answer
        return answer


def quick(budget_s: float = 5.0) -> Backoff:
    return Backoff(budget_s, draw=lambda: 0.0)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (Unavailable("reset"), NextAttach.SAME),
        (errors.Draining("about to end"), NextAttach.OTHER),
        (errors.Fenced("old"), NextAttach.SAME),
        (VerifierSilent("hung"), NextAttach.OTHER),
        (errors.Overloaded("full"), NextAttach.OTHER),
        (errors.InternalError("bug"), NextAttach.OTHER),
        (errors.Unauthenticated("expired"), NextAttach.OTHER),
        (errors.ProtocolViolation("gap"), NextAttach.NONE),
        (errors.VocabularyMismatch("other"), NextAttach.NONE),
        (errors.PermissionDenied("another verifier's ticket"), NextAttach.OTHER),
        (errors.ModelRefused("no"), NextAttach.NONE),
    ],
)
def test_an_error_says_where_another_attach_may_help(error: OutriderError, where: NextAttach) -> None:
    assert next_attach(error) is where


async def test_a_broken_stream_is_tried_once_more_and_then_the_standby() -> None:
    route = GrantRoute([grant("a", "h:1", 10, 19), grant("b", "h:2", 20, 29)], Coordinator().resume, quick())
    attaches = [await route.next()]
    for _ in range(2):
        route.failed(Unavailable("reset"), progressed=False)
        attaches.append(await route.next())
    assert [(attach.address, attach.epoch) for attach in attaches] == [("h:1", 10), ("h:1", 11), ("h:2", 20)]
    assert attaches[0].limits == LIMITS


async def test_with_no_grant_left_the_coordinator_is_asked_until_it_answers() -> None:
    coordinator = Coordinator(Unavailable("restarting"), [], [grant("c", "h:3", 40, 49)])
    route = GrantRoute([grant("a", "h:1", 10, 19)], coordinator.resume, quick())
    await route.next()
    route.failed(VerifierSilent("hung"), progressed=False)
    attach = await route.next()
    assert (attach.address, attach.epoch) == ("h:3", 40)
    assert coordinator.asked[0] == (("a",), 10)


async def test_epochs_only_grow_and_stay_within_their_grant() -> None:
    coordinator = Coordinator([grant("a", "h:1", 12, 13)])
    route = GrantRoute([grant("a", "h:1", 10, 11)], coordinator.resume, quick())
    epochs = []
    for _ in range(4):
        epochs.append((await route.next()).epoch)
        route.failed(Unavailable("reset"), progressed=True)
    assert epochs == [10, 11, 12, 13]


async def test_an_overloaded_verifier_is_left_alone_for_as_long_as_it_asked() -> None:
    route = DirectRoute("h:1", quick())
    await route.next()
    route.failed(errors.Overloaded("full", retry_after_s=0.3), progressed=False)
    begun = time.monotonic()
    await route.next()
    assert time.monotonic() - begun >= 0.3


async def test_a_grant_tells_the_limits_and_a_verifier_alone_does_not() -> None:
    route = GrantRoute((grant("a", "h:1", 10, 19),), Coordinator().resume, quick())
    assert (await route.next()).limits == LIMITS
    assert (await DirectRoute("h:1", quick()).next()).limits is None


# --- on sockets


class Pair:
    """Hold two verifiers, a session that may use both, and a draft of quality .8."""

    def __init__(self, first: FakeVerifier, second: FakeVerifier, channels: Channels, tokens: int) -> None:
        self.first, self.second = first, second
        self.session = DeviceSession(PROMPT, max_tokens=tokens)
        self.statistics = Statistics()
        self.pool = ScriptedPool(ScriptedSource(0.8, 0.0005))
        self.coordinator = Coordinator([grant("a", first.address, 300, 399)])
        given = [grant("a", first.address, 100, 199), grant("b", second.address, 200, 299)]
        self.driver = SessionDriver(
            self.session,
            self.pool.draft(self.session),
            GrantRoute(given, self.coordinator.resume, quick()),
            lambda attach: channels.get(attach.address, tls=attach.tls),
            DriverOptions("s", silence_s=0.4),
            self.statistics,
        )

    async def run(self) -> list[int]:
        got: list[int] = []
        async with aclosing(self.driver.deliveries()) as deliveries:
            async for delivery in deliveries:
                got += delivery.tokens
        assert self.driver.winding_down is not None
        await self.driver.winding_down
        return got

    async def until(self, received: int) -> None:
        deadline = time.monotonic() + 5.0
        while len(self.session.received) < received:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)


@asynccontextmanager
async def opened_pair(step_s: float, tokens: int) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        script = Script(target, step_s=step_s, limits=LIMITS)
        first = await stack.enter_async_context(FakeVerifier(script, "a"))
        second = await stack.enter_async_context(FakeVerifier(script, "b"))
        channels = Channels(None, insecure=False)
        stack.push_async_callback(channels.close)
        made = Pair(first, second, channels, tokens)
        stack.push_async_callback(made.pool.close)
        yield made


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with opened_pair(step_s=0.004, tokens=250) as made:
        yield made


async def test_a_killed_verifiers_session_goes_on_at_the_standby(pair: Pair) -> None:
    reading = asyncio.create_task(pair.run())
    await pair.until(60)
    await pair.first.kill()
    assert await reading == continuation(PROMPT, 250)
    assert not pair.coordinator.asked  # it may be down
    assert pair.second.opens[0].attach.epoch >= 200


async def test_a_hung_verifiers_session_goes_on_at_the_standby_and_its_late_commits_change_nothing(pair: Pair) -> None:
    reading = asyncio.create_task(pair.run())
    await pair.until(60)
    pair.first.freeze()
    await pair.until(150)
    pair.first.frozen = False  # the zombie wakes and commits in its old epoch
    assert await reading == continuation(PROMPT, 250)
    assert pair.second.opens


async def test_when_the_standby_dies_too_the_coordinator_names_another(pair: Pair) -> None:
    reading = asyncio.create_task(pair.run())
    await pair.until(50)
    pair.first.freeze()
    await pair.until(120)
    pair.first.frozen = False
    await pair.second.kill()
    assert await reading == continuation(PROMPT, 250)
    assert pair.coordinator.asked[0][0] == ("a", "b")
    assert pair.first.opens[-1].attach.epoch >= 300


async def test_random_kills_lose_nothing_and_double_nothing() -> None:
    """Sessions meet both ways to die, at several points."""
    for round_ in range(10 if os.environ.get("OUTRIDER_NIGHTLY") else 4):
        async with opened_pair(step_s=0.002, tokens=120) as made:
            reading = asyncio.create_task(made.run())
            await made.until(1 + (37 * round_) % 90)
            if round_ % 2:
                await made.first.kill()
            else:
                made.first.freeze()
            assert await reading == continuation(PROMPT, 120)
