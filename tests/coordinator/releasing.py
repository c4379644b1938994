"""Make manifests, and sessions whose acceptance a test chooses."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence

from coordinator.releases.lifecycle import in_canary
from outrider.wire import manifest as manifests
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

SIGNER = Signer.generate()
FIRST = {
    "weights_hash": "sha256:w",  # the demo target's of `peers`, like the tokenizer
    "tokenizer_hash": "sha256:t",
    "size": 1_000,
    "quantization": "Q8_0",
}


def name_of(version: int) -> str:
    """Return the hash that stands for the draft of this version."""
    return hashlib.sha256(b"draft %d" % version).hexdigest()


def signed(version: int, signer: Signer = SIGNER, **changes) -> bytes:
    own = {"version": version, "artifact": f"sha256:{name_of(version)}", "created_unix": 1e9 + version}
    return manifests.sign(pb.Manifest(**{**FIRST, **own, **changes}), signer)


async def publish(peer, raw: bytes, **metadata) -> int:
    """Publish a manifest and return the state of its release."""
    request = pb.UpdateReleaseRequest(action="RELEASE_ACTION_PUBLISH", manifest=raw)
    return (await peer.admin.UpdateRelease(request, **metadata)).release.state


async def steer(peer, version: int, order) -> pb.Release:
    request = pb.UpdateReleaseRequest(release=name_of(version), action=order)
    return (await peer.admin.UpdateRelease(request)).release


async def listed(peer, release: str = "") -> list[pb.Release]:
    return list((await peer.admin.ListReleases(pb.ListReleasesRequest(release=release))).releases)


async def states(peer) -> dict[int, int]:
    """Return the state of each release by its version."""
    return {manifests.read_unverified(r.manifest).version: r.state for r in await listed(peer)}


async def offered(peer, device_id: str = "d", target: str = "sha256:w") -> pb.OfferReleaseResponse:
    return await peer.sessions.OfferRelease(pb.OfferReleaseRequest(target=target, device_id=device_id))


def version_of(offer: pb.OfferReleaseResponse) -> int:
    """Return the version on offer, 0 if there is none."""
    return manifests.read_unverified(offer.manifest).version if offer.manifest else 0


def device_of(release: str, *, canary: bool, share: float = 0.25) -> str:
    """Return the id of a device to which a release on trial is offered, or is not."""
    return next(name for i in itertools.count() if in_canary(name := f"device-{i}", release, share) is canary)


async def placed(peer, count: int, key: str = "", **request: str) -> Sequence[str]:
    """Open so many sessions and return their ids. key: the tenant's; empty where none is needed."""
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    calls = (peer.sessions.OpenSession(pb.OpenSessionRequest(**request), metadata=metadata) for _ in range(count))
    return [opened.session_id for opened in await asyncio.gather(*calls)]


def drafted(session_id: str, draft: str, right: int, positions: int, **changes) -> SessionTelemetry:
    """Return telemetry with the cumulative counts of a session."""
    fields = {"epoch": 5, "tenant": "default", "draft_release": draft, "positions": positions, "first_accepted": right}
    return SessionTelemetry(session_id=session_id, **(fields | changes))
