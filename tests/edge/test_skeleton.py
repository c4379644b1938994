"""Test skeletons against a scripted target behind a real socket: an outline, and its points side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_verifier import FakeVerifier
from reciter import recital, reciting
from scripted import tokenizer_json

from edge_agent import AsyncClient, EdgeSettings, SkeletonPoint
from edge_agent.sdk.generation import Deadline
from edge_agent.sdk.skeleton import titles
from edge_agent.sdk.types import Timeout
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import BadRequest, InternalError, TimedOut
from outrider.core.protocol.messages import Open
from outrider.core.protocol.verifier import VerifierSession

OUTLINE = "1. Boil the water\n2. Add the tea\n3. Wait\n"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How do I make tea?"}]
TOKENIZER = TargetTokenizer(tokenizer_json())


class Listening(FakeVerifier):
    """Refuse sessions whose prompt has one of some texts, and count how many run side by side."""

    refused: tuple[str, ...] = ()
    most = 0

    def take(self, opening: Open) -> VerifierSession:
        if any(text in prompt_of(opening) for text in self.refused):
            raise InternalError("this point is refused")
        session = super().take(opening)
        self.most = max(self.most, len(self.live))
        return session

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(6_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{len(self.live)} sessions are live, and {self.most} at most were")

    async def until_free(self) -> None:
        await self.until(lambda: not self.live)


def prompt_of(opening: Open) -> str:
    return b"".join(TOKENIZER.table[token] for token in opening.attach.prompt).decode()


def script(text: str = OUTLINE) -> Any:
    tokens = TOKENIZER.encode(f"{text}<|end|>")
    return replace(recital(), target=reciting(tokens), eos_token_ids=tokens[-1:])


@pytest.fixture
async def verifier() -> AsyncIterator[Listening]:
    async with Listening(script()) as running:
        yield running


@pytest.fixture
async def client(verifier: Listening, tmp_path: Path, edge_settings: EdgeSettings) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=edge_settings, retries=0) as made:
        yield made


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": "Tea?"}, r"messages\[0\].role is 'assistant'"),
        ({"role": "user", "content": [{"type": "text", "text": "Tea?"}]}, r"messages\[0\].content is"),
    ],
)
async def test_the_last_message_must_be_a_text_of_the_user(
    client: AsyncClient, message: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest, match=field):
        await client.skeleton([message])


async def test_a_point_that_fails_comes_with_its_error_and_the_others_continue(
    client: AsyncClient, verifier: Listening
) -> None:
    verifier.refused = ("is: 2. Add the tea",)
    stream = await client.stream_skeleton(ASKED)
    came: list[SkeletonPoint] = [point async for point in stream]
    failed = {point.number: point.error for point in came if point.error is not None}
    assert list(failed) == [2] and isinstance(failed[2], InternalError)
    assert [point.number for point in stream.skeleton.points] == [1, 2, 3]
    assert [point.text == "" for point in stream.skeleton.points] == [False, True, False]
    await verifier.until_free()


@pytest.mark.parametrize("way", ["task", "client", "timeout"])
async def test_cancelling_leaves_no_session(client: AsyncClient, verifier: Listening, way: str) -> None:
    verifier.script.step_s = 0.02
    slow = {"max_tokens": 4000, "ignore_eos": True}
    if way == "timeout":
        with pytest.raises(TimedOut):
            await client.skeleton(ASKED, timeout=1.5, **slow)  # type: ignore[arg-type]
    else:
        stream = await client.stream_skeleton(ASKED, **slow)  # type: ignore[arg-type]
        reading = asyncio.create_task(stream.drain())
        await verifier.until(lambda: verifier.most == 3)  # all points run
        if way == "task":
            reading.cancel()
        else:
            await client.close()
        await asyncio.wait({reading}, timeout=60)
        assert reading.done()
    await verifier.until_free()


async def test_a_point_that_has_begun_late_is_not_limited_by_the_time_to_a_first_token() -> None:
    now = [0.0]
    deadline = Deadline(Timeout(total=10.0, first_token=1.0), lambda: now[0])
    now[0] = 5.0
    with pytest.raises(TimedOut):
        async with deadline.enforced(first_token=True):
            await asyncio.sleep(1)
    async with deadline.after_first_token().enforced(first_token=True):
        await asyncio.sleep(0)
    now[0] = 10.0
    with pytest.raises(TimedOut, match="longer than 10 s"):
        async with deadline.after_first_token().enforced(first_token=True):
            await asyncio.sleep(1)


def test_a_title_that_the_length_cut_off_is_no_point() -> None:
    assert titles("1. Boil the water\n2. Add the", 2, cut=True) == ["Boil the water"]
