"""Hand trained heads to verifiers through a folder, without a signature: they never leave the operator's machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cloud_verifier.distill.publishing.publisher import TargetHashes
from cloud_verifier.distill.publishing.release_client import ReleaseRecord
from cloud_verifier.engine.server_draft.heads_folder import HeadsFolder, HeadsRelease
from outrider.wire.manifest import Manifest


class HeadsPublisher:
    """Stands in the loop for `Publisher`: verifiers that read the folder try its heads and decide about them."""

    def __init__(self, folder: Path, target: TargetHashes) -> None:
        self.target = target
        self._folder = HeadsFolder(folder, target.weights_hash)

    async def publish(
        self, file: Path, quantization: str, parent: str = "", metrics: Mapping[str, float] | None = None
    ) -> ReleaseRecord:
        """Make a file of heads the canary, unless it is there already. Raises ModelRefused and OSError."""
        return self._record(self._folder.add(file))

    async def known(self) -> dict[str, ReleaseRecord]:
        """Return the target's heads by digest. Raises ModelRefused for a damaged folder."""
        return {one.digest: self._record(one) for one in self._folder.releases()}

    async def restore(self, known: Mapping[str, ReleaseRecord]) -> Sequence[str]:
        """Return nothing: the folder is the only store there is."""
        return ()

    def _record(self, one: HeadsRelease) -> ReleaseRecord:
        manifest = Manifest(
            version=one.version,
            weights_hash=one.target,
            tokenizer_hash=self.target.tokenizer_hash,
            artifact=f"sha256:{one.digest}",
            size=self._folder.path(one.digest).stat().st_size if self._folder.path(one.digest).is_file() else 0,
            quantization="BF16",
            created_unix=one.created_unix,
        )
        return ReleaseRecord(manifest, b"", one.state, one.reason)
