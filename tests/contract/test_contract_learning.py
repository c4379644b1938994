"""Test what is recorded and what is learned from it, and how drafts reach devices and are taken back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from independent_reference import Reference, Sampling
from publishing import Publisher, copy_of, shown
from shared_cluster import Cluster, until
from small_pair import DRAFT, NARROW, TARGET

from edge_agent import Client, EdgeSettings
from outrider.wire.v1 import coordinator_pb2 as pb

PROMPTS = [f'def {name}(values):\n    """Return the {name} of a list."""\n' for name in ("sum", "mean", "maximum")]
OPTIONS: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.8, "seed": 11}


def column(cluster: Cluster, name: str) -> list[Any]:
    """Return a column of all rows that the traffic log holds."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # the verifier has merged a file since it was listed
            files = list((cluster.folder / "traffic").rglob("*.parquet"))
            whole = [pyarrow.BufferReader(file.read_bytes()) for file in files]  # it may be replaced meanwhile
            tables = [pyarrow.parquet.ParquetFile(data).read([name]) for data in whole]
            return [value for table in tables for value in table.column(name).to_pylist()]


def recorded(cluster: Cluster) -> set[str]:
    """Return the sessions that the traffic log holds."""
    return set(column(cluster, "session_id"))


def test_nothing_is_recorded_without_consent_and_nothing_of_a_prompt(cluster: Cluster, client: Client) -> None:
    secret = "The password of the prompt is hunter2. "
    with cluster.client("open") as consenting:
        done = [one.generate(secret + PROMPTS[0], **OPTIONS) for one in (client, consenting)]
    until(lambda: done[1].session_id in recorded(cluster))
    assert done[0].session_id not in recorded(cluster)
    assert set(column(cluster, "tenant")) == {"open"}
    assert not any(column(cluster, "prompt"))


def test_a_turn_of_the_loop_makes_a_draft_of_recorded_traffic_and_publishes_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    def generate(seed: int) -> str:
        given = {"max_tokens": 48, "ignore_eos": True, "temperature": 0.7, "traffic_class": "sums"}
        question = (
            f"Question: Ada has {seed + 3} apples and buys {seed * 7 % 40} more. How many apples has Ada?\nAnswer:"
        )
        return client.generate(question, seed=seed, **given).session_id

    with cluster.client("open") as client, ThreadPoolExecutor(8) as pool:
        sessions = set(pool.map(generate, range(48)))
    until(lambda: sessions <= recorded(cluster))
    easy = {"gain": 0, "loss": 0.99, "slower": 100, "confidence": 0.5, "sessions": 1, "positions": 1}
    # Sessions are drawn by their random ids: fewer than the gate's 8 of 48 have a probability of 3e-7.
    drawn = {"heldout_share": 0.5, "validation_share": 0.1}
    training = {"steps": 20, "batch_tokens": 512, "micro_tokens": 512, "precision": "float32", **drawn}
    settings: dict[str, Any] = {
        "fresh_tokens": 1_000,
        "training_options": json.dumps(training),
        **{f"gate_{name}": value for name, value in easy.items()},
    }
    variables = {f"OUTRIDER_DISTILL_{name.upper()}": str(value) for name, value in settings.items()}
    publisher = Publisher(cluster, tmp_path, draft=NARROW)
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(publisher.run, "once", **variables)
        [card] = until(lambda: [*tmp_path.glob("distill/runs/*/dataset/card.json")], timeout_s=480.0)
        dataset = shutil.copytree(card.parent, tmp_path / "dataset")  # the loop deletes its own at the end
        turn.result()
    verdict = publisher.run("gate", "--candidate", DRAFT, "--incumbent", NARROW, "--dataset", dataset)
    assert json.loads(verdict)["passed"]
    assert "canary" in publisher.run("status", **variables)
    [release] = [one for one in cluster.asked("releases", "list")["releases"] if one["state"] == "canary"]
    assert release["metrics"]["acceptance.sums"] > 0
    [run] = (tmp_path / "distill" / "runs").iterdir()
    publisher.run("train", run)  # it has ended: there is nothing left to do
    exported = tmp_path / "exported.gguf"
    publisher.run("export", "--model", run / "model", "--tokenizer", TARGET, "--out", exported)
    assert hashlib.sha256(exported.read_bytes()).hexdigest() == release["release"]
    with cluster.client(draft=cluster.folder / "state" / "artifacts" / f"{release['release']}.gguf") as client:
        until(lambda: client.generate(PROMPTS[0], **OPTIONS).statistics.accepted > 0)


