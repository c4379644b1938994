"""Test that `outrider up` starts verifiers side by side, and ends all of them where one fails."""

from __future__ import annotations

import asyncio
import os

import pytest

from coordinator import cluster as cluster_module
from coordinator.cli import local
from coordinator.cluster import Child, Cluster
from outrider.core.errors import Unavailable

FAKE = """
echo $$ > "$1/$0"
until [ "$(ls "$1" | wc -l)" -eq 2 ]; do sleep 0.01; done
[ "$0" != verifier-1 ] || exit 7
exec sleep 60
"""
"""Of two verifiers that wait in a folder until both have begun, the first fails."""


@pytest.fixture(autouse=True)
def untied(monkeypatch) -> None:
    """Start children without the interpreter that ties them to this process."""
    monkeypatch.setattr(cluster_module, "tied_to_this_process", list)


async def test_where_one_of_several_verifiers_fails_the_others_are_stopped(tmp_path, monkeypatch) -> None:
    start = Child.start

    async def fake(name, command, **given) -> Child:
        return await start(name, ["sh", "-c", FAKE, name, command[-1]], **given)

    monkeypatch.setattr(Child, "start", fake)
    async with Cluster(on_log=local._print_log, start_timeout_s=120.0) as running:
        with pytest.raises(Unavailable, match="verifier-1 ended with exit code 7 before it was ready"):
            await local._start_verifiers(running, 2, str(tmp_path))
        assert running.verifiers == []
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "verifier-2").read_text()), 0)


async def test_a_child_may_write_more_than_a_line_holds_and_is_stopped_in_order(monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_LINE", 1_000)
    script = "echo listening on a:1; printf '%0200000d\\n' 0; printf '%02000d\\n' 0 >&2"
    child = await Child.start("loud", ["sh", "-c", script], on_log=lambda *_: None)
    assert await asyncio.wait_for(child.wait(), 60.0) == 0
    await child.stop()
