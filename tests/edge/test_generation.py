"""Test a request's options for time limits, retries and offline generation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_verifier import FakeVerifier
from reciter import TEXT
from scripted import tokenizer_json

from edge_agent import AsyncClient, EdgeSettings, Statistics, Timeout
from edge_agent.metrics import EdgeMetrics
from edge_agent.sdk import generation, request, sessions
from edge_agent.sdk.generation import CompletionStream, Deadline
from edge_agent.sdk.request import Request
from edge_agent.sdk.sessions import DeliverySource
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import TOO_LONG, BadRequest, InternalError, Overloaded, TimedOut, Unavailable
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Finish
from outrider.wire.v1 import session_pb2 as pb


@pytest.fixture
def edge_settings(give_up_after: Callable[[float], None]) -> EdgeSettings:
    give_up_after(1.0)
    return EdgeSettings()


# --- how long it may take


async def test_loading_for_the_first_time_goes_on_where_a_request_has_run_out_of_time(
    verifier: FakeVerifier, tmp_path: Path
) -> None:
    verifier.script.chunk_bytes = 20_000
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, timeout=0.001) as client:
        with pytest.raises(TimedOut):
            await client.generate("x", max_tokens=3)
        completion = await client.generate("x", max_tokens=3, timeout=30.0)
        assert completion.usage.completion_tokens == 3
    assert len(verifier.fetches) == 3  # tokenizer, template and draft: once each


async def test_a_timeout_of_the_bodys_own_is_not_the_requests() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(Timeout(5.0, 5.0)).enforced(first_token=True):
            raise TimeoutError


# --- other tries


class ScriptedSessions:
    """Run sessions of which so many fail, each after so many tokens; the draft model could write alone."""

    def __init__(self, times: int, error: Exception, *, after: int = 0, within_s: float = 30.0) -> None:
        self.open_budget_s = within_s
        draft = SimpleNamespace(name="", release="", has_model=True)
        self.drafts = SimpleNamespace(draft=draft, generate_offline=self.alone)
        self.tries = 0
        self._times = times
        self._error = error
        self._after = after

    @contextlib.asynccontextmanager
    async def slot(self, statistics: Statistics, finish: Callable[[], str]) -> AsyncIterator[None]:
        with EdgeMetrics().following(statistics, finish):
            yield

    def open(self, session: DeviceSession, *_: object) -> DeliverySource:
        self.tries += 1
        return contextlib.aclosing(self._deliveries(session, failing=self.tries <= self._times))

    async def _deliveries(self, session: DeviceSession | None, *, failing: bool) -> AsyncGenerator[Delivery, None]:
        for token in range(self._after if failing else 3):
            if session is not None:
                session.received.append(token)
            yield Delivery((token,), (False,), (False,), (), Finish.NONE)
        if failing:
            raise self._error

    def alone(self, *_: object) -> AsyncGenerator[Delivery, None]:
        return self._deliveries(None, failing=False)


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> TargetBundle:
    """Return a target for scripted sessions, with short pauses between tries."""
    monkeypatch.setattr(generation, "_FIRST_PAUSE_S", 0.01)
    tokenizer = TargetTokenizer(tokenizer_json())
    description = pb.DescribeResponse(target=pb.TargetIdentity(name="fake"), vocabulary_size=len(tokenizer.table))
    return TargetBundle(description, tokenizer, None, None)


async def tokens_of(sessions: ScriptedSessions, bundle: TargetBundle, request: Request) -> list[tuple[int, ...]]:
    asked = CompletionStream(sessions, bundle, request, [1], Deadline(Timeout()))  # type: ignore[arg-type]
    return [chunk.token_ids async for chunk in asked]


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("full", retry_after_s=0.0), InternalError("broken")])
async def test_a_request_begins_again_as_often_as_its_budget_says(bundle: TargetBundle, error: Exception) -> None:
    sessions = ScriptedSessions(2, error)
    assert await tokens_of(sessions, bundle, Request.of(retries=2)) == [(0,), (1,), (2,)]
    assert sessions.tries == 3
    sessions = ScriptedSessions(2, error)
    with pytest.raises(type(error)):
        await tokens_of(sessions, bundle, Request.of(retries=1))
    assert sessions.tries == 2


@pytest.mark.parametrize(
    ("error", "after", "within_s"),
    [(BadRequest("wrong"), 0, 30.0), (Unavailable("gone"), 1, 30.0), (Unavailable("gone"), 0, 0.0)],
)
async def test_it_does_not_begin_again_for_nothing_nor_after_a_token_nor_too_late(
    bundle: TargetBundle, error: Exception, after: int, within_s: float
) -> None:
    sessions = ScriptedSessions(9, error, after=after, within_s=within_s)
    with pytest.raises(type(error)):
        await tokens_of(sessions, bundle, Request.of(retries=5))
    assert sessions.tries == 1


@pytest.mark.parametrize(
    ("error", "tried"),
    [(Unavailable("gone"), 1), (Overloaded("full", retry_after_s=0.0), 3), (InternalError("broken"), 3)],
)
async def test_where_the_draft_may_write_alone_only_verifiers_that_are_there_are_asked_again(
    bundle: TargetBundle, error: Exception, tried: int
) -> None:
    sessions = ScriptedSessions(2, error)
    request = Request.of(retries=2, offline="draft_only")
    assert await tokens_of(sessions, bundle, request) == [(0,), (1,), (2,)]
    assert sessions.tries == tried


# --- without a verifier


async def test_a_new_client_writes_alone_with_what_an_earlier_one_has_fetched(
    client: AsyncClient, verifier: FakeVerifier, tmp_path: Path
) -> None:
    await client.prepare()
    await verifier.kill()
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, offline="draft_only") as later:
        completion = await later.generate("x", max_tokens=5)
        assert not completion.verified and completion.usage.completion_tokens == 5
        await verifier.start(verifier.address)
        for _ in range(50):  # the connection's own back-off
            completion = await later.generate("x", max_tokens=5)
            if completion.verified:
                break
        assert completion.verified and completion.text == TEXT[: len(completion.text)]


# --- without max_tokens


async def test_an_answer_without_max_tokens_goes_on_until_the_target_holds_no_more(
    client: AsyncClient, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "OPEN_END", 30)
    verifier.script.max_sequence = 200
    whole = await client.generate("x", max_tokens=1000, logprobs=1, prompt_logprobs=0)
    first, left = verifier.opens[-1].attach, 200 - whole.usage.prompt_tokens
    assert first.max_tokens == len(whole.token_ids) == left
    del verifier.opens[:]
    completion = await client.generate("x", max_tokens=None, min_tokens=120, logprobs=1, prompt_logprobs=0)
    assert [opening.attach.max_tokens for opening in verifier.opens] == [50, 100, 150, left]  # each in its turn
    assert [opening.attach.min_tokens for opening in verifier.opens] == [50, 100, 120, 120]
    assert len({opening.session_id for opening in verifier.opens}) == 4
    assert (completion.token_ids, completion.text, completion.finish_reason) == (whole.token_ids, whole.text, "length")
    assert completion.logprobs == whole.logprobs and completion.prompt_logprobs == whole.prompt_logprobs
    assert completion.statistics.drafted > 0


def test_a_deadline_tells_what_there_is_time_for() -> None:
    now = iter((10.0, 40.0, 40.0))
    deadline = Deadline(Timeout(total=90.0), lambda: next(now))
    assert deadline.allows(3.0) and not deadline.allows(3.1)
    assert Deadline(Timeout(total=None)).allows(1e9)


@pytest.mark.parametrize("lacking", ["room", "time"])
async def test_an_answer_ends_where_no_verifier_has_room_for_more_of_it_or_its_time_does_not_suffice(
    client: AsyncClient, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(request, "OPEN_END", 30)
    verifier.script.max_sequence = 200
    stream = await client.stream("x", max_tokens=None)
    await stream.next()
    if lacking == "room":
        verifier.script.refuse = Overloaded("no room", retry_after_s=0.1)
    else:
        monkeypatch.setattr(Deadline, "allows", lambda self, times: False)
    completion = await stream.drain()
    assert (len(completion.token_ids), completion.finish_reason) == (50, "length")
    verifier.script.refuse = None
    assert completion.text == (await client.generate("x", max_tokens=50)).text


async def test_a_prompt_is_scored_alone(client: AsyncClient) -> None:
    completion = await client.generate("words of x", max_tokens=0, prompt_logprobs=0)
    assert (completion.token_ids, completion.finish_reason) == ((), "length")
    assert completion.prompt_logprobs is not None


async def test_an_answer_that_a_verifier_has_begun_waits_longer_for_one_before_the_draft_goes_on_with_it(
    client: AsyncClient, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.prepare()
    monkeypatch.setattr(sessions, "OFFLINE_AFTER_S", 0.0)
    monkeypatch.setattr(sessions, "OFFLINE_IN_ANSWER_S", 60.0)
    client._sessions.resume_budget_s = 60.0
    stream = await client.stream("x", max_tokens=300, offline="draft_only")
    await stream.next()
    verifier.script.refuse = Unavailable("gone")
    verifier.drop_streams()
    begun = len(verifier.opens)
    draining = asyncio.create_task(stream.drain())
    for _ in range(2000):
        if len(verifier.opens) >= begun + 4 or draining.done():
            break
        await asyncio.sleep(0.01)
    verifier.script.refuse = None
    completion = await draining
    assert completion.verified and len(completion.token_ids) == 300


async def test_a_text_too_long_for_the_draft_is_refused_offline_by_the_field_that_names_one_too_long_for_the_target(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.prepare()
    with pytest.raises(BadRequest) as online:
        await client.generate([65] * 9000, max_tokens=5)
    await verifier.kill()
    with pytest.raises(BadRequest) as offline:
        await client.generate([65] * 600, max_tokens=5, offline="draft_only")
    assert online.value.field == offline.value.field == TOO_LONG


async def test_an_answer_that_may_be_written_offline_goes_on_so_where_a_further_part_finds_no_verifier(
    client: AsyncClient, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "OPEN_END", 30)
    verifier.script.max_sequence = 200
    stream = await client.stream("x", max_tokens=None, offline="draft_only")
    await stream.next()
    verifier.script.refuse = Unavailable("gone")
    completion = await stream.drain()
    assert len(completion.token_ids) > 50 and not completion.verified
