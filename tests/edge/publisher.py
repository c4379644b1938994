"""Publish draft releases for a fake cluster: drafts of random weights, manifests, a server of files."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from fake_coordinator import FakeCoordinator
from file_server import FileServer
from tiny_gguf import write_tiny_llama

from outrider.core.vocabulary import token_table, vocabulary_hash
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb


@dataclasses.dataclass
class Publisher:
    """Publish releases. files: their folder. folder: for making drafts."""

    files: FileServer
    folder: Path
    tokenizer_json: bytes
    signer: Signer = dataclasses.field(default_factory=Signer.generate)
    serial: int = 0

    def draft(self, seed: int) -> bytes:
        """Write a tiny draft from `seed` and return the bytes of its GGUF."""
        return write_tiny_llama(self.folder / f"draft-{seed}.gguf", seed=seed).read_bytes()

    def manifest(self, data: bytes, version: int) -> Manifest:
        """Return a good manifest of these bytes."""
        return Manifest(
            version=version,
            weights_hash="w",
            tokenizer_hash=f"sha256:{vocabulary_hash(token_table(self.tokenizer_json)).hex()}",
            artifact=f"sha256:{hashlib.sha256(data).hexdigest()}",
            size=len(data),
            quantization="F32",
        )

    def offer(
        self,
        coordinator: FakeCoordinator,
        data: bytes,
        version: int,
    ) -> Manifest:
        """Offer a release to every device."""
        manifest = self.manifest(data, version)
        self.files.files[f"artifacts/{manifest.digest}.gguf"] = data
        self.serial += 1
        coordinator.offer = pb.OfferReleaseResponse(
            serial=self.serial,
            manifest=sign(manifest, self.signer),
            base_url=self.files.url,
        )
        return manifest
