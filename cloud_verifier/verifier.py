"""Run a verifier: start its engine process, serve devices over gRPC, and register at the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

import grpc

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.metrics import VerifierCollector
from cloud_verifier.front.registration import RegistryClient, directives_of, join_token
from cloud_verifier.front.service import VerifierService
from cloud_verifier.traffic.recorder import recorder_of
from outrider.artifacts.model_files import check_gguf, check_target
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.core.text import counted
from outrider.core.vocabulary import token_table, vocabulary_hash
from outrider.llama.trial import try_draft
from outrider.telemetry.prometheus import registry
from outrider.wire.channels import bind, check_bind, is_loopback, server, start
from outrider.wire.health import Health
from outrider.wire.v1 import coordinator_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 3
STATS_DELAY_S = 0.3
"""Seconds after which the engine's statistics, which come every quarter of a second, include a new session."""
FAREWELL_S = 0.5
"""Seconds for streams to tell their devices that the engine has died."""
_ANY = ("0.0.0.0", "::")


class VerifierProcess:
    """Runs an engine process, its gRPC front and its registration. Create it inside a running event loop."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._id = config.verifier_id or f"verifier-{secrets.token_hex(4)}"
        self._host = EngineHost(config)
        self._service = VerifierService(config, self._host, self._id, on_first_rtt=self._hurry_report)
        self._live_sessions = self._service.live
        self._health = Health()
        self._registry: RegistryClient | None = None
        self._drain_ordered = asyncio.Event()
        """Set when an operator wants this process to drain and end."""

    async def run(self, stop: asyncio.Event, at_once: asyncio.Event | None = None) -> int:
        """Serve until `stop` is set, an operator orders a drain or the engine dies; return the exit code.

        stop: take no new sessions, let the live ones go on for `drain_s`, and hand over the others, as an operator's
        order does. at_once: do not wait for live sessions. Raises OutriderError if it cannot start. The settings have
        passed `check_settings`.
        """
        config = self._config
        check_target(config.model, needs_weights=config.engine == "torch")
        for flag, draft in (("--draft", config.draft), ("--server-draft", config.server_draft)):
            if draft is not None:
                check_gguf(draft, flag)
                if why := await asyncio.to_thread(try_draft, draft, flag, config.model / "tokenizer.json"):
                    log.warning("the draft of %s was not tried: %s", flag, why)
        catalogue = Catalogue.of_target(config.model, config.draft)
        if config.traffic:
            self._live_sessions.recorder = recorder_of(config, self._id)
            self._host.on_recorded = self._live_sessions.recorder.take
        metrics: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if config.metrics:
            from outrider.telemetry.metrics_server import serving  # needs starlette and uvicorn

            collector = VerifierCollector(self._host, self._service, config.max_sessions)
            metrics = serving(config.metrics, registry(collector), collector.unready_reason)
        async with metrics:
            grpc_server = server(admit=self._service.admit)
            session_pb2_grpc.add_VerifierServicer_to_server(self._service, grpc_server)  # type: ignore[no-untyped-call]
            port = bind(grpc_server, config.listen, tls=config.tls, insecure=config.insecure)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            return await self._serve(grpc_server, address, catalogue, stop, at_once or asyncio.Event())

    async def _serve(
        self,
        grpc_server: grpc.aio.Server,
        address: str,
        catalogue: Catalogue,
        stop: asyncio.Event,
        at_once: asyncio.Event,
    ) -> int:
        starting = asyncio.create_task(self._start(grpc_server, address, catalogue))
        stopping = asyncio.create_task(_either(stop, self._drain_ordered))
        ended = asyncio.create_task(self._host.ended.wait())
        try:
            # A model takes long to load and a coordinator may not be there: neither holds up a SIGTERM.
            await asyncio.wait({starting, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await asyncio.wait({starting, stopping}, timeout=FAREWELL_S)  # it may know why
            if not starting.done():
                return 0 if stopping.done() else EXIT_ENGINE_DIED
            starting.result()
            return await self._live(grpc_server, stopping, ended, at_once)
        finally:
            for task in (starting, stopping, ended):
                task.cancel()
            await asyncio.wait({starting, stopping, ended})
            if self._registry is not None:
                await self._registry.close()
            await grpc_server.stop(0.0)
            await self._host.stop()
            if (recorder := self._live_sessions.recorder) is not None:
                await asyncio.to_thread(recorder.close)
                if unrecorded := self._host.stats.unrecorded:
                    log.warning("%d tokens went unrecorded: the front did not keep up", unrecorded)

    async def _start(self, grpc_server: grpc.aio.Server, address: str, catalogue: Catalogue) -> None:
        """Load the target, then admit devices. Until then answer health checks and refuse everything else."""
        self._health.add_to(grpc_server)
        await start(grpc_server)
        ready = await self._host.start()
        digest = vocabulary_hash(token_table((self._config.model / "tokenizer.json").read_bytes()))
        ready.target.tokenizer_hash = f"sha256:{digest.hex()}"
        if self._config.coordinator:
            self._registry = RegistryClient(
                self._config,
                coordinator_pb2.RegisterRequest(
                    verifier_id=self._id,
                    address=self._config.advertise or address,
                    tls=self._config.tls is not None,
                    target=ready.target,
                    capacity_sessions=self._config.max_sessions,
                ),
                self._service.counters,
            )
            await self._registry.register()
        authorise = self._registry.authorise if self._registry else _everybody
        self._service.serve(ready, catalogue, vocabulary_hash=digest, authorise=authorise)
        self._health.serving = True
        print(f"listening on {address}", flush=True)

    def _hurry_report(self) -> None:
        """Report soon, as the coordinator may know sessions like a new one: once the engine's statistics include it."""
        if self._registry is not None:
            asyncio.get_running_loop().call_later(STATS_DELAY_S, self._registry.hurry)

    async def _live(
        self,
        grpc_server: grpc.aio.Server,
        stopping: asyncio.Task[None],
        ended: asyncio.Task[bool],
        at_once: asyncio.Event,
    ) -> int:
        """Serve until `stopping` or `ended` is done, then drain; return the exit code."""
        reporting = asyncio.create_task(self._keep_reporting())
        await asyncio.wait({stopping, ended, reporting}, return_when=asyncio.FIRST_COMPLETED)
        self._live_sessions.draining = True
        self._health.serving = False
        if stopping.done() and not self._host.ended.is_set():
            await self._drain(ended, at_once)
        died = self._host.ended.is_set()
        reporting.cancel()
        await asyncio.wait({reporting})
        self._live_sessions.hand_over()
        if self._registry is not None:
            await self._registry.leave()
        await grpc_server.stop(FAREWELL_S)
        if not reporting.cancelled():
            reporting.result()  # it never ends but by a defect, which is raised here
        if died:
            log.error("the engine process has ended by itself; its sessions resume on other verifiers")
        return EXIT_ENGINE_DIED if died else 0

    async def _drain(self, ended: asyncio.Task[bool], at_once: asyncio.Event) -> None:
        """Let live sessions go on, with their places and reports, until they end or `drain_s` or `at_once` ends it."""
        if self._live_sessions.streams:
            live = counted(len(self._live_sessions.streams), "live session")
            log.info("draining: %s may take %g s to finish", live, self._config.drain_s)
        else:
            log.info("draining: no session is live")
        if self._registry is not None:
            self._registry.hurry()
        finished = asyncio.create_task(self._live_sessions.finished())
        hurried = asyncio.create_task(at_once.wait())
        await asyncio.wait(
            {finished, hurried, ended}, timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        finished.cancel()
        hurried.cancel()

    async def _keep_reporting(self) -> None:
        """Report to the coordinator and obey its answers, until cancelled."""
        if self._registry is None:
            await asyncio.Event().wait()
            return
        while True:
            report = _report_of(self._service, self._host)
            report.verifier.clock_ahead_s = self._registry.clock_ahead_s
            answer = await self._registry.report(report)
            if answer.known:
                self._service.counters.told()
                self._live_sessions.hold_back(answer.store_unix, answer.contended, answer.exhausted_tenants)
            for session_id, epoch, directive in directives_of(answer):
                self._live_sessions.set_directive(session_id, epoch, directive)
            if self._live_sessions.end_revoked(self._registry.revocations, answer.closed):
                self._registry.hurry()  # their places are free
            if answer.drain and not self._drain_ordered.is_set():
                log.info("an operator has asked this verifier to drain and end")
                self._drain_ordered.set()
            self._live_sessions.announce(self._registry.release_serial)
            await self._registry.pause()


def check_settings(config: VerifierConfig) -> None:
    """Raise BadRequest for settings that cannot be, before a model is fetched or loaded.

    Strangers must not open sessions from other machines, and devices must not get an address that they cannot connect
    to. Only tickets tell customers from strangers; TLS does not.
    """
    check_bind(config.listen, config.tls, config.insecure)
    if not (config.coordinator or config.open_to_all or is_loopback(config.listen)):
        raise BadRequest(
            f"--listen {config.listen} is beyond this machine and without a coordinator there are no tickets; give"
            " --coordinator HOST:PORT, or --open-to-all to serve everybody who can reach it",
            field="coordinator",
        )
    host, _ = split_address(config.listen)
    if config.coordinator and not config.advertise and host in _ANY:
        raise BadRequest(
            f"--listen {config.listen} is every interface; say with --advertise HOST:PORT under which"
            " address devices reach this verifier",
            field="advertise",
        )
    join_token(config)
    for tls in (config.tls, config.coordinator_tls):
        if tls is not None:
            tls.credentials()  # a missing file is named here


async def _either(*events: asyncio.Event) -> None:
    """Return once one of the events is set."""
    waiting = {asyncio.create_task(event.wait()) for event in events}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _everybody(ticket: bytes) -> None:
    """Authorise every session, on a verifier that takes no tickets."""


def _report_of(service: VerifierService, host: EngineHost) -> coordinator_pb2.ReportRequest:
    """Complete the engine's telemetry with what only the front knows."""
    live, counters = service.live, service.counters
    report = coordinator_pb2.ReportRequest(verifier=host.stats.verifier)
    report.tokens_sequence, tokens = counters.batch()
    report.tenant_tokens.update(tokens)
    report.verifier.live_sessions, report.verifier.draining = len(live.streams), live.draining
    for measured in host.stats.sessions:
        stream = live.streams.get(measured.session_id)
        # The statistics are a moment old: a session that has left, or attached again, must not be counted by them.
        if stream is not None and stream.epoch == measured.epoch:
            session = report.sessions.add()
            session.CopyFrom(measured)
            session.tenant, session.traffic_class = stream.claims.tenant, stream.claims.traffic_class
            session.rtt_ms, session.draft_ms = stream.rtt_ms, stream.draft_ms
    return report
