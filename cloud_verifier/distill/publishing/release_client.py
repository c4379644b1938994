"""What the coordinator knows of draft releases, asked and told through its Admin service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from outrider.wire.channels import ClientTls, channel
from outrider.wire.manifest import Manifest, read_unverified
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

CALL_TIMEOUT_S = 5.0

CANDIDATE, CANARY, STABLE, SUPERSEDED, ROLLED_BACK = "candidate", "canary", "stable", "superseded", "rolled_back"
DECIDED = (STABLE, SUPERSEDED, ROLLED_BACK)
"""States in which no canary is to be waited for."""
_STATES = {f"RELEASE_STATE_{state.upper()}": state for state in (CANDIDATE, CANARY, STABLE, SUPERSEDED, ROLLED_BACK)}


@dataclass(frozen=True)
class Known:
    """One release, as the coordinator has it."""

    manifest: Manifest
    raw: bytes
    """SignedManifest."""
    state: str
    reason: str = ""
    pinned: bool = False
    """Stays as it is, whatever is measured; nothing replaces a stable one that is."""

    @property
    def digest(self) -> str:
        return self.manifest.digest


class Releases(Protocol):
    """All methods raise core errors; Unavailable where the coordinator cannot be reached."""

    async def list(self) -> Sequence[Known]:
        """Every release of every target, the newest first."""

    async def publish(self, raw: bytes) -> str:
        """Tell of a SignedManifest; returns its state. The same again changes nothing."""

    async def promote(self, digest: str) -> str:
        """A candidate to canary, a canary to stable; returns the state that it has then."""


class Coordinator:
    """Releases over gRPC. An async context manager; a connection is made when it is first needed."""

    def __init__(
        self, address: str, *, admin_token: str = "", tls: ClientTls | None = None, insecure: bool = False
    ) -> None:
        """Raises BadRequest for a plain connection to another machine, unless `insecure`."""
        self._metadata = (("authorization", f"Bearer {admin_token}"),) if admin_token else ()
        self._channel = channel(address, tls=tls, insecure=insecure)
        self._stub = coordinator_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]

    async def list(self) -> Sequence[Known]:
        answer = await self._call(self._stub.ListReleases, pb.ListReleasesRequest())
        return [_known(release) for release in answer.releases]

    async def publish(self, raw: bytes) -> str:
        answer = await self._call(self._stub.PublishRelease, pb.PublishReleaseRequest(manifest=raw))
        return _state(answer.state)

    async def promote(self, digest: str) -> str:
        request = pb.UpdateReleaseRequest(release=digest, action=pb.RELEASE_ACTION_PROMOTE)
        return _state((await self._call(self._stub.UpdateRelease, request)).release.state)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()


def _known(release: pb.Release) -> Known:
    return Known(
        read_unverified(release.manifest), release.manifest, _state(release.state), release.reason, release.pinned
    )


def _state(number: int) -> str:
    """A state that is newer than this program is one that is not decided."""
    named = {value: name for name, value in pb.ReleaseState.items()}
    return _STATES.get(named.get(number, ""), CANDIDATE)
