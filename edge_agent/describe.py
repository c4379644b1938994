"""What a verifier says about its target, and the bytes that it offers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from edge_agent.artifacts import ArtifactRef
from outrider.core.errors import BadRequest
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import Target, target_from_proto
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc

_TIMEOUT_S = 10.0
MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True)
class Description:
    """A target and what comes with it."""

    target: Target
    artifacts: tuple[ArtifactRef, ...]
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    max_sequence: int
    """Prompt and generated tokens together."""

    def artifact(self, role: str) -> ArtifactRef | None:
        """The first artifact of a role."""
        return next((artifact for artifact in self.artifacts if artifact.role == role), None)


class Library:
    """Describe and FetchArtifact of one verifier."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = session_pb2_grpc.VerifierStub(channel)  # type: ignore[no-untyped-call]

    async def describe(self) -> Description:
        """Raises core errors; BadRequest for an answer that makes no sense."""
        try:
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        if not 1 <= answer.vocabulary_size <= MAX_VOCABULARY:
            raise BadRequest.bound("vocabulary_size", answer.vocabulary_size, f"between 1 and {MAX_VOCABULARY}")
        return Description(
            target_from_proto(answer.target),
            tuple(ArtifactRef(a.role, a.name, a.hash, a.size) for a in answer.artifacts),
            answer.vocabulary_size,
            tuple(answer.eos_token_ids),
            answer.max_sequence,
        )

    async def fetch(self, content_hash: str, offset: int) -> AsyncIterator[bytes]:
        """The artifact's bytes from `offset` on, in chunks."""
        call = self._stub.FetchArtifact(pb.FetchArtifactRequest(hash=content_hash, offset=offset))
        try:
            async for chunk in call:
                yield chunk.data
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()
