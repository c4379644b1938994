"""Test that a draft is replaced while sessions run on a real cluster, without changing or losing a token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from system import QUICK, until

from coordinator.cluster import Cluster
from edge_agent import AsyncClient, EdgeSettings
from outrider.wire.channels import channel
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "Question: A baker fills 6 trays with 12 rolls each and sells 40 of them. How many rolls are left?\nAnswer:",
)
TOKENS = 600
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "ignore_eos": True}


@dataclass(frozen=True)
class Serving:
    """Run a coordinator that serves drafts, and a verifier whose own draft is the narrow one."""

    address: str
    artifacts: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    target, draft = pair
    folder = tmp_path_factory.mktemp("updates")
    artifacts = folder / "artifacts"
    artifacts.mkdir()
    async with Cluster(logs=folder) as cluster:
        await cluster.start_coordinator(
            *("--listen", "127.0.0.1:0", "--state-dir", str(folder / "state")),
            *("--artifacts", str(artifacts), "--http", "127.0.0.1:0"),
        )
        narrow = draft.with_name("draft-narrow.gguf")
        await cluster.start_verifier("--model", str(target), "--draft", str(narrow), *QUICK)
        yield Serving(cluster.address, artifacts)


async def released(serving: Serving, client: AsyncClient, draft: Path, signer: Signer, version: int) -> str:
    """Publish a version of this target's draft for every device; return its hash."""
    data = await asyncio.to_thread(draft.read_bytes)
    digest = hashlib.sha256(data).hexdigest()
    await asyncio.to_thread((serving.artifacts / f"{digest}.gguf").write_bytes, data)
    served = (await client.prepare()).description.target
    manifest = Manifest(
        version=version,
        weights_hash=served.weights_hash,
        tokenizer_hash=served.tokenizer_hash,
        artifact=f"sha256:{digest}",
        size=len(data),
        quantization="Q8_0",
    )
    async with channel(serving.address) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)
        await admin.PublishRelease(pb.PublishReleaseRequest(manifest=sign(manifest, signer)), timeout=30.0)
        request = pb.UpdateReleaseRequest(release=digest, action=pb.RELEASE_ACTION_PROMOTE)
        steered = await admin.UpdateRelease(request, timeout=10.0)
    assert steered.release.state == pb.RELEASE_STATE_STABLE
    return digest


async def test_the_narrow_draft_gives_way_to_the_general_one_in_the_middle_of_sessions(
    narrow: Serving, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    signer = Signer.generate()
    settings = EdgeSettings(release_keys=signer.public_key.hex())
    async with AsyncClient(coordinator=narrow.address, cache_dir=tmp_path, draft=None) as plain:
        streamed = [await plain.generate(prompt, max_tokens=TOKENS, **SAMPLED) for prompt in PROMPTS]
    async with AsyncClient(coordinator=narrow.address, cache_dir=tmp_path, settings=settings) as client:
        signed = await released(narrow, client, pair[1].with_name("draft-narrow.gguf"), signer, 1)
        async with asyncio.timeout(60.0):
            while (await client.generate(PROMPTS[0], max_tokens=8)).statistics.release != signed:
                pass
        streams = [await client.stream(prompt, max_tokens=TOKENS, **SAMPLED) for prompt in PROMPTS]
        running = [asyncio.create_task(stream.drain()) for stream in streams]
        await until(lambda: all(stream.statistics.tokens > 20 for stream in streams), 60.0)
        general = await released(narrow, client, pair[1], signer, 2)  # the verifier passes the news on
        completions = await asyncio.gather(*running)
        after = [await client.generate(prompt, max_tokens=TOKENS, **SAMPLED) for prompt in PROMPTS]
    assert [c.token_ids for c in completions] == [c.token_ids for c in streamed] == [c.token_ids for c in after]
    assert all(c.statistics.attaches == 1 for c in completions)
    for completion in completions:
        assert completion.statistics.release == general and len(completion.statistics.swaps_s) == 1
    assert all(completion.statistics.release == general for completion in after)
