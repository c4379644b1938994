"""Test an n-gram store on a real cluster: recorded, built, signed, tried in mid-session, and rolled back."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from system import QUICK

from benchmarks.support.pace import Pace
from benchmarks.window.testbed import PACED_VERIFIER
from coordinator.cluster import Cluster
from edge_agent import AsyncClient, EdgeSettings
from outrider.core.telemetry import release_name
from outrider.wire.channels import channel
from outrider.wire.manifest import read_unverified
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = tuple(f'def {name}(values):\n    """Return the {name} of a list."""\n' for name in ("sum", "mean", "maximum"))
ASKED = 12
"""Sessions with each prompt, which are recorded."""
REPEATED = 9
"""Short texts with the store, and without it."""
PACE = Pace(10.0)
"""Of the verifier: a target of some size leaves a device the time to draft, which this small one does not."""


@dataclass(frozen=True)
class Serving:
    address: str
    folder: Path
    target: Path
    draft: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """Run a coordinator that gives nearly every device a canary, and a verifier that records all."""
    target, draft = pair
    folder = tmp_path_factory.mktemp("stores")
    (folder / "artifacts").mkdir()
    async with Cluster(logs=folder) as cluster:
        cluster.verifier_module = PACED_VERIFIER
        await cluster.start_coordinator(
            *("--listen", "127.0.0.1:0", "--state-dir", str(folder / "state"), "--canary-share", "0.999"),
            *("--artifacts", str(folder / "artifacts"), "--http", "127.0.0.1:0", "--recording-share", "1.0"),
        )
        # Without sources of its own, so that what is accepted is the device's.
        recording = ("--traffic", str(folder / "traffic"), "--traffic-flush-s", "0.2", "--server-sources", "")
        with pytest.MonkeyPatch.context() as environment:
            for name, value in PACE.environment.items():
                environment.setenv(name, value)
            await cluster.start_verifier("--model", str(target), *recording, *QUICK)
        yield Serving(cluster.address, folder, target, draft)


async def distill(serving: Serving, *arguments: str) -> tuple[int | None, str]:
    """Run `outrider-distill` on the recorded traffic; return its exit status and what it printed."""
    folder = serving.folder
    settings = {
        "TRAFFIC": str(folder / "traffic"),
        "TARGET": str(serving.target),
        "DRAFT": str(serving.draft),
        "ARTIFACTS": str(folder / "artifacts"),
        "KEY": str(folder / "key.pem"),
        "STATE_DIR": str(folder / "distill"),
        "COORDINATOR": serving.address,
        "DATASET_OPTIONS": '{"heldout_share": 0.3}',
        "GATE_SESSIONS": "3",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cloud_verifier.distill.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {f"OUTRIDER_DISTILL_{name}": value for name, value in settings.items()},
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_store_of_recorded_sessions_is_tried_in_mid_session_and_rolled_back_without_a_token_changed(
    serving: Serving, tmp_path: Path
) -> None:
    code, public_key = await distill(serving, "key")
    assert code == 0, public_key
    asked = {"max_tokens": 60, "temperature": 0.5, "ignore_eos": True}
    async with AsyncClient(coordinator=serving.address, cache_dir=tmp_path, draft=None) as plain:
        for prompt in PROMPTS:
            await asyncio.gather(*(plain.generate(prompt, seed=seed, **asked) for seed in range(ASKED)))
        expected = await plain.generate(PROMPTS[0], max_tokens=500, temperature=0.5, seed=99, ignore_eos=True)
    settings = EdgeSettings(release_keys=public_key.strip(), release_spread_s=0.0)
    async with (
        AsyncClient(coordinator=serving.address, cache_dir=tmp_path, draft="ngram", settings=settings) as client,
        channel(serving.address) as link,
    ):
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        await client.prepare()

        async def generated():
            return await client.stream(PROMPTS[0], max_tokens=500, temperature=0.5, seed=99, ignore_eos=True)

        async def accepted() -> int:
            """Return what was accepted of short texts, in which little repeats but what others wrote."""
            streams = [await client.stream(PROMPTS[0], **asked, seed=seed) for seed in range(100, 100 + REPEATED)]
            return sum([(await stream.drain()).statistics.accepted for stream in streams])

        publishing = asyncio.create_task(distill(serving, "store", "default"))
        completions = []
        while not publishing.done():  # sessions run while it is built, published and taken
            stream = await generated()
            completions.append(await stream.drain())
        code, printed = await publishing
        assert code == 0, printed
        [release] = (await admin.ListReleases(pb.ListReleasesRequest())).releases
        manifest = read_unverified(release.manifest)
        assert (manifest.tenant, release.state) == ("default", pb.RELEASE_STATE_CANARY)
        label = release_name("ngram", manifest.digest)

        async def until_release(wanted: str) -> None:
            while True:
                completions.append(await (await generated()).drain())
                if completions[-1].statistics.release == wanted:
                    return

        async def until_compared() -> None:
            while True:
                if (await admin.ListReleases(pb.ListReleasesRequest())).releases[0].evidence.canary_samples:
                    return
                await asyncio.sleep(0.2)

        async with asyncio.timeout(60.0):
            await until_release(label)
        with_store = await accepted()
        async with AsyncClient(coordinator=serving.address, cache_dir=tmp_path, draft="ngram") as other:
            beside = await other.generate(PROMPTS[0], max_tokens=500, temperature=0.5, seed=99, ignore_eos=True)
        completions.append(beside)
        async with asyncio.timeout(30.0):  # one device was offered the store, the other one nothing, and both count
            await until_compared()
        await admin.UpdateRelease(pb.UpdateReleaseRequest(release=manifest.digest, action=pb.RELEASE_ACTION_ROLL_BACK))
        async with asyncio.timeout(60.0):
            await until_release("ngram")
        without = await accepted()
        assert client.store_updates is not None and not client.store_updates.refused
    assert {completion.token_ids for completion in completions} == {expected.token_ids}
    assert with_store > without
