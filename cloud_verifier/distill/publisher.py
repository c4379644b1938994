"""Publish a draft: store its file, sign its manifest and send that to the coordinator, so that no kill does harm.

The order of the steps ensures it. The file is whole under its own hash before anything names it. The signed manifest is
on disk before it is sent, and the same one is sent again after a kill. A new one is signed only if another publisher
has taken its version meanwhile.

Heads, which never leave the operator's machines, are not signed, and no coordinator is asked (`serve_heads`).
"""

from __future__ import annotations

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from cloud_verifier.distill.config import PUBLIC, DistillConfig
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest
from outrider.wire import local_tokens
from outrider.wire.channels import ClientTls, channel
from outrider.wire.manifest import read_unverified, sign, state_of
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import Signer, Target
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
SERVED = "heads.safetensors"
"""Name of a link in the folder of heads to the newest ones, which verifiers load when they start."""


class ReleaseClient:
    """Calls the coordinator's release service; an async context manager.

    All methods raise core errors: Unavailable if the coordinator cannot be reached.
    """

    def __init__(self, config: DistillConfig) -> None:
        """Connect on first use. Raises BadRequest for plain text to another machine, unless the settings allow it."""
        self._config = config
        files = {part: Path(path).expanduser() for part, path in config.tls.items() if path != PUBLIC}
        tls = ClientTls(files.get("ca"), files.get("cert"), files.get("key")) if config.tls else None
        self._channel = channel(config.coordinator, tls=tls, insecure=config.insecure)
        self._stub = coordinator_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]

    async def list(self) -> Sequence[pb.Release]:
        """Return every release of every target, the newest first."""
        releases: Sequence[pb.Release] = (await self._call(self._stub.ListReleases, pb.ListReleasesRequest())).releases
        return releases

    async def publish(self, manifest: bytes) -> pb.Release:
        """Publish a SignedManifest, and return its release. Doing so again changes nothing."""
        request = pb.UpdateReleaseRequest(action=pb.RELEASE_ACTION_PUBLISH, manifest=manifest)
        release: pb.Release = (await self._call(self._stub.UpdateRelease, request)).release
        return release

    async def _call(self, method: Any, request: Any) -> Any:
        token = self._config.admin_token.get_secret_value()
        if not token:  # each time, since a coordinator on this machine may start again with another one
            token = local_tokens.find(local_tokens.ADMIN, self._config.coordinator)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


@dataclass(frozen=True)
class Publisher:
    """Signs drafts for one target, and keeps what it has signed in a folder of its own, `HASH.json` each, which the
    command `outrider releases publish` reads too."""

    registry: ReleaseClient
    folder: Path
    artifacts: ArtifactStore
    signer: Signer
    target: Target
    clock: Callable[[], float] = time.time

    async def publish(
        self, file: Path, quantization: str, parent: str = "", metrics: Mapping[str, float] | None = None
    ) -> pb.Release:
        """Publish a file; a file that is published already is not published again. Raises core errors.

        parent: hex digest of the draft that it was trained from, if any. metrics: for the manifest.
        """
        digest = self.artifacts.put(file)
        known = await self.known()
        if digest in known:
            return known[digest]
        newest = max((one.version for one in known.values()), default=0)
        path = self.folder / f"{digest}.json"
        signed = _signed(path) if path.is_file() else b""
        if not signed or read_unverified(signed).version <= newest:
            own = (read_unverified(_signed(one)) for one in self.folder.glob("*.json"))
            versions = (one.version for one in own if one.weights_hash == self.target.weights_hash)
            manifest = pb.Manifest(
                version=1 + max(newest, *versions, 0),
                weights_hash=self.target.weights_hash,
                tokenizer_hash=self.target.tokenizer_hash,
                artifact=f"sha256:{digest}",
                size=self.artifacts.path(digest).stat().st_size,
                quantization=quantization,
                parent=f"sha256:{parent}" if parent else "",
                urls=(f"artifacts/{self.artifacts.path(digest).name}",),
                metrics=metrics,
                created_unix=self.clock(),
            )
            signed = sign(manifest, self.signer)
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write(path, json.dumps({"manifest": b64encode(signed).decode()}).encode())
        release = await self.registry.publish(signed)
        log.info("published release %d, %s..: %s", release.version, digest[:12], state_of(release))
        return release

    async def known(self) -> dict[str, pb.Release]:
        """Return the coordinator's releases of this target by digest, the newest first."""
        found: dict[str, pb.Release] = {}
        for one in await self.registry.list():  # a file may be released twice
            if read_unverified(one.manifest).weights_hash == self.target.weights_hash:
                found.setdefault(one.name, one)
        return found


def serve_heads(file: Path, folder: Path, weights_hash: str) -> str:
    """Serve a file of heads to verifiers that start from now on; return its digest. Raises ModelRefused, also for heads
    of another target, and OSError."""
    from cloud_verifier.engine.server_draft.head_models import load_heads

    load_heads(file, weights_hash)  # for its checks: a verifier would not start with damaged heads
    store = ArtifactStore(folder, ".safetensors")
    digest = store.put(file)
    link = store.folder / f"{SERVED}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(store.path(digest).name)
    link.replace(store.folder / SERVED)
    return digest


def create_key(path: Path) -> Signer:
    """Create a publisher's key in a file that only its owner can read. Raises BadRequest if the file exists."""
    path = path.expanduser()
    if path.exists():
        raise BadRequest(f"{path} exists; a key that devices trust is not overwritten: give another name", field="key")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = Signer.generate()
    atomic_files.write(path, signer.pem(), mode=0o600)
    return signer


def _signed(path: Path) -> bytes:
    """Return the SignedManifest in a file of ours. Raises BadRequest."""
    try:
        signed = b64decode(json.loads(path.read_bytes())["manifest"], validate=True)
        read_unverified(signed)
        return signed
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadRequest(f"{path} is no manifest that this publisher signed ({error}); move it away") from error
