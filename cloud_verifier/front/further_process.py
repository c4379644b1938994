"""Serve devices in a further front process. The verifier's process starts it; it is no command for users.

    python -m cloud_verifier.front.further_process FD OPTIONS_JSON

FD is the socket to the verifier's process, and the options are those that `FurtherFronts` was given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import EngineLink
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.control import ControlLink, error_of
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.event_loop import calm_garbage_collector, run_front
from cloud_verifier.front.further import recorded_to_json
from cloud_verifier.front.live_sessions import LiveSessions, LiveStream
from cloud_verifier.front.service import VerifierService
from cloud_verifier.front.startup import StartupService, add_services, set_serving
from cloud_verifier.traffic.recorder import RecordedSession
from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import Directive
from outrider.processes import leave, trim_freed_memory
from outrider.telemetry import traces
from outrider.telemetry.logs import configure
from outrider.wire import codecs
from outrider.wire.channels import bind, server, start
from outrider.wire.health import HealthServicer
from outrider.wire.strangers import Strangers
from outrider.wire.ticket import Claims, claims_from_bytes, claims_to_bytes
from outrider.wire.v1 import session_pb2

log = logging.getLogger(__name__)

TELL_S = 0.5
"""Seconds between two notices of round trips and counts to the verifier's process."""
FAREWELL_S = 0.5
"""Seconds for streams to tell their devices that the verifier ends."""


class SharedSessions(LiveSessions):
    """Knows this front's live sessions; the verifier's process knows all, and admits them."""

    def __init__(self, config: VerifierConfig, link: ControlLink) -> None:
        super().__init__(config)
        self._link = link
        self._records = bool(config.traffic)
        self._admitted: dict[tuple[str, int], list[Callable[[LiveStream], None]]] = {}
        """What to do with streams that are admitted and have not begun, by session and epoch."""

    @property
    def records(self) -> bool:
        return self._records

    async def take(self, claims: Claims, epoch: int, recorded: RecordedSession | None) -> None:
        self._admitted[claims.session_id, epoch] = []
        try:
            await self._link.ask(
                "take",
                claims=claims_to_bytes(claims).hex(),
                key_id=claims.key_id,
                epoch=epoch,
                recorded=recorded_to_json(recorded),
            )
        except BaseException as error:
            self._admitted.pop((claims.session_id, epoch), None)
            if isinstance(error, asyncio.CancelledError):  # the device has gone meanwhile
                self._link.tell("left", session_id=claims.session_id, epoch=epoch)
            raise

    def begun(self, stream: LiveStream) -> None:
        super().begun(stream)
        for act in self._admitted.pop((stream.session_id, stream.epoch), ()):
            act(stream)

    def on_stream(self, session_id: str, epoch: int, act: Callable[[LiveStream], None]) -> None:
        """Do something with an epoch's stream: now, or once it has begun if it was admitted a moment ago."""
        stream = self.streams.get(session_id)
        if stream is not None and stream.epoch == epoch:
            act(stream)
        elif (later := self._admitted.get((session_id, epoch))) is not None:
            later.append(act)

    def left(self, session_id: str, epoch: int) -> None:
        super().left(session_id, epoch)
        self._admitted.pop((session_id, epoch), None)
        self._link.tell("left", session_id=session_id, epoch=epoch)


