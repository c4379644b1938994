"""Build the loop, and a publisher by itself, from the settings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import TrafficCounter
from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publishing.heads import HeadsPublisher
from cloud_verifier.distill.publishing.publisher import Publisher, ReleaseLedger, TargetHashes
from cloud_verifier.distill.publishing.release_client import ReleaseClient
from cloud_verifier.distill.stages import run_stage
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, Overloaded
from outrider.core.vocabulary import token_table, vocabulary_hash
from outrider.wire import local_tokens
from outrider.wire.channels import ClientTls
from outrider.wire.ticket import Signer


@contextlib.asynccontextmanager
async def distill_loop(config: DistillConfig) -> AsyncIterator[DistillLoop]:
    """Yield the loop, which has its state directory for itself. Raises core errors."""
    from cloud_verifier.traffic.log import TrafficLog

    logging.getLogger().setLevel(config.log_level)
    if not config.draft.is_file() and (config.student == "draft" or config.draft.resolve() != config.target.resolve()):
        kind = "the GGUF that verifiers offer" if config.student == "draft" else "heads, or the target's folder"
        raise BadRequest(f"draft {config.draft} is not a file; give {kind}", field="draft")
    with _locked(config.state):
        async with heads_publisher(config) if config.student == "heads" else publisher(config) as its_publisher:
            weights_hash = its_publisher.target.weights_hash
            counter = TrafficCounter(TrafficLog(config.traffic), weights_hash, config.alarm_tokens)
            yield DistillLoop(config, functools.partial(run_stage, config), its_publisher, counter)


@contextlib.asynccontextmanager
async def heads_publisher(config: DistillConfig) -> AsyncIterator[HeadsPublisher]:
    """Yield a publisher of heads for the target. Raises BadRequest."""
    yield HeadsPublisher(config.artifacts, await asyncio.to_thread(target_hashes, config.target))


@contextlib.asynccontextmanager
async def publisher(config: DistillConfig) -> AsyncIterator[Publisher]:
    """Yield a publisher of a target's drafts, with the loop's ledger. Raises BadRequest."""
    hashes = await asyncio.to_thread(target_hashes, config.target)
    signer, artifacts = Signer.load(config.key), ArtifactStore(config.artifacts, ".gguf")
    async with release_client(config) as registry:
        yield Publisher(registry, ReleaseLedger(config.state / "releases"), artifacts, signer, hashes)


def release_client(config: DistillConfig) -> ReleaseClient:
    """Return a client of the coordinator's releases, which connects on first use. Raises BadRequest."""
    trust = ClientTls(config.coordinator_ca, config.coordinator_cert, config.coordinator_key)
    tls = trust if config.tls or config.coordinator_ca or config.coordinator_cert else None
    given = config.admin_token.get_secret_value()
    return ReleaseClient(
        config.coordinator,
        admin_token=lambda: given or local_tokens.find(local_tokens.ADMIN, config.coordinator),
        tls=tls,
        insecure=config.insecure,
    )


def target_hashes(target: Path) -> TargetHashes:
    """Return the hashes that verifiers announce which serve this directory. Raises BadRequest if it is no target."""
    from cloud_verifier.engine.weights import hash_of

    tokenizer = target / "tokenizer.json"
    if not tokenizer.is_file() or not any(target.glob("*.safetensors")):
        raise BadRequest(f"target {target} has no tokenizer.json or no *.safetensors", field="target")
    digest = vocabulary_hash(token_table(tokenizer.read_bytes()))
    return TargetHashes(f"sha256:{hash_of(target)}", f"sha256:{digest.hex()}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a state directory until the body or the process ends, however that happens. Raises Overloaded."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = atomic_files.lock(folder / "lock")
    if lock is None:
        raise Overloaded(f"another outrider-distill works in {folder}; wait for it, or end it")
    with lock:
        yield