@pytest.fixture(autouse=True)
def no_trial(cluster: Cluster) -> Iterator[None]:
    """Take back what a test leaves on trial, of which there can be one at a time."""
    yield
    for release in cluster.administer("ListReleases", pb.ListReleasesRequest()).releases:
        if release.state in (pb.RELEASE_STATE_CANARY, pb.RELEASE_STATE_CANDIDATE):
            request = pb.UpdateReleaseRequest(release=release.name, action="RELEASE_ACTION_ROLL_BACK")
            cluster.administer("UpdateRelease", request)


@pytest.fixture(scope="module")
def publisher(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    return Publisher(cluster, tmp_path_factory.mktemp("publisher"))


def follower(cluster: Cluster, publisher: Publisher, cache: str) -> Client:
    settings = EdgeSettings(release_keys=publisher.public_key)
    return cluster.client(cache=cache, settings=settings)


def used(client: Client) -> str:
    """Return the release with which a session drafts now."""
    return client.generate(PROMPTS[0], max_tokens=8, ignore_eos=True).statistics.release


def released(cluster: Cluster, publisher: Publisher, draft: Path) -> str:
    """Publish a draft for all devices, and return its hash."""
    release = publisher.publish(draft)
    cluster.outrider("releases", "promote", release)
    return release


def test_releases_reach_devices_and_are_taken_back_in_mid_session_without_a_token_changed(
    cluster: Cluster, publisher: Publisher, reference: Reference, tmp_path: Path
) -> None:
    """A canary reaches the devices that are drawn, its promotion the others, and its rollback all of them."""
    before = released(cluster, publisher, copy_of(NARROW, tmp_path))
    trial = publisher.publish(copy_of(DRAFT, tmp_path))
    assert shown(cluster, trial)["state"] == "canary"
    with contextlib.ExitStack() as stack:
        devices: dict[str, Client] = {}
        for number in range(24):  # half of the devices are drawn
            client = stack.enter_context(follower(cluster, publisher, f"{tmp_path.name}-{number}"))
            devices[until(lambda client=client: used(client) if used(client) in (before, trial) else "")] = client
            if len(devices) == 2:
                break
        long: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 1.2, "seed": 1}

        def swapped(clients: Iterable[Client], after: str, *command: object) -> None:
            """Run a command while texts are written, each of which goes on with this release; compare tokens."""
            streams = [client.stream(PROMPTS[0], **long) for client in clients]
            first = [stream.next() and stream.statistics.release for stream in streams]
            assert after not in first
            cluster.outrider("releases", *command)
            for stream in streams:
                # A device that has dropped a draft may draft by n-grams until it has the other one.
                until(lambda stream=stream: stream.next() and stream.statistics.swaps_s)
                until(lambda stream=stream: stream.next() and stream.statistics.release == after)
                assert stream.statistics.attaches == 1
                stream.close()
                tokens = stream.completion.token_ids
                assert reference.differences(reference.ids(PROMPTS[0]), tokens, Sampling(temperature=1.2, seed=1)) == []

        assert used(devices[trial]) == trial
        swapped([devices[before]], trial, "promote", trial)
        key = publisher.variables["OUTRIDER_DISTILL_KEY"]
        swapped(devices.values(), before, "rollback", trial, "--key", key)
    assert shown(cluster, trial)["state"] in ("superseded", "rolled back")


def test_a_device_takes_nothing_that_a_stranger_has_signed_or_a_server_has_altered(
    cluster: Cluster, publisher: Publisher, tmp_path: Path
) -> None:
    good = released(cluster, publisher, copy_of(DRAFT, tmp_path))
    manifest = Path(publisher.variables["OUTRIDER_DISTILL_STATE_DIR"], "releases", f"{good}.json")
    assert good[:12] in cluster.outrider("releases", "publish", manifest)  # again, as after a loss of the store
    (tmp_path / "other").mkdir()
    stranger = Publisher(cluster, tmp_path / "other")
    with follower(cluster, stranger, f"{tmp_path.name}-other") as distrusting:
        assert used(distrusting) != good
        file = cluster.folder / "state" / "artifacts" / f"{good}.gguf"
        whole = file.read_bytes()
        file.write_bytes(whole[:-100] + bytes(100))
        try:
            with follower(cluster, publisher, f"{tmp_path.name}-altered") as client:
                for _ in range(20):
                    assert used(client) != good
                file.write_bytes(whole)
        finally:
            file.write_bytes(whole)
        with follower(cluster, publisher, f"{tmp_path.name}-whole") as client:
            until(lambda: used(client) == good)
        assert used(distrusting) != good
