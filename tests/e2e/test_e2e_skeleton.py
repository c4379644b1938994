"""Test skeletons on a whole system: the small target's outline by its grammar, and its prefix cache."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from system import System

from edge_agent import AsyncClient
from outrider.core.errors import TimedOut

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ASKED = [{"role": "user", "content": "Write a Python function `mean`. Return the mean of a list of numbers."}]
OPTIONS = {"points": 4, "max_tokens": 24, "temperature": 0.8, "seed": 5}
HITS, HIT_TOKENS = "outrider_prefix_cache_hits_total", "outrider_prefix_cache_hit_tokens_total"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> AsyncIterator[System]:
    """Return a system whose one verifier serves metrics, so that its prefix cache can be watched."""
    async with System(tmp_path_factory.mktemp("skeleton"), pair, "--metrics", "0", count=1) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(one: System) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator=one.cluster.address, cache_dir=one.folder / "cache") as made:
        await made.prepare()
        yield made


def sample(one: System, name: str) -> float:
    """Return a counter of the verifier."""
    log = (one.folder / "logs" / "verifier-1.log").read_text()
    url = next(line for line in log.splitlines() if "metrics at " in line).partition("metrics at ")[2].split()[0]
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[-1])


async def until_counted(one: System, name: str, least: float) -> float:
    """Return a counter once it has grown to `least`: the engine sends its counts four times a second."""
    give_up = time.monotonic() + 10
    while (value := await asyncio.to_thread(sample, one, name)) < least:
        assert time.monotonic() < give_up, (name, value, least)
        await asyncio.sleep(0.1)
    return value


async def test_points_share_the_prefix_that_the_outline_computed(one: System, client: AsyncClient) -> None:
    await one.settled()
    hits, tokens = sample(one, HITS), sample(one, HIT_TOKENS)
    skeleton = await client.skeleton(ASKED, **OPTIONS)
    count = len(skeleton.points)
    assert 1 <= count <= 4 and skeleton.verified
    shared = skeleton.outline.usage.prompt_tokens
    # A cache holds what is in front of the last token, and the assistant's turn begins with that.
    await until_counted(one, HITS, hits + count)
    await until_counted(one, HIT_TOKENS, tokens + count * (shared - 2))
    lines = skeleton.outline.text.splitlines()
    assert [f"{point.number}. {point.title}" for point in skeleton.points] == [line.strip() for line in lines]
    assert [skeleton.text.index(f"{point.text}") for point in skeleton.points] == sorted(
        skeleton.text.index(point.text) for point in skeleton.points
    )


async def test_a_seed_gives_the_same_skeleton_whatever_runs_side_by_side(one: System, client: AsyncClient) -> None:
    together = await client.skeleton(ASKED, parallel=4, **OPTIONS)
    apart = await client.skeleton(ASKED, parallel=1, **OPTIONS)
    assert together.outline.token_ids == apart.outline.token_ids
    assert [p.completion.token_ids for p in together.points] == [p.completion.token_ids for p in apart.points]


async def test_a_skeleton_that_runs_out_of_time_leaves_no_session(one: System, client: AsyncClient) -> None:
    with pytest.raises(TimedOut):
        await client.skeleton(ASKED, **{**OPTIONS, "max_tokens": 1500, "ignore_eos": True, "timeout": 2.0})
    await one.settled()


async def test_leaving_after_the_first_point_leaves_no_session(one: System, client: AsyncClient) -> None:
    async with await client.stream_skeleton(ASKED, **{**OPTIONS, "parallel": 2}) as stream:
        assert (await stream.next()) is not None
    await one.settled()
    assert len(stream.skeleton.points) == 1
