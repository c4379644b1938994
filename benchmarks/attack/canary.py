"""Steer the trial of a draft release as one of four tenants, who has half of the samples and is there first."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.attack.finding import Finding
from benchmarks.attack.lab import HOSTILE, OTHERS, Caller, Lab
from coordinator.cluster import Child
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

POSITIONS = 40
BATCH = 40
"""Sessions that are opened and reported together."""
AT_ONCE = 8
RUSH = 4
"""Batches of the hostile tenant before the first of another's."""
DECIDED_S = 4.0
"""Time after the last sample in which a coordinator decides."""
STABLE = 0.60
WEIGHTS, TOKENIZER = "sha256:w", "sha256:t"
_DEVICE_ID = 6
"""Number of the field OpenSessionRequest.device_id, which older protocols do not have."""


async def worse_made_stable(lab: Lab) -> Finding:
    """Make a draft stable whose acceptance is a fifth less, by sessions that show the opposite."""
    state, samples = await _trial(lab, honest=0.8 * STABLE, hostile=(1.0, 0.0))
    measured = {"state": state, "samples": samples, "canary": 0.8 * STABLE, "stable": STABLE}
    return Finding(state in ("CANARY", "ROLLED_BACK") and samples > 0, measured, "it does not become stable")


async def better_rolled_back(lab: Lab) -> Finding:
    """Have a draft rolled back whose acceptance is a tenth more, by sessions that show the opposite."""
    state, samples = await _trial(lab, honest=1.1 * STABLE, hostile=(0.0, 1.0))
    measured = {"state": state, "samples": samples, "canary": 1.1 * STABLE, "stable": STABLE}
    return Finding(state in ("CANARY", "STABLE") and samples > 0, measured, "it is not rolled back")


@dataclass
class _Trial:
    """Play the verifier and all devices of a coordinator's trial of a release."""

    coordinator: Child
    lab: Lab
    draw: random.Random
    samples: int = 0

    async def begin(self) -> None:
        """Register the verifier, and publish a stable release and a canary."""
        async with self._verifier() as verifier:
            target = session_pb2.TargetIdentity(name="any", weights_hash=WEIGHTS, tokenizer_hash=TOKENIZER)
            registration = pb.RegisterRequest(
                verifier_id="v1", address="127.0.0.1:1", target=target, capacity_sessions=4_096, instance=1
            )
            await verifier("Registry.Register", registration)
        async with self._operator() as operator:
            for version in (1, 2):
                await operator("Admin.PublishRelease", pb.PublishReleaseRequest(manifest=_signed(version)))
                if version == 1:
                    action = pb.RELEASE_ACTION_PROMOTE
                    await operator("Admin.UpdateRelease", pb.UpdateReleaseRequest(release=_name(1), action=action))

    async def state(self) -> str:
        """Return the canary's state."""
        async with self._operator() as operator:
            listed = await operator("Admin.ListReleases", pb.ListReleasesRequest(release=_name(2)))
        return pb.ReleaseState.Name(listed.releases[0].state).removeprefix("RELEASE_STATE_")

    async def batch(self, tenant: str, canary: float, stable: float) -> None:
        """Open sessions of a tenant, and report of each what its draft had accepted.

        canary, stable: share of positions whose first proposal is accepted.
        """
        async with Caller(self.coordinator.address, self.lab.keys.get(tenant, "")) as devices:
            turns = asyncio.Semaphore(AT_ONCE)

            async def one() -> SessionTelemetry | None:
                async with turns:
                    return await self._session(devices, tenant, canary, stable)

            told = [found for found in await asyncio.gather(*(one() for _ in range(BATCH))) if found is not None]
        self.samples += len(told)
        async with self._verifier() as verifier:
            load = VerifierTelemetry(live_sessions=len(told))
            await verifier(
                "Registry.Report", pb.ReportRequest(verifier_id="v1", instance=1, verifier=load, sessions=told)
            )

    async def _session(self, devices: Caller, tenant: str, canary: float, stable: float) -> SessionTelemetry | None:
        """Open a session with the release that its device is offered; None where there is no place."""
        device_id = os.urandom(16).hex()
        offer = await devices("Coordinator.OfferRelease", pb.OfferReleaseRequest(target=WEIGHTS, device_id=device_id))
        release = _name(2 if offer.canary else 1)
        asked = pb.OpenSessionRequest(draft_release=release, prompt_tokens=8).SerializeToString()
        named = bytes([_DEVICE_ID << 3 | 2, len(device_id)]) + device_id.encode()
        try:
            opened = await devices("Coordinator.OpenSession", pb.OpenSessionRequest.FromString(asked + named))
        except grpc.aio.AioRpcError:
            return None
        share = canary if offer.canary else stable
        return SessionTelemetry(
            session_id=opened.session_id,
            epoch=opened.primary.epoch_first,
            tenant=tenant,
            draft_release=release,
            positions=POSITIONS,
            first_accepted=sum(self.draw.random() < share for _ in range(POSITIONS)),
        )

    def _verifier(self) -> Caller:
        return Caller(self.coordinator.address, self.lab.join_token)

    def _operator(self) -> Caller:
        return Caller(self.coordinator.address, self.lab.admin_token)


async def _trial(lab: Lab, honest: float, hostile: Sequence[float]) -> tuple[str, int]:
    """Run a trial; return the canary's state at its end, and the number of samples.

    honest: what the canary is like for honest tenants. hostile: what the hostile one shows of canary and stable.
    """
    rounds = lab.size.pick(smoke=1, quick=3, full=12)
    secrets = {"admin_token": lab.admin_token, "join_token": lab.join_token}
    tenants = [HOSTILE, *OTHERS]
    async with lab.a_coordinator("--canary-share", "0.5", tenants=tenants, **secrets) as coordinator:
        trial = _Trial(coordinator, lab, random.Random(7))
        async with lab.under_attack():
            await trial.begin()  # after the quiet time before it, in which a verifier that does not report is forgotten
            left = len(OTHERS) * rounds
            for _ in range(min(RUSH, left)):
                await trial.batch(HOSTILE, *hostile)
                left -= 1
            await asyncio.sleep(1.5)  # a coordinator decides once a second
            for _ in range(rounds):
                for tenant in OTHERS:
                    await trial.batch(tenant, honest, STABLE)
                    if left:
                        await trial.batch(HOSTILE, *hostile)
                        left -= 1
            await asyncio.sleep(DECIDED_S)
        return await trial.state(), trial.samples


def _name(version: int) -> str:
    """Return the hash that stands for a release's file."""
    return hashlib.sha256(b"draft %d" % version).hexdigest()


_SIGNER = Signer.generate()


def _signed(version: int) -> bytes:
    manifest = Manifest(
        version=version,
        weights_hash=WEIGHTS,
        tokenizer_hash=TOKENIZER,
        artifact=f"sha256:{_name(version)}",
        size=1_000,
        quantization="Q8_0",
        created_unix=1e9 + version,
    )
    return manifests.sign(manifest, _SIGNER)
