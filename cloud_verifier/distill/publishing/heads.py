"""Hand trained heads to verifiers as one file, without a signature: they never leave the operator's machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cloud_verifier.distill.publishing.publisher import TargetHashes
from cloud_verifier.distill.publishing.release_client import STABLE, ReleaseRecord
from cloud_verifier.engine.server_draft.head_models import HeadsFile, load_heads
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import ModelRefused
from outrider.wire.manifest import Manifest

SERVED = "heads.safetensors"
"""Name of a link in the folder to the newest heads, which verifiers load when they start."""


class HeadsPublisher:
    """Stands in the loop for `Publisher`: heads that the gate let pass are served by the next verifier that starts."""

    def __init__(self, folder: Path, target: TargetHashes) -> None:
        self.target = target
        self._files = ArtifactStore(folder, ".safetensors")

    async def publish(
        self, file: Path, quantization: str, parent: str = "", metrics: Mapping[str, float] | None = None
    ) -> ReleaseRecord:
        """Serve a file of heads from now on. Raises ModelRefused, also for another target's heads, and OSError."""
        if (target := HeadsFile.read(file).target) != self.target.weights_hash:
            raise ModelRefused(f"{file} has heads of target {target}, the target here is {self.target.weights_hash}")
        load_heads(file, self.target.weights_hash)  # for its checks: a verifier would not start with damaged heads
        digest = self._files.put(file)
        link = self._files.folder / f"{SERVED}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(self._files.path(digest).name)
        link.replace(self._files.folder / SERVED)
        return self._record(digest)

    async def known(self) -> dict[str, ReleaseRecord]:
        """Return the heads that are served, by their digest; nothing before the first ones."""
        served = self._files.folder / SERVED
        return {(digest := served.resolve().stem): self._record(digest)} if served.is_file() else {}

    async def restore(self, known: Mapping[str, ReleaseRecord]) -> Sequence[str]:
        """Return nothing: the folder is the only store there is."""
        return ()

    def _record(self, digest: str) -> ReleaseRecord:
        path = self._files.path(digest)
        manifest = Manifest(
            version=1,
            weights_hash=self.target.weights_hash,
            tokenizer_hash=self.target.tokenizer_hash,
            artifact=f"sha256:{digest}",
            size=path.stat().st_size,
            quantization="BF16",
            created_unix=path.stat().st_mtime,
        )
        return ReleaseRecord(manifest, b"", STABLE)
