"""Start and stop the engine process from the front, send it requests, and route its events to streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from google.protobuf.message import DecodeError

from cloud_verifier.config import INSTALL_VLLM, VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.launcher import start_process
from outrider.core.errors import Fenced, ModelRefused, Unavailable
from outrider.core.text import short_id
from outrider.wire.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

Inbox = asyncio.Queue[pb.EngineEvent]

STOP_TIMEOUT_S = 5.0
SILENCE_S = 30.0
"""Seconds after which an engine that sends nothing is killed: more than the longest step takes, a prefill."""
TICK_S = 0.25
"""The longest slice in which an engine's silence is counted, in seconds."""
OVERDUE = 10.0
"""A step that takes so many times as long as it should hangs. Fewer would be too few on a machine that got busy."""
ENGINE_GONE = "the verifier's engine process has ended; resume on another verifier"


def fenced(session_id: str, epoch: int, live: int) -> Fenced:
    """Return the error of a stream whose epoch is not greater than the live one."""
    return Fenced(f"epoch of session {short_id(session_id)} is {epoch}, must be greater than {live}, which is live")


class EngineHost:
    """Runs the engine process, exchanges messages with it over a socket, and passes its events to the inboxes of the
    sessions' live epochs."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._inboxes: dict[str, tuple[int, Inbox]] = {}
        """session id -> its live epoch and the inbox of that epoch's stream"""
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        """Frames of requests that go to the engine once the event loop has run what else is ready."""
        self._pump: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[pb.EngineReady] = asyncio.get_running_loop().create_future()
        self._heard = False
        """Whether the engine has sent any event."""
        self._process_quiet_s = self._loop_quiet_s = 0.0
        """Seconds that this process has run without any event of the engine's, and without one that its loop sent."""
        self._expected_s = 0.0
        """Seconds that the engine's step should take, as it told last."""
        self.stats = pb.EngineStats()
        """The engine's last statistics, at most a quarter of a second old while it runs."""
        self.on_progress: Callable[[str], None] = lambda text: None
        """Called with how far the loading of the target has come."""
        self.on_recorded: Callable[[pb.EngineEvent], None] = lambda event: None
        """Called with the tokens of recorded sessions; the last ones come after the commit that ends a session."""
        self.ended = asyncio.Event()
        """Set when the engine process is gone, whether asked to go or not."""

    @property
    def quiet_ms(self) -> int:
        """Return for how long the engine has given no sign of life, in milliseconds: its process, or its loop, if the
        step should have ended long ago."""
        overdue = self._loop_quiet_s > OVERDUE * self._expected_s
        return round(1000 * (self._loop_quiet_s if overdue else self._process_quiet_s))

    async def start(self) -> pb.EngineReady:
        """Start the process, and return once the target has passed its checks. Raises ModelRefused or Unavailable."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await start_process(self._config, theirs)
        except BaseException:
            ours.close()
            raise
        try:
            return await self.connect(ours)
        except Unavailable:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            python, status = self._config.engine_python, self._process.returncode
            if python is None or self._heard:
                raise
            reason = f"has ended with exit status {status} before the engine began (see above)"
            raise ModelRefused(f"{python} {reason}; {INSTALL_VLLM}") from None

    async def connect(self, sock: socket.socket) -> pb.EngineReady:
        """Talk to the engine over a socket, and wait until it is ready. Raises ModelRefused or Unavailable."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self._pump = asyncio.create_task(self._route(reader))
        return await asyncio.shield(self._ready)  # `stop` needs to know whether it is still loading

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not; while it loads it cannot read, and is killed at once."""
        if self._process is not None:
            loading = self._ready.cancel()
            self.send(pb.EngineRequest(quit=pb.Quit()))
            try:
                await asyncio.wait_for(self._process.wait(), 0.0 if loading else STOP_TIMEOUT_S)
            except TimeoutError:
                self._kill()
                await self._process.wait()
        if self._pump is not None:
            await self._pump
        if self._writer is not None:
            self._writer.close()

    def register(self, session_id: str, epoch: int) -> Inbox:
        """Return an inbox for the events of one epoch, and fence an older epoch of the session.

        Raises Fenced if a stream with this epoch or a greater one is live, Unavailable without an engine.
        """
        if self.ended.is_set():
            raise Unavailable(ENGINE_GONE)
        if session_id in self._inboxes:
            live, older = self._inboxes[session_id]
            if live >= epoch:
                raise fenced(session_id, epoch, live)
            taken = Fenced(f"epoch {epoch} has taken over session {short_id(session_id)}")
            older.put_nowait(ipc.failure_event(taken))
        inbox = Inbox()
        self._inboxes[session_id] = epoch, inbox
        return inbox

    def release(self, session_id: str, epoch: int, inbox: Inbox) -> None:
        """Have the engine free, within one step, all that the session of an ended stream holds.

        The engine gets the Stop even if a later epoch has taken over: it may have refused that one, and would hold this
        one for ever.
        """
        self.send(pb.EngineRequest(session_id=session_id, epoch=epoch, stop=pb.Stop()))
        _, newest = self._inboxes.get(session_id, (0, None))
        if newest is inbox:
            del self._inboxes[session_id]

    def send(self, request: pb.EngineRequest) -> None:
        """Send a request, in one write with others of the same turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(ipc.frame(request))

    def _flush(self) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def drain(self) -> None:
        """Wait while too many requests are queued for the engine. Raises Unavailable without an engine."""
        if self._writer is None:
            return
        try:
            await self._writer.drain()
        except ConnectionError:
            raise Unavailable(ENGINE_GONE) from None

    async def _route(self, reader: asyncio.StreamReader) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            async for event in ipc.read_events(reader):
                self._heard, self._process_quiet_s = True, 0.0
                if event.HasField("alive"):
                    self._expected_s = event.alive.expected_s
                else:
                    self._loop_quiet_s = 0.0
                    self._deliver(event)
        except ConnectionError:
            pass
        except DecodeError as error:
            log.error("the engine process sent a frame that is no event (%s); killing it", error)
            self._kill()
        finally:
            watching.cancel()
            self._engine_gone()

    async def _watch(self) -> None:
        """Kill an engine that hangs.

        Its silence is counted in slices in which this process ran: after a suspension of both processes, which may
        last for hours, a healthy engine has time to send an event.
        """
        tick_s = min(TICK_S, SILENCE_S / 4)
        while self._loop_quiet_s < SILENCE_S:
            await asyncio.sleep(tick_s)
            if self._ready.done():
                self._process_quiet_s += tick_s
                self._loop_quiet_s += tick_s
        log.error("the engine process has been silent for %g s; killing it", SILENCE_S)
        self._kill()
        self._engine_gone()

    def _deliver(self, event: pb.EngineEvent) -> None:
        match event.WhichOneof("kind"):
            case "stats":
                self.stats = event.stats
            case "ready":
                if not self._ready.done():
                    self._ready.set_result(event.ready)
            case "recorded":
                self.on_recorded(event)
            case "progress":
                self.on_progress(event.progress.text)
            case "failure" if not self._ready.done():
                self._ready.set_exception(ipc.error_from_failure(event.failure))
            case "failure" if not event.session_id:
                log.error("the engine process ends: %s", event.failure.message)
            case _:
                epoch, inbox = self._inboxes.get(event.session_id, (0, None))
                if inbox is not None and epoch == event.epoch:
                    inbox.put_nowait(event)

    def _engine_gone(self) -> None:
        """End all streams: sessions resume on another verifier, and the supervisor restarts this one."""
        if self.ended.is_set():
            return
        gone = Unavailable(ENGINE_GONE)
        if not self._ready.done():
            self._ready.set_exception(gone)
        for _, inbox in self._inboxes.values():
            inbox.put_nowait(ipc.failure_event(gone))
        self.ended.set()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
