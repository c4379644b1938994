"""Test that `outrider up` starts verifiers side by side, and ends all of them where one fails."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from coordinator import cluster as cluster_module
from coordinator.cli import local
from coordinator.cluster import Child, Cluster
from outrider.core.errors import Unavailable

FAKE = """
import pathlib, sys, time
name, folder = sys.argv[2], pathlib.Path(sys.argv[3])
(folder / name).touch()
while len(list(folder.iterdir())) < 2:
    time.sleep(0.01)
if name == "verifier-1":
    sys.exit(7)
time.sleep(60)
"""


@pytest.fixture
def together(tmp_path, monkeypatch) -> Path:
    """Make a folder in which verifiers meet: each goes on once two of them have begun."""
    (tmp_path / "fake_verifier.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    folder = tmp_path / "begun"
    folder.mkdir()
    return folder


def cluster() -> Cluster:
    made = Cluster(on_log=local._print_log, start_timeout_s=30.0)
    made.verifier_module = "fake_verifier"
    return made


async def test_where_one_of_several_verifiers_fails_the_others_are_stopped(together) -> None:
    async with cluster() as running:
        with pytest.raises(Unavailable, match="verifier-1 ended with exit code 7 before it was ready"):
            await local._start_verifiers(running, 2, str(together))
        assert running.verifiers == []


async def test_a_child_may_write_more_than_a_line_holds_and_is_stopped_in_order(monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_LINE", 1_000)
    script = (
        "import sys; print('listening on a:1', flush=True); print('x' * 200_000); print('y' * 2_000, file=sys.stderr)"
    )
    child = await Child.start("loud", [sys.executable, "-c", script], on_log=lambda *_: None)
    assert await asyncio.wait_for(child.wait(), 10.0) == 0
    await child.stop()
