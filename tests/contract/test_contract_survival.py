"""Test that verifiers, the coordinator and clients may go at any moment, and what that costs the others: nothing."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from independent_reference import Reference, Sampling
from ports import unused_port
from shared_cluster import TENANTS, Cluster, Program, lives, running, until
from small_pair import TARGET

from edge_agent import BlockingStream, Client, Killed, TimedOut, Unavailable

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
OPTIONS: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.2, "seed": 11}
LONG: dict[str, Any] = OPTIONS | {"max_tokens": 300}
"""For sessions that go on after what befalls them at their beginning, within milliseconds."""
ENDLESS: dict[str, Any] = OPTIONS | {"max_tokens": 4000}
"""For sessions that must live while a command of the operator starts."""


def taken(stream: BlockingStream, count: int) -> list[int]:
    """Return the stream's first tokens, `count` at least."""
    tokens: list[int] = []
    while len(tokens) < count:
        chunk = stream.next()
        assert chunk is not None, f"ended after {len(tokens)} tokens"
        tokens += chunk.token_ids
    return tokens


@contextlib.contextmanager
def begun(
    cluster: Cluster, client: Client, verifier: Program, received: int, **options: Any
) -> Iterator[BlockingStream]:
    """Yield a stream at this verifier from which so many tokens came; others take sessions again after the context."""
    with cluster.cordoned("verifier-1", "verifier-2"):
        stream = client.stream(PROMPT, **options)
        taken(stream, received)
        assert stream.statistics.address == verifier.ready
        yield stream


@pytest.fixture(scope="module")
def further(cluster: Cluster) -> Iterator[Program]:
    """Return a third verifier of the cluster, which its last test drains."""
    with cluster.verifier("--verifier-id", "further", "--drain-s", "0.1") as program:
        yield program


@pytest.fixture(scope="module")
def whole(plain: Client) -> tuple[int, ...]:
    """Return the undisturbed tokens of a long text."""
    return plain.generate(PROMPT, **LONG).token_ids


def test_a_verifier_that_is_killed_costs_its_sessions_no_token(
    cluster: Cluster, client: Client, whole: tuple[int, ...]
) -> None:
    with cluster.verifier("--verifier-id", "victim") as victim, cluster.cordoned("verifier-1", "verifier-2"):
        late, early = client.stream(PROMPT, **LONG), client.stream(PROMPT, **LONG)
        taken(early, 40)
        taken(late, 1)
        assert late.statistics.address == early.statistics.address == victim.ready
        victim.signal(signal.SIGKILL)
    for stream in (late, early):
        assert stream.drain().token_ids == whole[: LONG["max_tokens"]]
        assert stream.statistics.failovers >= 1 and stream.statistics.address != victim.ready


def test_a_verifier_that_stops_is_left_and_changes_no_token_when_it_wakes(
    cluster: Cluster, client: Client, further: Program, whole: tuple[int, ...]
) -> None:
    with begun(cluster, client, further, 20, **LONG) as stream:
        further.signal(signal.SIGSTOP)
    try:
        until(lambda: stream.next() and stream.statistics.failovers)
    finally:
        further.signal(signal.SIGCONT)
    assert stream.drain().token_ids == whole[: LONG["max_tokens"]]


def test_a_drain_hands_sessions_over_and_ends_the_process_with_0(
    cluster: Cluster, client: Client, further: Program, reference: Reference
) -> None:
    with begun(cluster, client, further, 1, **ENDLESS) as stream:
        cluster.outrider("verifiers", "drain", "further")
    until(lambda: stream.next() and stream.statistics.failovers)
    taken(stream, 100)
    stream.close()
    tokens = stream.completion.token_ids
    assert reference.differences(reference.ids(PROMPT), tokens, Sampling(temperature=1.2, seed=11)) == []
    assert stream.statistics.failovers == 1 and stream.statistics.address != further.ready
    assert further.process.wait(120) == 0


def test_the_coordinators_death_leaves_live_sessions_alone_and_a_new_one_takes_over(
    tmp_path: Path, whole: tuple[int, ...]
) -> None:
    """The new one has an empty store, and another policy: a tenant has withdrawn its consent to recording."""
    (tmp_path / "tenants.toml").write_text(TENANTS)
    policy = {"OUTRIDER_COORDINATOR_TENANTS_FILE": str(tmp_path / "tenants.toml")}
    given = ("--state-dir", tmp_path / "state", "--report-interval-ms", 100)
    pattern, name = r"listening on (127\.0\.0\.1:\d+)", "outrider-coordinator"
    with running(tmp_path, pattern, name, "--listen", f"127.0.0.1:{unused_port()}", *given, **policy) as first:
        own = Cluster(tmp_path, first.ready, first)
        traffic = tmp_path / "traffic"
        with own.verifier("--traffic", traffic), own.client("open") as client:
            stream = client.stream(PROMPT, **LONG)
            taken(stream, 20)
            first.signal(signal.SIGKILL)
            first.process.wait()
            assert stream.drain().token_ids == whole[: LONG["max_tokens"]] and stream.statistics.attaches == 1
            until(lambda: stream.statistics.session_id in recorded(traffic))
            (tmp_path / "tenants.toml").write_text(TENANTS.partition("[recording")[0])
            with running(tmp_path, pattern, name, "--listen", own.address, *given, **policy) as second:
                assert second.ready == own.address
                later = client.generate(PROMPT, **OPTIONS)
                assert later.token_ids == whole[: OPTIONS["max_tokens"]]
                until(own.at_rest)
                assert later.session_id not in recorded(traffic)
        assert later.session_id not in recorded(traffic)  # also what was written at the end


