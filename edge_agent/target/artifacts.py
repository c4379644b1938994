"""Fetch a target's description and artifacts from its verifiers, and keep both on the device.

Descriptions and artifacts are the protocol's messages, checked once where they come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from edge_agent.session.channels import Channels, VerifierSilent, advice, peer
from edge_agent.session.failover import Route
from outrider.artifacts import atomic_files
from outrider.artifacts.download import download
from outrider.artifacts.store import ArtifactStore, digest_of
from outrider.core.errors import BadRequest, OutriderError, Unavailable
from outrider.core.protocol.messages import MAX_VOCABULARY
from outrider.wire.status import error_from_rpc, is_unresolved
from outrider.wire.ticket import target_from_proto, ticket_metadata
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc
from outrider.wire.v1.coordinator_pb2 import Grant

log = logging.getLogger(__name__)

_M = TypeVar("_M")

DESCRIBE_S = 3.0
"""Seconds for connecting and the answer: over TLS it takes five round trips, and a lost SYN costs another second."""
CHUNK_S = 10.0
"""Seconds for connecting and each chunk of 256 KiB."""
_MAX_BYTES = {"tokenizer": 256 << 20, "template": 1 << 20, "special_tokens": 1 << 20, "draft": 64 << 30}
"""The largest artifact of each role: what is read into memory is small, and nothing fills the disk unasked."""
_ATTEMPTS = 2
"""A file of an earlier process may have been damaged on disk, so one with a wrong hash is fetched once more."""
Fetch = Callable[[str, int], AsyncGenerator[bytes, None]]
"""(hash, offset) -> the bytes from there on. Raises core errors if no verifier can send them."""


def artifact_of(description: pb.DescribeResponse, role: str) -> pb.Artifact | None:
    """Return the target's first artifact of a role."""
    return next((artifact for artifact in description.artifacts if artifact.role == role), None)


def digest(artifact: pb.Artifact) -> str:
    """Return the hash's hex digits. Raises BadRequest for another form, or for a size that its role cannot have."""
    found = digest_of(artifact.hash, "artifact.hash")
    most = _MAX_BYTES.get(artifact.role, 0)
    if not 0 < artifact.size <= most:
        raise BadRequest.bound(f"size of the artifact {artifact.role}", artifact.size, f"between 1 and {most} bytes")
    return found


async def cached(store: ArtifactStore, artifact: pb.Artifact, fetch: Fetch) -> Path:
    """Return the path of an artifact's checked file, which is fetched unless it is in the store.

    Raises ModelRefused for bytes of the wrong hash, BadRequest for a directory that cannot be used, or what `fetch`
    raises; what had come by then is kept, and the next call resumes the download.
    """

    async def chunks(offset: int) -> AsyncGenerator[tuple[int, bytes], None]:
        async with contextlib.aclosing(fetch(artifact.hash, offset)) as pieces:
            async for piece in pieces:
                yield offset, piece
                offset += len(piece)

    wanted, size, name = digest(artifact), artifact.size, f"{artifact.role} {artifact.name!r}"
    try:
        return await download(store, wanted, size, chunks, name=name, announced_by="its verifier", attempts=_ATTEMPTS)
    except OSError as error:
        raise BadRequest(
            f"the cache directory {store.folder} cannot hold {name} of {size} bytes: {error}; "
            "free space there, or give another one with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
            field="cache_dir",
        ) from error


