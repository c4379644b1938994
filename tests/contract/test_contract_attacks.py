"""Test what attackers reach: others are served, memory stays bounded, devices live, and drafts are judged aright."""

from __future__ import annotations

import contextlib
import math
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from publishing import Publisher, copy_of, shown
from raw_http2 import UnfinishedMessages
from shared_cluster import ADMIN, JOIN, Cluster, bearer
from small_pair import DRAFT, NARROW, TARGET

from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

PROMPT = "def area(width, height):\n"
MOST_GROWTH = 250 << 20
"""Bytes that all processes of the cluster together may grow by; what an attacker sends is several times as much."""


@contextlib.contextmanager
def others_are_served(cluster: Cluster) -> Iterator[None]:
    """Check at the end of the context that a new device gets its text and an operator an answer, in bounded memory."""
    before = cluster.up.memory
    yield
    with cluster.client(cache=f"cache-{secrets.token_hex(4)}") as other:
        for seed in range(4):  # so that each of the verifiers serves one
            assert len(other.generate(PROMPT, max_tokens=16, ignore_eos=True, seed=seed, timeout=180).token_ids) == 16
    assert len(cluster.verifiers()) == 2
    assert cluster.up.memory - before < MOST_GROWTH


def addresses(cluster: Cluster) -> list[str]:
    """Return where the coordinator and each verifier listen."""
    return [cluster.address, *(one.address for one in cluster.verifiers().values())]


@pytest.mark.parametrize("kind", ["watch", "reflection"])
def test_a_thousand_health_watches_or_reflections_on_one_connection_leave_others_served(
    cluster: Cluster, kind: str
) -> None:
    with contextlib.ExitStack() as stack:
        calls: list[Any] = []
        with others_are_served(cluster):
            for address in addresses(cluster):
                channel = stack.enter_context(grpc.insecure_channel(address))
                if kind == "watch":
                    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
                    calls += [watch(b"") for _ in range(1_000)]
                else:
                    reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
                    calls += [reflect(iter([b"\x3a\x00"])) for _ in range(1_000)]  # list_services
                grpc.channel_ready_future(channel).result(60)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("path", ["Verifier/Session", "Coordinator/OpenSession"])
def test_unfinished_first_messages_of_strangers_leave_others_served_and_memory_bounded(
    cluster: Cluster, path: str
) -> None:
    verifier = path.startswith("Verifier")
    where = addresses(cluster)[1:] if verifier else [cluster.address]
    with others_are_served(cluster), contextlib.ExitStack() as stack:
        floods = [UnfinishedMessages(one, f"/outrider.wire.v1.{path}", 200, 4 << 20) for one in where]
        for flood in floods:
            stack.callback(flood.close)
        with ThreadPoolExecutor(len(floods)) as pool:
            list(pool.map(lambda flood: flood.run(3.0), floods))
        with others_are_served(cluster):
            pass


def test_idle_connections_leave_others_served(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack, others_are_served(cluster):
        for address in addresses(cluster):
            host, _, port = address.rpartition(":")
            for _ in range(600):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=60))


# --- model files


