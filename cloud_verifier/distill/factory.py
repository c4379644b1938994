"""Build the loop, and a publisher by itself, from the settings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from cloud_verifier.distill.config import PUBLIC, TRAIN_MINUTES, DistillConfig
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

    if not (config.draft.is_file() or config.heads):
        raise BadRequest(f"draft {config.draft} is not a file; give the GGUF that verifiers offer", field="draft")
    _check_options(config)
    with _locked(config.state):
        async with publisher(config) as its_publisher:
            counter = TrafficCounter(TrafficLog(config.traffic), its_publisher.target.weights_hash)
            yield DistillLoop(config, run_stage, its_publisher, counter)


def _check_options(config: DistillConfig) -> None:
    """Raise BadRequest for a field of the plans that is wrong, so that it is found before a run begins."""
    from pydantic import ValidationError

    from cloud_verifier.distill.data.plan import DatasetPlan
    from cloud_verifier.distill.training.plan import TrainingPlan

    try:
        DatasetPlan(**config.dataset_options)
        paths = {"base": config.draft, "tokenizer": config.target, "dataset": config.runs}
        length = {} if "steps" in config.training_options else {"minutes": TRAIN_MINUTES}
        TrainingPlan(**paths | length | config.training_options)
    except ValidationError as error:
        [first, *_] = error.errors()
        field = "dataset_options" if error.title == "DatasetPlan" else "training_options"
        raise BadRequest(f"{field}: {'.'.join(map(str, first['loc']))}: {first['msg']}", field=field) from error


@contextlib.asynccontextmanager
async def publisher(config: DistillConfig) -> AsyncIterator[Publisher | HeadsPublisher]:
    """Yield a publisher of a target's drafts, with the loop's ledger, or of heads. Raises BadRequest."""
    hashes = await asyncio.to_thread(target_hashes, config.target)
    if config.heads:
        yield HeadsPublisher(config.artifacts, hashes)
        return
    signer, artifacts = Signer.load(config.key), ArtifactStore(config.artifacts, ".gguf")
    async with release_client(config) as registry:
        yield Publisher(registry, ReleaseLedger(config.state / "releases"), artifacts, signer, hashes)


def release_client(config: DistillConfig) -> ReleaseClient:
    """Return a client of the coordinator's releases, which connects on first use. Raises BadRequest."""
    files = {part: Path(path).expanduser() for part, path in config.tls.items() if path != PUBLIC}
    given = config.admin_token.get_secret_value()
    return ReleaseClient(
        config.coordinator,
        admin_token=lambda: given or local_tokens.find(local_tokens.ADMIN, config.coordinator),
        tls=ClientTls(files.get("ca"), files.get("cert"), files.get("key")) if config.tls else None,
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
