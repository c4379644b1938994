"""Read and change the coordinator's draft releases through its Admin service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc

from outrider.wire.channels import ClientTls, channel
from outrider.wire.manifest import Manifest, read_unverified
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

CALL_TIMEOUT_S = 5.0

CANDIDATE, CANARY, STABLE, SUPERSEDED, ROLLED_BACK = "candidate", "canary", "stable", "superseded", "rolled_back"
DECIDED = (STABLE, SUPERSEDED, ROLLED_BACK)
"""States in which the coordinator has decided about a release."""
_STATES: dict[int, str] = {
    pb.ReleaseState.Value(f"RELEASE_STATE_{state.upper()}"): state
    for state in (CANDIDATE, CANARY, STABLE, SUPERSEDED, ROLLED_BACK)
}


@dataclass(frozen=True)
class ReleaseRecord:
    """A release with the state that the coordinator gave it."""

    manifest: Manifest
    raw: bytes
    """The serialized SignedManifest."""
    state: str = ""
    """Empty until the coordinator has answered."""
    reason: str = ""
    pinned: bool = False
    """Whether an operator keeps it in its state, so that nothing replaces a stable one."""

    @property
    def digest(self) -> str:
        return self.manifest.digest


class ReleaseClient:
    """Calls the coordinator's release service; an async context manager.

    All methods raise core errors: Unavailable if the coordinator cannot be reached.
    """

    def __init__(
        self,
        address: str,
        *,
        admin_token: Callable[[], str] = lambda: "",
        tls: ClientTls | None = None,
        insecure: bool = False,
    ) -> None:
        """Connect on first use. Raises BadRequest for plain text to another machine, unless `insecure`.

        admin_token: asked for with each call, since a coordinator on this machine may start again with another one.
        """
        self._admin_token = admin_token
        self._channel = channel(address, tls=tls, insecure=insecure)
        self._stub = coordinator_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]

    async def list(self) -> Sequence[ReleaseRecord]:
        """Return every release of every target, the newest first."""
        answer = await self._call(self._stub.ListReleases, pb.ListReleasesRequest())
        return [
            ReleaseRecord(read_unverified(one.manifest), one.manifest, _state(one.state), one.reason, one.pinned)
            for one in answer.releases
        ]

    async def publish(self, raw: bytes) -> str:
        """Publish a SignedManifest and return its state. Doing so again changes nothing."""
        request = pb.UpdateReleaseRequest(action=pb.RELEASE_ACTION_PUBLISH, manifest=raw)
        return _state((await self._call(self._stub.UpdateRelease, request)).release.state)

    async def promote(self, digest: str) -> str:
        """Make a candidate the canary, or a canary stable; return its new state."""
        request = pb.UpdateReleaseRequest(release=digest, action=pb.RELEASE_ACTION_PROMOTE)
        return _state((await self._call(self._stub.UpdateRelease, request)).release.state)

    async def _call(self, method: Any, request: Any) -> Any:
        token = self._admin_token()
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


def _state(number: int) -> str:
    """Return the name of a state; one that this version does not know counts as undecided."""
    return _STATES.get(number, CANDIDATE)
