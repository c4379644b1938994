"""Test that `outrider up` starts verifiers side by side, with a line for each step and each verifier's own progress."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from coordinator import cluster as cluster_module
from coordinator.cli import local
from coordinator.cluster import Child, Cluster
from outrider.core.errors import Unavailable

FAKE = """
import pathlib, sys, time
name, folder, wanted = sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
(folder / name).touch()
if name == "verifier-1" and wanted > 2:
    sys.exit(7)
print("2026-11-22 18:46:08,838 verifier INFO hashing weights: 45 MB", file=sys.stderr)
print('{"process": "verifier", "message": "x"}', file=sys.stderr)
while len(list(folder.iterdir())) < wanted:
    time.sleep(0.01)
print("x" * 200_000, file=sys.stderr)  # more than a pipe holds
print("listening on 127.0.0.1:1", flush=True)
time.sleep(60)
"""


@pytest.fixture
def together(tmp_path, monkeypatch) -> Path:
    """Make a folder in which verifiers meet: each is ready once all of them have begun."""
    (tmp_path / "fake_verifier.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    folder = tmp_path / "begun"
    folder.mkdir()
    return folder


def cluster() -> Cluster:
    made = Cluster(on_log=local._print_log, start_timeout_s=30.0)
    made.verifier_module = "fake_verifier"
    return made


async def test_verifiers_load_side_by_side_and_each_says_how_far_it_is(together, capsys) -> None:
    async with cluster() as running:
        children = await local._start_verifiers(running, 2, str(together), "2")
        assert [child.name for child in children] == ["verifier-1", "verifier-2"]
    said = capsys.readouterr().err
    head, *_ = said.splitlines()
    assert head.startswith("starting 2 verifiers side by side: each imports torch") and "10 to 30 s" in head
    for name in ("verifier-1", "verifier-2"):
        assert f"{name}: 2026-11-22 18:46:08,838 verifier INFO hashing weights: 45 MB\n" in said
        assert re.search(rf"^{name} is ready at 127\.0\.0\.1:1 after \d+ s$", said, re.MULTILINE)
    assert said.count("x" * 200_000 + "\n") == 2


async def test_where_one_verifier_fails_the_others_are_stopped(together) -> None:
    async with cluster() as running:
        with pytest.raises(Unavailable, match="verifier-1 ended with exit code 7 before it was ready"):
            await local._start_verifiers(running, 2, str(together), "3")
        assert running.verifiers == []


async def test_a_child_may_write_more_than_a_line_holds_and_is_stopped_in_order(monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_LINE", 1_000)
    script = (
        "import sys; print('listening on a:1', flush=True); print('x' * 200_000); print('y' * 2_000, file=sys.stderr)"
    )
    child = await Child.start("loud", [sys.executable, "-c", script], on_log=lambda *_: None)
    assert await asyncio.wait_for(child.wait(), 10.0) == 0
    await child.stop()
