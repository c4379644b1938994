"""Puts the loop together from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import TrafficWatch
from cloud_verifier.distill.loop import Loop
from cloud_verifier.distill.publishing import keys
from cloud_verifier.distill.publishing.ledger import Ledger
from cloud_verifier.distill.publishing.publisher import Publisher, TargetHashes
from cloud_verifier.distill.publishing.release_client import Coordinator
from cloud_verifier.distill.stage_processes import Budget, Children, Stages
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, Overloaded
from outrider.core.tokenizer_json import token_table
from outrider.core.vocabulary import vocabulary_hash

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def assembled(config: DistillConfig, stages: Stages | None = None) -> AsyncIterator[Loop]:
    """The loop, alone in its state directory. stages: child processes where None. Raises core errors."""
    from cloud_verifier.traffic.segments import SegmentLog

    logging.getLogger().setLevel(config.log_level.upper())
    if not config.draft.is_file():
        raise BadRequest(f"draft {config.draft} is not a file; give the GGUF that verifiers offer", field="draft")
    with _alone(config.state):
        hashes = await asyncio.to_thread(target_hashes, config.target)
        async with _publisher(config, hashes) as publisher:
            watch = TrafficWatch(SegmentLog(config.traffic), hashes.weights_hash, config.alarm_tokens)
            yield Loop(config, stages or Children(_budget(config)), publisher, watch)


@contextlib.asynccontextmanager
async def publishing(config: DistillConfig) -> AsyncIterator[Publisher]:
    """A publisher by itself, with the loop's ledger."""
    hashes = await asyncio.to_thread(target_hashes, config.target)
    async with _publisher(config, hashes) as publisher:
        yield publisher


def coordinator(config: DistillConfig) -> Coordinator:
    """The line to the coordinator."""
    return Coordinator(
        config.coordinator,
        admin_token=config.admin_token.get_secret_value(),
        tls=config.client_tls,
        insecure=config.insecure,
    )


def target_hashes(target: Path) -> TargetHashes:
    """What verifiers that serve this directory announce. Raises BadRequest."""
    from cloud_verifier.engine.model import hash_of

    tokenizer = target / "tokenizer.json"
    if not tokenizer.is_file() or not any(target.glob("*.safetensors")):
        raise BadRequest(f"target {target} has no tokenizer.json or no *.safetensors", field="target")
    digest = vocabulary_hash(token_table(tokenizer.read_bytes()))
    return TargetHashes(f"sha256:{hash_of(target)}", f"sha256:{digest.hex()}")


@contextlib.asynccontextmanager
async def _publisher(config: DistillConfig, hashes: TargetHashes) -> AsyncIterator[Publisher]:
    signer, artifacts = keys.load(config.key), ArtifactStore(config.artifacts, ".gguf")
    async with coordinator(config) as releases:
        yield Publisher(releases, Ledger(config.state / "releases"), artifacts, signer, hashes)


def _budget(config: DistillConfig) -> Budget:
    return Budget(config.threads, config.nice, 60 * config.train_minutes, 60 * config.stage_minutes, config.ranks)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a state directory; the system lets it go with the process, however that ends. Raises Overloaded."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = atomic_files.lock(folder / "lock")
    if held is None:
        raise Overloaded(f"another outrider-distill works in {folder}; wait for it, or end it")
    with held:
        yield
