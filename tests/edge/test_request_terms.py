"""What a request's caller may say about time, other tries and a world without verifiers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script, until_free
from reciter import TEXT, recital

from edge_agent import AsyncClient, EdgeSettings, Timeout
from edge_agent.sdk.retry import AT_VERIFIERS, Deliveries, persistent, unless_unreachable
from edge_agent.sdk.timeout import Deadline
from outrider.core.errors import BadRequest, InternalError, NotFound, Overloaded, TimedOut, Unavailable
from outrider.core.protocol.device import Delivery
from outrider.core.protocol.messages import Finish

SETTINGS = EdgeSettings(offline_after_s=0.2, silence_s=0.5, resume_budget_s=1.0)


@pytest.fixture
def edge_settings() -> EdgeSettings:
    return SETTINGS


@pytest.fixture
def script(tiny_gguf: Path) -> Script:
    return recital(tiny_gguf)


@pytest.fixture
async def verifier(script: Script) -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(script) as running:
        yield running


# --- who wrote a token


async def test_a_guess_that_was_taken_is_the_drafts_and_each_steps_last_token_the_targets(client: AsyncClient) -> None:
    completion = await client.generate("x", max_tokens=150)
    own = completion.provenance.count("draft")
    assert own == completion.statistics.accepted > 0
    # A step brings the guesses that it took and one token of the target's; only the last one may end inside a path.
    assert completion.provenance.count("target") in (completion.statistics.steps, completion.statistics.steps - 1)
    assert completion.statistics.guessed >= own
    assert 0.0 < completion.statistics.acceptance <= 1.0


async def test_without_a_draft_all_of_it_is_the_targets(verifier: FakeVerifier, tmp_path: Path) -> None:
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None) as client:
        completion = await client.generate("x", max_tokens=40)
    assert set(completion.provenance) == {"target"} and completion.verified


async def test_a_stream_tells_of_itself_while_it_runs(client: AsyncClient, verifier: FakeVerifier) -> None:
    verifier.script.rtt_ms = 12.0
    seen = []
    stream = await client.stream("x", max_tokens=200)
    async for _ in stream:
        seen.append(stream.statistics.tokens)
    assert seen == sorted(seen) and seen[0] < seen[-1] == 200
    assert stream.statistics.rtt_ms == 12.0


# --- how long it may take


async def test_a_request_that_takes_too_long_ends_and_frees_the_verifier(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.prepare()
    verifier.script.step_s = 0.05
    begun = time.monotonic()
    with pytest.raises(TimedOut, match=r"longer than 0\.5 s") as caught:
        await client.generate("x", max_tokens=3000, timeout=0.5)
    assert time.monotonic() - begun < 1.5
    assert (caught.value.seconds, caught.value.first_token) == (0.5, False)
    await until_free(verifier)


async def test_a_first_token_that_does_not_come_ends_the_request(client: AsyncClient, verifier: FakeVerifier) -> None:
    await client.prepare()
    verifier.script.step_s = 5.0
    with pytest.raises(TimedOut, match="no token came within") as caught:
        await client.generate("x", max_tokens=3, timeout=Timeout(total=60.0, first_token=0.3))
    assert caught.value.first_token
    await until_free(verifier)


async def test_the_time_until_the_first_token_does_not_bound_the_rest(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.prepare()
    verifier.script.step_s = 0.03
    completion = await client.generate("x", max_tokens=60, timeout=Timeout(None, first_token=0.5))
    assert completion.finish_reason == "length"


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


@pytest.mark.parametrize("wrong", [0, -1.0, "1", float("nan"), Timeout(total=-1.0), Timeout(first_token=0.0), True])
def test_a_time_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(BadRequest, match="timeout"):
        AsyncClient(verifier="127.0.0.1:1", timeout=wrong)  # type: ignore[arg-type]


async def test_a_timeout_of_the_bodys_own_is_not_the_requests() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(Timeout(5.0, 5.0)).holds(first_token=True):
            raise TimeoutError


# --- other tries


def failing(times: int, error: Exception, *, after: int = 0) -> tuple[list[int], object]:
    """Tries that fail so many times, each after so many tokens."""
    tries: list[int] = []

    async def begin() -> Deliveries:
        tries.append(1)
        failed = len(tries) <= times
        for token in range(after if failed else 3):
            yield Delivery((token,), (False,), (False,), (), Finish.NONE)
        if failed:
            raise error

    return tries, begin


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("full", retry_after_s=0.0), InternalError("broken")])
async def test_a_request_begins_again_as_often_as_its_budget_says(error: Exception) -> None:
    tries, begin = failing(2, error)
    assert [d.tokens async for d in persistent(begin, 2, 30.0)] == [(0,), (1,), (2,)]  # type: ignore[arg-type]
    assert len(tries) == 3
    tries, begin = failing(2, error)
    with pytest.raises(type(error)):
        [d async for d in persistent(begin, 1, 30.0)]  # type: ignore[arg-type]
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("error", "after", "within_s"),
    [(BadRequest("wrong"), 0, 30.0), (Unavailable("gone"), 1, 30.0), (Unavailable("gone"), 0, 0.0)],
)
async def test_it_does_not_begin_again_for_nothing_nor_after_a_token_nor_too_late(
    error: Exception, after: int, within_s: float
) -> None:
    tries, begin = failing(9, error, after=after)
    with pytest.raises(type(error)):
        [d async for d in persistent(begin, 5, within_s)]  # type: ignore[arg-type]
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("error", "tried"),
    [(Unavailable("gone"), 1), (Overloaded("full", retry_after_s=0.0), 3), (InternalError("broken"), 3)],
)
async def test_where_the_draft_may_write_alone_only_verifiers_that_are_there_are_asked_again(
    error: Exception, tried: int
) -> None:
    tries, begin = failing(2, error)

    def alone(received: Sequence[int], cause: Unavailable) -> Deliveries:
        return failing(0, cause)[1]()  # type: ignore[operator, no-any-return]

    trying = unless_unreachable(persistent(begin, 2, 30.0, AT_VERIFIERS), alone)  # type: ignore[arg-type]
    assert [d.tokens async for d in trying] == [(0,), (1,), (2,)]
    assert len(tries) == tried


async def test_a_try_that_begins_again_drafts_as_the_first(verifier: FakeVerifier, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"resume_budget_s": 20.0})
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=settings) as client:
        await client.prepare()
        verifier.script.refuse = NotFound("a session that is not known yet")

        def admit() -> None:
            verifier.script.refuse = None

        asyncio.get_running_loop().call_later(0.3, admit)
        client._attempt = renamed(client._attempt)  # type: ignore[method-assign]
        completion = await client.generate("x", max_tokens=80)
    assert (TEXT * 2).startswith(completion.text) and completion.statistics.drafted > 0
    assert completion.statistics.attaches == 2


def renamed(attempt: Callable[..., Deliveries]) -> Callable[..., Deliveries]:
    """An error that no other hop mends, as one that another try does: a try is one attach then."""

    async def renaming(*args: object) -> Deliveries:
        try:
            async for delivery in attempt(*args):
                yield delivery
        except NotFound as error:
            raise InternalError(str(error)) from error

    return renaming


# --- without a verifier


async def test_without_a_verifier_a_request_fails_unless_the_draft_may_write_alone(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.prepare()
    await verifier.kill()
    with pytest.raises(Unavailable):
        await client.generate("x", max_tokens=5, retries=0)
    stream = await client.stream("x", max_tokens=20, offline="draft_only", seed=5, temperature=0.9)
    chunks = [chunk async for chunk in stream]
    assert {chunk.verified for chunk in chunks} == {False}
    completion = stream.completion
    assert not completion.verified and completion.usage.completion_tokens == 20
    assert set(completion.provenance) == {"draft"} and completion.statistics.unverified == 20
    again = await client.generate("x", max_tokens=20, offline="draft_only", seed=5, temperature=0.9)
    assert again.token_ids == completion.token_ids


async def test_a_verifier_that_goes_in_mid_sequence_leaves_its_part_verified_and_the_rest_marked(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.prepare()
    verifier.script.step_s = 0.02
    stream = await client.stream("x", max_tokens=300, offline="draft_only")
    verified: list[bool] = []
    async for chunk in stream:
        verified += [chunk.verified] * len(chunk.token_ids)
        if len(verified) > 30 and all(verified):
            await verifier.kill()
    assert len(verified) == 300 and verified == sorted(verified, reverse=True) and verified[29] and not verified[-1]
    first = verified.index(False)
    statistics = stream.completion.statistics
    assert statistics.unverified == 300 - first
    assert f"300 tokens, {300 - first} of them unverified, in {statistics.steps} steps" in statistics.summary()
    assert stream.completion.text.startswith(TEXT[:20]) and not stream.completion.verified


async def test_a_new_client_writes_alone_with_what_an_earlier_one_has_fetched(
    client: AsyncClient, verifier: FakeVerifier, tmp_path: Path
) -> None:
    await client.prepare()
    await verifier.kill()
    async with AsyncClient(
        verifier=verifier.address, cache_dir=tmp_path, settings=SETTINGS, offline="draft_only"
    ) as later:
        completion = await later.generate("x", max_tokens=5)
        assert not completion.verified and completion.usage.completion_tokens == 5
        await verifier.start(verifier.address)
        for _ in range(50):  # the connection's own back-off
            completion = await later.generate("x", max_tokens=5)
            if completion.verified:
                break
        assert completion.verified and completion.text == TEXT[: len(completion.text)]


async def test_nothing_is_written_alone_by_a_client_without_a_draft_model(
    verifier: FakeVerifier, tmp_path: Path
) -> None:
    async with AsyncClient(
        verifier=verifier.address, cache_dir=tmp_path, settings=SETTINGS, draft="lookup", offline="draft_only"
    ) as client:
        await client.prepare()
        await verifier.kill()
        with pytest.raises(Unavailable, match="no draft model"):
            await client.generate("x", max_tokens=5)


async def test_a_cluster_without_room_is_no_reason_to_write_alone(client: AsyncClient, verifier: FakeVerifier) -> None:
    await client.prepare()
    verifier.script.refuse = Overloaded("no room", retry_after_s=0.01)
    with pytest.raises(Overloaded):
        await client.generate("x", max_tokens=5, offline="draft_only")


async def test_an_unknown_policy_is_refused(client: AsyncClient) -> None:
    with pytest.raises(BadRequest, match="draft_only"):
        await client.generate("x", offline="maybe")  # type: ignore[typeddict-item]
