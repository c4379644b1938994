"""Test that `outrider up` starts verifiers side by side, ends all where one fails, and keeps what runs running."""

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
    def fake(name, command, **given) -> Child:
        return Child(name, ["sh", "-c", FAKE, name, command[-1]], **given)

    monkeypatch.setattr(cluster_module, "Child", fake)
    async with Cluster(on_log=local._print_log, start_timeout_s=120.0) as running:
        with pytest.raises(Unavailable, match="verifier-1 ended with exit code 7 before it was ready"):
            await local._start_verifiers(running, 2, str(tmp_path))
        assert running.verifiers == []
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "verifier-2").read_text()), 0)


async def test_a_child_may_write_more_than_a_line_holds_and_is_stopped_in_order(monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_LINE", 1_000)
    script = "echo listening on a:1; printf '%0200000d\\n' 0; printf '%02000d\\n' 0 >&2"
    child = await Child("loud", ["sh", "-c", script], on_log=lambda *_: None).start()
    assert await asyncio.wait_for(child.wait(), 60.0) == 0
    await child.stop()


SERVES, KILLED, FAILS, DRAINS = "exec sleep 60", "kill -9 $$", "exit 3", "exit 0"


@pytest.fixture
async def kept(tmp_path, monkeypatch):
    """Keep a cluster of scripts until it ends; return whether that was in order, and what was said.

    The processes of one name do one after the other what is given for it, the last thing again and again.
    """
    monkeypatch.setattr(cluster_module, "PAUSE_S", 0.001)

    async def keep(**lives: list[str]) -> tuple[bool, list[str]]:
        said: list[str] = []
        async with Cluster() as running:
            for name, acts in lives.items():
                count = f'echo "$@" >> {tmp_path / name}; n=$(wc -l < {tmp_path / name})'
                cases = "".join(f"{i}) {act};; " for i, act in enumerate(acts[:-1], 1))
                script = f"echo listening on a:1; {count}; case $n in {cases} *) {acts[-1]};; esac"
                child = await Child(name, ["sh", "-c", script, name]).start()
                if name == "coordinator":
                    running.coordinator = child
                else:
                    running.verifiers.append(child)
            return await asyncio.wait_for(running.keep(said.append), 60.0), said

    return keep


async def test_what_ends_by_itself_is_started_again_at_its_address_until_it_drains(kept, tmp_path) -> None:
    in_order, said = await kept(coordinator=[KILLED, SERVES], first=[KILLED, FAILS, DRAINS], second=[KILLED, DRAINS])
    assert in_order
    assert [line for line in said if line.startswith("first")] == [
        "first was ended by SIGKILL, as when memory runs out; it is started again in 0.001 s",
        "first is ready again at a:1",
        "first ended with exit code 3; it is started again in 0.002 s",
        "first is ready again at a:1",
        "first has drained and ended",
    ]
    assert (tmp_path / "first").read_text().splitlines() == ["", "--listen a:1", "--listen a:1"]


async def test_what_ends_five_times_soon_after_its_start_is_given_up_and_the_others_go_on(kept, tmp_path) -> None:
    in_order, said = await kept(coordinator=[SERVES], first=[FAILS], second=[*9 * [KILLED], DRAINS])
    assert not in_order
    assert "first ended with exit code 3, for the 5th time soon after its start: it is given up" in said
    assert (
        "second was ended by SIGKILL, as when memory runs out, for the 5th time soon after its start: it is given up"
        in said
    )
    assert len((tmp_path / "first").read_text().splitlines()) == 5


async def test_a_cluster_ends_with_its_coordinator(kept) -> None:
    in_order, said = await kept(coordinator=[FAILS], first=[SERVES])
    assert not in_order and said[-1].startswith("coordinator ended with exit code 3, for the 5th time")
