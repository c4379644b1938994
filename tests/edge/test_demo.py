"""Test the part of `outrider demo` in which a text outlives the verifier that serves it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier
from reciter import recital

from edge_agent import AsyncClient
from edge_agent.demo import outlived


@pytest.mark.parametrize("same", [True, False])
async def test_a_text_goes_on_where_its_verifier_is_killed_and_what_differs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    scripts = recital(), recital() if same else recital(text="Another text.")
    for script in scripts:
        script.step_s = 0.002  # 0.3 s for a text
    ends: list[asyncio.Task[None]] = []
    async with (
        FakeVerifier(scripts[0], "one") as one,
        FakeVerifier(scripts[1], "two") as two,
        FakeCoordinator(one, two) as coordinator,
        AsyncClient(coordinator=coordinator.address, cache_dir=tmp_path, draft=None) as client,
    ):
        status = await outlived(client, lambda address: ends.append(asyncio.create_task(one.kill())))
        await asyncio.gather(*ends)
        said = capsys.readouterr().out
        assert len(ends) == 1 and said.count("(kill -9)") == 2
        assert f"verifier {one.address} was killed (kill -9), {two.address} went on: pause " in said
        assert f"identical: {'yes' if same else 'NO'}" in said and status == int(not same)
