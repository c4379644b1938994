"""Run further front processes: each serves devices at the verifier's port, over the one engine process.

The kernel spreads connections over the processes that listen at the port (SO_REUSEPORT). What the verifier is asked for
as a whole stays with its own process: registration, places and tenants' shares, revocations, metrics, the traffic log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloud_verifier.config import VerifierConfig
from cloud_verifier.front.control import ControlLink, Handler, failure_of
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.live_sessions import LiveSessions
from cloud_verifier.traffic.recorder import RecordedSession
from outrider.core.errors import BadRequest, OutriderError, Unavailable
from outrider.core.protocol.messages import Directive
from outrider.processes import tied_to_this_process
from outrider.wire import codecs
from outrider.wire.ticket import Claims, claims_from_bytes, claims_to_bytes

log = logging.getLogger(__name__)

MODULE = "cloud_verifier.front.further_process"
RESTART_S = 0.5
"""Seconds after the end of a front until it is started again."""
MOST_ENDS, ENDS_S = 3, 60.0
"""Ends of fronts in so many seconds with which the verifier ends, too: it would serve nobody for long."""
START_S = 60.0
"""Seconds in which a front must begin to serve."""
SILENT_S = 10.0
"""Seconds without a notice after which a front that serves is taken to hang, and is killed: it tells twice a second."""
STOP_S = 5.0


@dataclass(eq=False)
class RemoteStream:
    """Stands for a live stream of a further front."""

    session_id: str
    epoch: int
    claims: Claims
    link: ControlLink
    rtt_ms: float = 0.0

    def set_directive(self, directive: Directive) -> None:
        """Have its process follow a directive."""
        self._tell("directive", directive=codecs.directive_to_proto(directive).SerializeToString().hex())

    def announce(self, serial: int) -> None:
        """Have its process know of draft releases."""
        self.link.tell("announce", serial=serial)

    def fail(self, error: OutriderError) -> None:
        """Have its process end it with `error`."""
        self._tell("fail", failure=failure_of(error))

    def close(self) -> None:
        """Leave the engine to its process."""

    def _tell(self, name: str, **arguments: Any) -> None:
        self.link.tell(name, session_id=self.session_id, epoch=self.epoch, **arguments)


class FurtherFronts:
    """Starts further fronts, starts those again that end, and serves what they ask of the verifier."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        live: LiveSessions,
        counters: FrontCounters,
        authorise: Callable[[bytes], Awaitable[Claims | None]],
        hurry: Callable[[], None],
        options: dict[str, Any],
    ) -> None:
        """hurry: called when a session's round trip is known. options: what each front needs to know besides."""
        self._config = config
        self._live = live
        self._counters = counters
        self._authorise = authorise
        self._hurry = hurry
        self._options = options
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)
        self._links: set[ControlLink] = set()
        self._heard: dict[ControlLink, float] = {}
        """When a front that serves was last heard, by the monotonic clock."""
        self._spawning = asyncio.Lock()
        self._serving = self._draining = False
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once all serve. Raises Unavailable if one does not."""
        loop = asyncio.get_running_loop()
        started: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._config.front_processes - 1)]
        self._running = [asyncio.create_task(self._keep(ready)) for ready in started]
        all_serve = asyncio.gather(*started)
        waiting: set[asyncio.Future[Any]] = {all_serve, *self._running}
        await asyncio.wait(waiting, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not all_serve.done():
            all_serve.cancel()
            lost = any(task.done() for task in self._running)
            await self.close()
            why = "end at once (see above)" if lost else f"do not serve within {START_S:g} s"
            raise Unavailable(f"further front processes {why}")

    async def ended(self) -> None:
        """Return when fronts have ended so often that the verifier should end, too."""
        await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    def serve(self) -> None:
        """Have the fronts tell health checks that they take sessions."""
        self._serving = True
        for link in self._links:
            link.tell("serve")

    def drain(self) -> None:
        """Have the fronts tell health checks that they take no new sessions. One that ends is not started again."""
        self._draining = True
        for link in self._links:
            link.tell("drain")

    async def close(self) -> None:
        """End all fronts."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """Run a front, and another one whenever it ends, until that is too often."""
        while True:
            try:
                how = f"exit status {await self._run(ready)}"
            except OSError as error:
                how = f"it cannot be started: {error.strerror}"
            now = time.monotonic()
            self._ends.append(now)
            log.error("a front process has ended (%s); its sessions attach again", how)
            if self._draining:
                await asyncio.Event().wait()
            if len(self._ends) == MOST_ENDS and now - self._ends[0] < ENDS_S:
                log.error("%d front processes have ended within %g s; ending", MOST_ENDS, ENDS_S)
                return
            await asyncio.sleep(RESTART_S)

    async def _run(self, ready: asyncio.Future[None]) -> int:
        """Run one front to its end; return its exit status."""
        ours, theirs = socket.socketpair()
        link = self._link(ready)
        try:
            with theirs:
                process = await self._spawn(theirs)
        except BaseException:
            ours.close()
            raise
        self._links.add(link)
        serving = asyncio.create_task(link.run(ours))
        waiting = asyncio.create_task(process.wait())
        watching = asyncio.create_task(self._silence(link))
        try:
            await asyncio.wait({serving, waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and process.returncode is None:
                log.error("a front process has said nothing for long; killing it")
                process.kill()
        finally:
            link.tell("end")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), STOP_S)
            if process.returncode is None:
                process.kill()
                await waiting
            self._links.discard(link)
            self._heard.pop(link, None)
            for task in (serving, watching):
                task.cancel()
            await asyncio.wait({serving, watching})
            for stream in list(self._live.streams.values()):
                if isinstance(stream, RemoteStream) and stream.link is link:
                    self._live.left(stream.session_id, stream.epoch)
        return process.returncode or 0

    async def _spawn(self, end: socket.socket) -> asyncio.subprocess.Process:
        """Start a front's process, which a Ctrl-C must not end before it ignores that. One at a time does so: each puts
        the mask of signals back that it found."""
        async with self._spawning:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                return await asyncio.create_subprocess_exec(
                    *tied_to_this_process(),
                    *(sys.executable, "-m", MODULE, str(end.fileno())),
                    json.dumps(self._options),
                    pass_fds=[end.fileno()],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    async def _silence(self, link: ControlLink) -> None:
        """Return once a front does not begin to serve, or has said nothing for long.

        It is counted in slices in which this process ran, as after a suspension of all the fronts have nothing to tell.
        """
        left_s, heard = START_S, None
        while left_s > 0.0:
            await asyncio.sleep(1.0)
            now = self._heard.get(link)
            left_s = left_s - 1.0 if now == heard else SILENT_S
            heard = now

    def _link(self, ready: asyncio.Future[None]) -> ControlLink:
        """Return the link to a front. ready: is done when it first serves."""

        def serves() -> None:
            self._heard[link] = time.monotonic()
            if not ready.done():
                ready.set_result(None)
            if self._serving and not self._draining:
                link.tell("serve")

        def take(claims: str, key_id: str, epoch: int, recorded: dict[str, Any] | None) -> None:
            known = claims_from_bytes(bytes.fromhex(claims), key_id)
            self._live.admit(known, epoch, _recorded_from_json(recorded))
            self._live.begun(RemoteStream(known.session_id, epoch, known, link))

        def tell(rtt_ms: dict[str, float], counts: dict[str, Any]) -> None:
            self._heard[link] = time.monotonic()
            self._counters.add(counts)
            for session_id, measured in rtt_ms.items():
                stream = self._live.streams.get(session_id)
                if isinstance(stream, RemoteStream) and stream.link is link:
                    first, stream.rtt_ms = not stream.rtt_ms, measured
                    if first:
                        self._hurry()

        handlers: dict[str, Handler] = {
            "serves": serves,
            "authorise": self._authorised,
            "take": take,
            "left": self._live.left,
            "tell": tell,
        }
        link = ControlLink(handlers)
        return link

    async def _authorised(self, ticket: str) -> list[str] | None:
        claims = await self._authorise(bytes.fromhex(ticket))
        return None if claims is None else [claims_to_bytes(claims).hex(), claims.key_id]


def recorded_to_json(recorded: RecordedSession | None) -> dict[str, Any] | None:
    """Return what is recorded of a session as JSON."""
    return None if recorded is None else vars(recorded) | {"prompt": recorded.prompt.tolist()}


def _recorded_from_json(found: dict[str, Any] | None) -> RecordedSession | None:
    if found is None:
        return None
    return RecordedSession(**(found | {"prompt": np.array(found["prompt"], np.int32)}))


@contextlib.contextmanager
def engine_listener() -> Iterator[tuple[socket.socket, Path]]:
    """Yield a socket at which further fronts connect to the engine, and its path, which only this user may open.

    Raises BadRequest where the folder for temporary files cannot have such a path.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-verifier-") as folder:
        path = Path(folder, "engine")
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(os.fspath(path))
            except OSError as error:
                raise BadRequest(f"front processes cannot share {path}: {error}; set TMPDIR to a short path") from error
            listener.listen()
            yield listener, path
