"""The verifier's process: an engine, its gRPC front, and its registration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.metrics import VerifierCollector
from cloud_verifier.front.registration import Registration
from cloud_verifier.front.service import VerifierService
from cloud_verifier.front.startup import Gate, Progress
from cloud_verifier.traffic.recorder import Recorder
from outrider.core.errors import BadRequest
from outrider.core.tokenizer_json import token_table
from outrider.core.vocabulary import vocabulary_hash
from outrider.telemetry.prometheus import registry
from outrider.wire.channels import bind, check_bind, is_loopback, server, split_address
from outrider.wire.telemetry import (
    session_telemetry_from_proto,
    session_telemetry_to_proto,
    verifier_telemetry_from_proto,
    verifier_telemetry_to_proto,
)
from outrider.wire.v1 import coordinator_pb2, session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = session_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name
EXIT_ENGINE_DIED = 3
TOLD_S = 0.3
"""After which the engine's figures, which come every quarter of a second, tell of a new session."""
FAREWELL_S = 0.5
"""For streams to tell their devices that the engine has died."""
_ANY = ("0.0.0.0", "::")


class Verifier:
    """The process: an engine, its front, and its registration."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._id = config.verifier_id or f"verifier-{secrets.token_hex(4)}"
        self._health = health.aio.HealthServicer()
        self._registration: Registration | None = None
        self._recorder: Recorder | None = None
        self._progress = Progress()
        self._gate = Gate(self._progress)
        self._counters = FrontCounters()
        self._figures: VerifierCollector | None = None
        self._ordered = asyncio.Event()
        """An operator wants this process to drain and end."""

    async def run(self, stop: asyncio.Event, at_once: asyncio.Event | None = None) -> int:
        """Serve until `stop` is set, an operator says so or the engine dies; the exit code.

        stop: take no new sessions, let the live ones go on for `drain_s`, hand over the others; so does an operator's
        order. at_once: do not wait. Raises OutriderError where it cannot start.
        """
        check_bind(self._config.listen, self._config.tls, self._config.insecure)
        self._check_open()
        self._check_advertised()
        for tls in (self._config.tls, self._config.coordinator_tls):
            if tls is not None:
                tls.credentials()  # a missing file is told before a model is loaded
        catalogue = Catalogue.of_target(self._config.model, self._config.draft)
        self._recorder = self._traffic()
        host = EngineHost(self._config, on_progress=self._progress)
        self._figures = VerifierCollector(host, self._counters, None, self._recorder, self._config.max_sessions)
        async with _watched(self._figures, self._config.metrics):
            return await self._serve(host, catalogue, stop, at_once or asyncio.Event())

    async def _serve(self, host: EngineHost, catalogue: Catalogue, stop: asyncio.Event, at_once: asyncio.Event) -> int:
        grpc_server = server()
        starting = asyncio.create_task(self._start(host, grpc_server, catalogue))
        stopping = asyncio.create_task(_either(stop, self._ordered))
        ended = asyncio.create_task(host.ended.wait())
        try:
            # A model takes long to load and a coordinator may not be there: neither holds up a SIGTERM.
            await asyncio.wait({starting, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await asyncio.wait({starting, stopping}, timeout=FAREWELL_S)  # it may know why
            if not starting.done():
                return 0 if stopping.done() else EXIT_ENGINE_DIED
            return await self._live(grpc_server, starting.result(), host, stopping, at_once)
        finally:
            for task in (starting, stopping, ended):
                task.cancel()
            await asyncio.wait({starting, stopping, ended})
            if self._registration is not None:
                await self._registration.close()
            await grpc_server.stop(0.0)
            await host.stop()
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)
                if host.stats.unrecorded:
                    log.warning("%d tokens went unrecorded: the front did not keep up", host.stats.unrecorded)

    def _check_open(self) -> None:
        """Only a coordinator's tickets tell a customer from a stranger; TLS does not. Raises BadRequest."""
        config = self._config
        if not (config.coordinator or config.open_to_all or is_loopback(config.listen)):
            raise BadRequest(
                f"--listen {config.listen} is beyond this machine and without a coordinator there are no tickets; give"
                " --coordinator HOST:PORT, or --open-to-all to serve everybody who can reach it",
                field="coordinator",
            )

    def _check_advertised(self) -> None:
        """Devices cannot dial "all interfaces". Raises BadRequest."""
        host, _ = split_address(self._config.listen)
        if self._config.coordinator and not self._config.advertise and host in _ANY:
            raise BadRequest(
                f"--listen {self._config.listen} is every interface; say with --advertise HOST:PORT under which address"
                " devices reach this verifier",
                field="advertise",
            )

    def _traffic(self) -> Recorder | None:
        """What records, where there is a log to record to. Raises BadRequest where it cannot."""
        config = self._config
        if not config.traffic:
            return None
        from cloud_verifier.traffic.recorder_factory import KeptRecorder  # needs pyarrow

        if not config.coordinator:
            log.warning("nothing will be recorded: only a coordinator's tickets tell what may be")
        return KeptRecorder(config, self._id)

    async def _start(self, host: EngineHost, grpc_server: grpc.aio.Server, catalogue: Catalogue) -> VerifierService:
        port = bind(grpc_server, self._config.listen, tls=self._config.tls, insecure=self._config.insecure)
        address = f"{self._config.listen.rpartition(':')[0]}:{port}"
        await self._answer(grpc_server)
        reminding = asyncio.create_task(self._progress.still())
        try:
            ready = await host.start()
        finally:
            reminding.cancel()
        service = self._service(host, ready, catalogue, self._config.advertise or address)
        await self._open(service, address)
        return service

    def _service(self, host: EngineHost, ready: Any, catalogue: Catalogue, address: str) -> VerifierService:
        digest = vocabulary_hash(token_table((self._config.model / "tokenizer.json").read_bytes()))
        ready.target.tokenizer_hash = f"sha256:{digest.hex()}"
        if self._config.coordinator:
            self._registration = Registration(
                self._config.coordinator,
                coordinator_pb2.RegisterRequest(
                    verifier_id=self._id,
                    address=address,
                    tls=self._config.tls is not None,
                    target=ready.target,
                    capacity_sessions=self._config.max_sessions,
                ),
                join_token=self._config.join_token.get_secret_value(),
                tls=self._config.coordinator_tls,
                insecure=self._config.insecure,
                counters=self._counters,
            )
        if self._recorder is not None:
            host.on_produced = self._recorder.take
        registration = self._registration
        return VerifierService(
            self._config,
            host,
            ready,
            catalogue,
            verifier_id=self._id,
            vocabulary_hash=digest,
            authorise=registration.authorise if registration else _everybody,
            newcomer=self._introduce,
            recorder=self._recorder,
            counters=self._counters,
        )

    def _introduce(self) -> None:
        """The coordinator may know sessions like the new one: have it decide once the engine's figures tell of it."""
        if self._registration is not None:
            asyncio.get_running_loop().call_later(TOLD_S, self._registration.hurry)

    async def _answer(self, grpc_server: grpc.aio.Server) -> None:
        """Health checks and refusals, before there is a target."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        session_pb2_grpc.add_VerifierServicer_to_server(self._gate, grpc_server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, grpc_server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), grpc_server)
        await grpc_server.start()

    async def _open(self, service: VerifierService, address: str) -> None:
        """The self-test has passed: let devices in."""
        self._gate.service = service
        if self._registration is not None:
            await self._registration.register()
        if self._figures is not None:
            self._figures.service = service
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        print(f"listening on {address}", flush=True)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def _live(
        self,
        grpc_server: grpc.aio.Server,
        service: VerifierService,
        host: EngineHost,
        stopping: asyncio.Task[None],
        at_once: asyncio.Event,
    ) -> int:
        reporting = asyncio.create_task(self._report(service, host))
        ended = asyncio.create_task(host.ended.wait())
        await asyncio.wait({stopping, ended, reporting}, return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        await self._health.enter_graceful_shutdown()
        if stopping.done() and not host.ended.is_set():
            await self._drain(service, ended, at_once)
        died = host.ended.is_set()
        for task in (ended, reporting):
            task.cancel()
        await asyncio.wait({ended, reporting})
        service.hand_over()
        if self._registration is not None:
            await self._registration.leave()
        await grpc_server.stop(FAREWELL_S)
        if not reporting.cancelled():
            reporting.result()  # it never ends but by a defect, and that is told
        if died:
            log.error("the engine process has ended by itself; its sessions resume on other verifiers")
        return EXIT_ENGINE_DIED if died else 0

    async def _drain(self, service: VerifierService, ended: asyncio.Task[bool], at_once: asyncio.Event) -> None:
        """Let live sessions go on, reported with their seats, until they end, `drain_s` is over or nobody can wait."""
        log.info("draining: %d live sessions have %g s to finish", len(service.tenants), self._config.drain_s)
        if self._registration is not None:
            self._registration.hurry()
        finished = asyncio.create_task(service.finished())
        hurried = asyncio.create_task(at_once.wait())
        await asyncio.wait(
            {finished, hurried, ended}, timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        finished.cancel()
        hurried.cancel()

    async def _report(self, service: VerifierService, host: EngineHost) -> None:
        if self._registration is None:
            await asyncio.Event().wait()
            return
        while True:
            told = await self._registration.report(_report(service, host))
            for session_id, epoch, directive in told.steering:
                service.steer(session_id, epoch, directive)
            killed = [session_id for session_id in told.killed if service.kill(session_id)]
            if killed:
                self._registration.hurry()  # their places are free
            if told.drain and not self._ordered.is_set():
                log.info("an operator has told this verifier to drain and end")
                self._ordered.set()
            service.announce(self._registration.release_serial)
            await self._registration.pause()


@contextlib.asynccontextmanager
async def _watched(figures: VerifierCollector, address: str) -> AsyncIterator[None]:
    """Metrics are served at the address, where there is one. Raises Unavailable for a taken one."""
    if not address:
        yield
        return
    from outrider.telemetry.metrics_server import serving  # needs starlette and uvicorn

    async with serving(address, registry(figures), figures.ailing):
        yield


async def _either(*events: asyncio.Event) -> None:
    """Return once one of them is set."""
    waiting = {asyncio.create_task(event.wait()) for event in events}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _everybody(ticket: bytes) -> None:
    """Without a coordinator there are no tickets."""


def _report(service: VerifierService, host: EngineHost) -> coordinator_pb2.ReportRequest:
    """Complete the engine's telemetry with what only the front knows."""
    measured = verifier_telemetry_from_proto(host.stats.verifier)
    verifier = replace(measured, live_sessions=len(service.tenants), draining=service.draining)
    # The engine's figures are a moment old: a session that has left must not take its place once more.
    live = (told for told in host.stats.sessions if told.session_id in service.tenants)
    sessions = [
        replace(
            session,
            tenant=service.tenants[session.session_id],
            rtt_ms=service.rtt_ms.get(session.session_id, 0.0),
            traffic_class=service.traffic_class(session.session_id),
        )
        for session in map(session_telemetry_from_proto, live)
    ]
    return coordinator_pb2.ReportRequest(
        verifier=verifier_telemetry_to_proto(verifier), sessions=map(session_telemetry_to_proto, sessions)
    )