def test_what_is_killed_under_up_starts_again_at_its_address_with_its_state_and_status_counts_it(
    cluster: Cluster, client: Client, whole: tuple[int, ...]
) -> None:
    [victim] = [one for one in cluster.up.tree if "verifier-1" in one.cmdline()]
    before = cluster.verifiers()["verifier-1"]
    key = cluster.update_tenant("stays", "CREATE")
    with cluster.cordoned("verifier-2"):
        moved = client.stream(PROMPT, **LONG)
        taken(moved, 20)
        victim.kill()
    assert moved.drain().token_ids == whole[: LONG["max_tokens"]] and moved.statistics.failovers >= 1
    cluster.up.await_output("verifier-1 was ended by SIGKILL")
    after = until(lambda: (one := cluster.verifiers().get("verifier-1")) and one.restarts > before.restarts and one)
    assert after.address == before.address
    cluster.up.await_output(f"verifier-1 is ready again at {before.address}")

    goes_on = client.stream(PROMPT, **LONG)
    taken(goes_on, 20)
    [coordinator] = [one for one in cluster.up.tree if "coordinator.app" in one.cmdline()]
    coordinator.kill()
    assert goes_on.drain().token_ids == whole[: LONG["max_tokens"]] and goes_on.statistics.attaches == 1
    cluster.up.await_output(f"coordinator is ready again at {cluster.address}")
    assert cluster.asked("verifiers", "show", "verifier-1")["restarts"] == after.restarts
    with cluster.client("stays", api_key=key) as kept:
        assert kept.generate(PROMPT, **OPTIONS).token_ids == whole[: OPTIONS["max_tokens"]]


def recorded(traffic: Path) -> set[str]:
    """Return the ids of the sessions that the traffic log holds."""
    found: set[str] = set()
    for file in traffic.rglob("*.parquet"):
        found |= set(pyarrow.parquet.read_table(file, columns=["session_id"]).column(0).to_pylist())
    return found


def test_a_stream_that_is_left_frees_its_slot(cluster: Cluster, client: Client) -> None:
    with client.stream(PROMPT, **ENDLESS) as stream:
        taken(stream, 5)
        assert stream.statistics.session_id in cluster.sessions()
    assert stream.completion.finish_reason == "cancelled"
    until(cluster.at_rest)


def test_an_operator_ends_a_session_for_good(cluster: Cluster, client: Client) -> None:
    stream = client.stream(PROMPT, **ENDLESS)
    taken(stream, 5)
    cluster.outrider("sessions", "kill", stream.statistics.session_id)
    with pytest.raises(Killed, match="operator"):
        stream.drain()
    assert stream.statistics.failovers == 0
    until(cluster.at_rest)


def test_without_a_verifier_the_draft_writes_alone_where_it_may_and_what_it_writes_is_labelled(
    cluster: Cluster,
) -> None:
    with cluster.verifier(alone=True) as only, ThreadPoolExecutor(3) as pool:
        where: dict[str, Any] = {"verifier": only.ready, "cache_dir": cluster.folder / "alone"}
        with Client(**where, offline="draft_only") as client, Client(**where, retries=0, timeout=8.0) as strict:
            for one in (client, strict):
                assert one.generate(PROMPT, max_tokens=4, timeout=120.0).verified
            stream = client.stream(PROMPT, **LONG)
            before = taken(stream, 20)
            only.signal(signal.SIGKILL)
            alone = pool.submit(client.generate, PROMPT, max_tokens=16, ignore_eos=True)
            refused = pool.submit(strict.generate, PROMPT, max_tokens=4)
            done = stream.drain()
            assert not done.verified and list(done.token_ids[:20]) == before[:20]
            assert len(done.token_ids) == LONG["max_tokens"] and done.statistics.unverified > 0
            assert len(alone.result().token_ids) == 16 and not alone.result().verified
            with pytest.raises((Unavailable, TimedOut), match=re.escape(only.ready)):
                refused.result()


def test_a_cluster_whose_command_is_killed_leaves_no_child(cluster: Cluster, tmp_path: Path) -> None:
    given = ("--model", TARGET, "--listen", "127.0.0.1:0", "--state-dir", tmp_path)
    with running(tmp_path, "loading target", "outrider", "up", *given) as up:
        tree = up.tree
        assert len(tree) >= 4  # the command, coordinator, Redis and a verifier
        up.process.kill()
        until(lambda: not any(map(lives, tree)))


def test_a_request_that_runs_out_of_time_frees_its_slot(cluster: Cluster, client: Client) -> None:
    with pytest.raises(TimedOut):
        client.generate(PROMPT, **ENDLESS, timeout=0.3)
    until(cluster.at_rest)


def test_requests_of_several_threads_end_with_their_client(cluster: Cluster) -> None:
    with cluster.client() as leaving:
        leaving.prepare()
        streams = [leaving.stream(PROMPT, **ENDLESS) for _ in range(3)]
        threads = [threading.Thread(target=taken, args=(stream, 10)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [stream.completion.finish_reason for stream in streams] == 3 * ["cancelled"]
    until(cluster.at_rest)