class ArtifactClient:
    """Calls Describe and FetchArtifact of a route's verifiers; where one fails, the next takes over.

    Artifacts are addressed by their hashes, so any verifier's bytes will do. Calls go without `wait_for_ready`: they
    wait for the first attempt to connect, and the route returns to a verifier later. Raises core errors.
    """

    def __init__(self, route: Route, channels: Channels) -> None:
        self._route = route
        self._channels = channels
        self._grant: Grant | None = None
        """Leads to the present verifier, while there is one."""
        self._progressed = False
        """Whether the present verifier has answered anything."""

    async def describe(self) -> pb.DescribeResponse:
        """Ask for the target's description. Raises BadRequest for an invalid answer."""
        while True:
            grant, channel, verifier = await self._connected()
            try:
                begun = time.monotonic()
                async with self._answering(grant, channel, DESCRIBE_S):
                    answer = await verifier.Describe(pb.DescribeRequest(), metadata=ticket_metadata(grant.ticket))
                description = _message(answer, grant)
                self._progressed = True
                self._channels.measured(grant.address, time.monotonic() - begun, channel)
                return checked(description)
            except OutriderError as error:
                self._leave(error)

    async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Yield the artifact's bytes from `offset` on, in chunks."""
        while True:
            grant, channel, verifier = await self._connected()
            request = pb.FetchArtifactRequest(hash=content_hash, offset=offset)
            call = verifier.FetchArtifact(request, metadata=ticket_metadata(grant.ticket))
            try:
                while True:
                    async with self._answering(grant, channel, CHUNK_S):
                        chunk = await call.read()
                    if chunk is grpc.aio.EOF:
                        return
                    data = _message(chunk, grant).data
                    self._progressed = True
                    offset += len(data)
                    yield data
            except OutriderError as error:
                self._leave(error)
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _answering(self, grant: Grant, channel: grpc.aio.Channel, within_s: float) -> AsyncIterator[None]:
        """Raise gRPC's errors as core errors, and VerifierSilent if the body takes longer than `within_s` seconds."""
        allowed_s = self._channels.timeout(grant.address, within_s)
        try:
            async with asyncio.timeout(allowed_s):
                yield
        except TimeoutError:
            self._channels.silent(grant.address, channel)
            raise VerifierSilent(f"{peer(grant)} has been silent for {allowed_s:g} s") from None
        except grpc.RpcError as error:
            if is_unresolved(error):
                self._channels.retire(channel)
            raise error_from_rpc(error, peer(grant), advice(grant)) from error

    async def _connected(self) -> tuple[Grant, grpc.aio.Channel, Any]:
        """Return the verifier that answered last, or the next one on the route."""
        if self._grant is None:
            self._grant, _ = await self._route.next()
        channel = self._channels.to(self._grant, bulk=True)  # the one before may have been retired since
        return self._grant, channel, session_pb2_grpc.VerifierStub(channel)  # type: ignore[no-untyped-call]

    def _leave(self, error: OutriderError) -> None:
        """Give the present verifier up. Raises `error` where no other verifier can help."""
        progressed, self._progressed, self._grant = self._progressed, False, None
        self._route.failed(error, progressed=progressed)
        log.info("the verifier could not describe its target or send an artifact, trying on: %s", error)


def _message(answer: _M | None, grant: Grant) -> _M:
    """Return what gRPC has read. Raises Unavailable for None, which stands for bytes that are no message."""
    if answer is None:
        raise Unavailable(f"{peer(grant)} sent what is no message; is it of another version?")
    return answer


def checked(description: pb.DescribeResponse) -> pb.DescribeResponse:
    """Return a description whose values are within their bounds. Raises BadRequest."""
    if not 1 <= description.vocabulary_size <= MAX_VOCABULARY:
        raise BadRequest.bound("vocabulary_size", description.vocabulary_size, f"between 1 and {MAX_VOCABULARY}")
    target_from_proto(description.target)
    return description


def keep(description: pb.DescribeResponse, file: Path) -> None:
    """Write a description down. A disk that cannot take it is logged, no more."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(file, description.SerializeToString(), mode=0o600)
    except OSError as error:
        log.warning("the target's description cannot be cached, which offline generation needs: %s", error)


def recall(file: Path) -> pb.DescribeResponse | None:
    """Return a description that was kept; None where there is none that can be read."""
    with contextlib.suppress(OSError, DecodeError, BadRequest):
        return checked(pb.DescribeResponse.FromString(file.read_bytes()))
    return None