class FurtherFront:
    """Serves devices over the engine process of another process, as that one says."""

    def __init__(self, config: VerifierConfig, options: dict[str, Any]) -> None:
        """options: what `FurtherFronts` was given."""
        self._config = config
        self._options = options
        self._health = HealthServicer()
        self._counters = FrontCounters()
        self._end = asyncio.Event()
        self._link = ControlLink(
            {
                "directive": self._direct,
                "announce": lambda serial: self._live.announce(serial),
                "fail": self._fail,
                "serve": lambda: set_serving(self._health),
                "drain": self._health.enter_graceful_shutdown,
                "end": self._end.set,
            }
        )
        self._live = SharedSessions(config, self._link)
        self._engine = EngineLink(math.inf)  # the verifier's process ends an engine that hangs
        self._told_rtt: dict[str, float] = {}

    async def run(self, control: socket.socket) -> None:
        """Serve until the verifier's process says so or goes, or the engine does."""
        link = asyncio.create_task(self._link.run(control))
        serving = asyncio.create_task(self._serve())
        ends = [asyncio.create_task(event.wait()) for event in (self._end, self._engine.ended)]
        await asyncio.wait({link, serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait({serving})
        await self._link.close()
        if not serving.cancelled():
            serving.result()

    async def _serve(self) -> None:
        catalogue = Catalogue.of_target(self._config.model, self._config.draft)  # the engine would wait for a hash
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._options["engine"])
        ready = await self._engine.connect(sock)
        ready.target.tokenizer_hash = self._options["tokenizer_hash"]
        strangers = Strangers(self._config.host_connections, self._config.max_connections)
        startup = StartupService()
        startup.service = VerifierService(
            self._config,
            self._engine,
            ready,
            catalogue,
            verifier_id=self._options["verifier_id"],
            vocabulary_hash=bytes.fromhex(ready.target.tokenizer_hash.removeprefix("sha256:")),
            authorise=self._authorise,
            on_first_rtt=self._tell,
            live=self._live,
            counters=self._counters,
            strangers=strangers,
        )
        grpc_server = server(
            max_connections=self._config.max_connections, admit=startup.admit, strangers=strangers, shared=True
        )
        await add_services(startup, self._health, grpc_server, reflected=self._config.reflection)
        address = self._options["address"]
        port = bind(grpc_server, address, tls=self._config.tls, insecure=self._config.insecure, shared=True)
        await start(grpc_server)
        self._link.tell("serves")
        try:
            async with strangers.bounded(port):
                while True:
                    await asyncio.sleep(TELL_S)
                    self._tell()
        finally:
            self._live.hand_over()
            await grpc_server.stop(FAREWELL_S)
            self._tell()
            await self._engine.close()

    async def _authorise(self, ticket: bytes) -> Claims | None:
        if not self._config.coordinator:
            return None
        answer = await self._link.ask("authorise", ticket=ticket.hex())
        return None if answer is None else claims_from_bytes(bytes.fromhex(answer[0]), answer[1])

    def _tell(self) -> None:
        """Tell the verifier's process which round trips are new, and what was counted since the last time."""
        rtt_ms = {name: stream.rtt_ms for name, stream in self._live.streams.items()}
        changed = {name: value for name, value in rtt_ms.items() if value != self._told_rtt.get(name, 0.0)}
        self._told_rtt = rtt_ms
        self._link.tell("tell", rtt_ms=changed, counts=self._counters.take())

    def _direct(self, session_id: str, epoch: int, directive: str) -> None:
        message = codecs.built(Directive, session_pb2.Directive.FromString(bytes.fromhex(directive)))
        self._live.on_stream(session_id, epoch, lambda stream: stream.set_directive(message))

    def _fail(self, session_id: str, epoch: int, failure: dict[str, Any]) -> None:
        self._live.on_stream(session_id, epoch, lambda stream: stream.fail(error_of(failure)))


async def _run(config: VerifierConfig, options: dict[str, Any], control: socket.socket) -> None:
    await FurtherFront(config, options).run(control)


def main() -> None:
    """Serve as the verifier's process says, and end with it."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the verifier's process drains, and says when to end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    trim_freed_memory()
    options = json.loads(sys.argv[2])
    config = VerifierConfig.model_validate_json(options.pop("config"))
    configure(config.log_format, "front")
    calm_garbage_collector()
    traces.configure("verifier")
    try:
        run_front(lambda: _run(config, options, socket.socket(fileno=int(sys.argv[1]))))
    except OutriderError as error:
        log.error("%s", error)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