def damaged(kind: str) -> bytes:
    """Return the bytes of a draft that is damaged in this way."""
    whole = DRAFT.read_bytes()
    random = np.random.default_rng(7)
    match kind:
        case "cut off":
            return whole[: len(whole) // 2]
        case "no model at all":
            return random.bytes(100_000)
        case "a huge count of tensors":
            return whole[:8] + (1 << 60).to_bytes(8, "little") + whole[16:]
        case "a huge length of a name":
            return whole[:24] + (1 << 62).to_bytes(8, "little") + whole[32:]
        case "noise in its header":
            header = bytearray(whole)
            for at in random.integers(8, 4_000, 60):
                header[at] ^= 0xFF
            return bytes(header)
        case _:
            return b""


@pytest.mark.parametrize(
    "kind",
    [
        *("cut off", "no model at all", "a huge count of tensors", "a huge length of a name", "noise in its header"),
        "empty",
    ],
)
def test_a_damaged_model_file_is_refused_with_a_clear_error_and_kills_no_device(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damaged(kind))
    where = ("--coordinator", cluster.address, "--target", "pair", "--max-tokens", 8)
    code, out, err = cluster.run("outrider-edge", "generate", PROMPT, *where, "--draft", file)
    assert code > 0 and out == ""  # below 0 a signal has ended it
    assert "damaged.gguf" in err and "Traceback" not in err


# --- drafts on trial


class Crowd:
    """Imitates a verifier of another target, and the sessions of its tenants, by the protocol's messages alone."""

    def __init__(self, cluster: Cluster, weights: str, tokenizer: str, channel: grpc.Channel) -> None:
        self._coordinator = coordinator_pb2_grpc.CoordinatorStub(channel)
        self._registry = coordinator_pb2_grpc.RegistryStub(channel)
        self._target = session_pb2.TargetIdentity(name="crowd", weights_hash=weights, tokenizer_hash=tokenizer)
        self._random = np.random.default_rng(3)
        self._devices: dict[bool, list[str]] = {True: [], False: []}
        """Whether they are offered the canary -> ids of devices."""
        self._registered = -math.inf
        self._register()

    def _register(self) -> None:
        """Register, or stay so: a busy machine may take longer for a round of sessions than the lease lasts."""
        if time.monotonic() - self._registered > 1.0:
            request = pb.RegisterRequest(
                verifier_id="crowd", address="127.0.0.1:9", target=self._target, capacity_sessions=4_000, instance=1
            )
            self._registry.Register(request, metadata=bearer(JOIN))
            self._registered = time.monotonic()

    def draw_devices(self, key: str, count: int) -> None:
        """Find so many devices that are offered the canary, and as many that are not."""
        while min(map(len, self._devices.values())) < count:
            device = secrets.token_hex(8)
            request = pb.OfferReleaseRequest(target=self._target.weights_hash, device_id=device)
            self._devices[self._coordinator.OfferRelease(request, metadata=bearer(key)).canary].append(device)

    def open(self, key: str, tenant: str, release: str, acceptance: float, *, canary: bool) -> SessionTelemetry:
        """Open a session of a device that drafts with a release, and return what its verifier has measured of it."""
        self._register()
        device = self._random.choice(self._devices[canary])
        request = pb.OpenSessionRequest(target="crowd", draft_release=release, device_id=device)
        opened = self._coordinator.OpenSession(request, metadata=bearer(key))
        accepted = int(self._random.binomial(100, acceptance))
        return SessionTelemetry(
            session_id=opened.session_id,
            epoch=opened.primary.epoch_first,
            tenant=tenant,
            steps=50,
            committed=100,
            evaluated=100,
            accepted=accepted,
            draft_release=release,
            positions=100,
            first_accepted=accepted,
        )

    def report(self, sessions: list[SessionTelemetry]) -> None:
        self._register()
        telemetry = VerifierTelemetry(live_sessions=len(sessions), step_ms=10.0)
        request = pb.ReportRequest(verifier_id="crowd", instance=1, verifier=telemetry, sessions=sessions)
        assert self._registry.Report(request, metadata=bearer(JOIN)).known

    def leave(self) -> None:
        self._registry.Deregister(pb.DeregisterRequest(verifier_id="crowd", instance=1), metadata=bearer(JOIN))


HONEST = ("ann", "ben", "cas", "dee", "eve")


@pytest.fixture(scope="module")
def tenants(cluster: Cluster) -> dict[str, str]:
    """Return the keys of five honest tenants and a liar."""
    return {name: cluster.update_tenant(name, "CREATE") for name in (*HONEST, "liar")}


@pytest.mark.parametrize(
    ("canary_acceptance", "decision"),
    [(0.3, "rolled back"), pytest.param(0.75, "stable", marks=pytest.mark.nightly("the liar does less harm here"))],
)
def test_a_tenant_that_lies_about_half_of_the_traffic_decides_no_trial_of_a_draft(
    cluster: Cluster, tmp_path: Path, tenants: dict[str, str], canary_acceptance: float, decision: str
) -> None:
    """The stable draft's acceptance is 0.6; the liar's sessions claim the opposite of what the others show."""
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    with next(target.glob("*.safetensors")).open("r+b") as weights:  # other weights are another target
        weights.seek(-8, 2)
        weights.write(secrets.token_bytes(4))
    publisher = Publisher(cluster, tmp_path, target)
    stable = publisher.publish(copy_of(DRAFT, tmp_path))
    cluster.outrider("releases", "promote", stable)
    canary = publisher.publish(copy_of(NARROW, tmp_path))
    known = shown(cluster, canary)
    claims = {True: 0.95, False: 0.05} if decision == "rolled back" else {True: 0.05, False: 0.95}
    with grpc.insecure_channel(cluster.address) as channel:
        crowd = Crowd(cluster, known["weights_hash"], known["tokenizer_hash"], channel)
        try:
            crowd.draw_devices(tenants["ann"], 8)
            for _ in range(60):
                sessions = []
                for on_trial in (True, False):
                    release = canary if on_trial else stable
                    for name in HONEST:
                        truth = canary_acceptance if on_trial else 0.6
                        sessions += [crowd.open(tenants[name], name, release, truth, canary=on_trial) for _ in range(2)]
                    lies = [
                        crowd.open(tenants["liar"], "liar", release, claims[on_trial], canary=on_trial)
                        for _ in range(10)
                    ]
                    sessions += lies
                crowd.report(sessions)
                if (state := state_of(channel, canary)) != pb.RELEASE_STATE_CANARY:
                    break
        finally:
            crowd.leave()
    expected = {"rolled back": pb.RELEASE_STATE_ROLLED_BACK, "stable": pb.RELEASE_STATE_STABLE}
    assert state == expected[decision]


def state_of(channel: grpc.Channel, release: str) -> int:
    request = pb.ListReleasesRequest(release=release)
    [found] = coordinator_pb2_grpc.AdminStub(channel).ListReleases(request, metadata=bearer(ADMIN)).releases
    return found.state
