"""Know the live sessions of a verifier: admit them, have them recorded, and pass on what the coordinator says."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import fenced
from cloud_verifier.front.revocations import Revocations
from cloud_verifier.traffic.recorder import TrafficRecorder
from outrider.core.errors import Draining, OutriderError, Overloaded
from outrider.core.protocol.messages import Directive
from outrider.core.text import counted, short_id
from outrider.wire.ticket import Claims
from outrider.wire.v1 import session_pb2

if TYPE_CHECKING:
    from cloud_verifier.front.session_stream import SessionStream

log = logging.getLogger(__name__)

RETRY_FULL_S = 1.0
"""Seconds after which a device may ask again that was refused because all sessions are taken."""
TOLD_S = 3.0
"""Seconds for which what the coordinator last said of tenants holds."""
RECENT_S = 10.0
"""Seconds after its stream in which a session may come back although tenants wait: its place is kept for as long. A
ticket has so many epochs that this ends."""


class LiveSessions:
    """Knows the live streams of the whole verifier, and admits further ones."""

    def __init__(self, config: VerifierConfig) -> None:
        self.recorder: TrafficRecorder | None = None
        """Records the sessions whose tickets allow it; without one nothing is recorded."""
        self.draining = False
        self.streams: dict[str, SessionStream] = {}
        """session id -> its live stream"""
        self._most = config.max_sessions
        self._all_held_back, self._held_back = False, frozenset[str]()
        """Whether sessions of all tenants, and of which, attach only with a place that is kept for them."""
        self._told_at = self._store_unix = 0.0
        """When the coordinator last said so, by the monotonic clock and by that of its store."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        """session id -> when its stream ended (monotonic clock), of the last `RECENT_S`, the earliest first"""
        self._left = asyncio.Event()
        """Set when a session ends and frees its place."""
        self._release_serial = 0
        """The coordinator's latest serial of the draft releases; 0 if there are none."""

    def refuse_early(self, session_id: str) -> None:
        """Raise Draining or Overloaded for a session that cannot be admitted, before what it asks for is read."""
        if self.draining:
            raise Draining("this verifier is draining and takes no new sessions; ask the coordinator for another")
        if session_id not in self.streams and len(self.streams) >= self._most:
            raise Overloaded(
                f"all {self._most} sessions of this verifier are taken; try again, or ask the coordinator for another",
                retry_after_s=RETRY_FULL_S,
            )

    def admit(self, attach: session_pb2.Attach, claims: Claims, *, record: bool) -> None:
        """Admit an epoch of a session, and have it recorded if so. Raises Draining, Overloaded or Fenced."""
        self.refuse_early(claims.session_id)
        live, epoch = self.streams.get(claims.session_id), attach.epoch
        if live is not None and live.epoch >= epoch:
            raise fenced(claims.session_id, epoch, live.epoch)
        if live is None:
            self._refuse_beyond_share(claims)
        if self.recorder is not None and record:
            self.recorder.begin(attach, claims)

    def begun(self, stream: SessionStream) -> None:
        """Note that an epoch that was admitted is live."""
        self.streams[stream.session_id] = stream
        stream.announce(self._release_serial)  # the device's own knowledge may be old

    def set_directive(self, session_id: str, epoch: int, directive: Directive) -> None:
        """Have a session obey a directive of the coordinator, if it is still here in this epoch."""
        stream = self.streams.get(session_id)
        if stream is not None and stream.epoch == epoch:
            stream.set_directive(directive)

    def end_revoked(self, revocations: Revocations, closed: Sequence[str]) -> bool:
        """End the live sessions whose tickets are valid no longer; return whether there were any.

        closed: those that their devices have closed, of which the coordinator has just told. What is due to a device
        goes first, and its place is free at once.
        """
        for session_id in closed:
            if (stream := self.streams.get(session_id)) is not None:
                revocations.close(stream.claims)
        ended = 0
        for stream in list(self.streams.values()):
            try:
                revocations.check(stream.claims)
            except OutriderError as error:
                log.info("session %s is ended: %s", short_id(stream.session_id), error)
                stream.fail(error)
                self.release(stream)
                ended += 1
        return ended > 0

    def announce(self, serial: int) -> None:
        """Tell each device once that there are draft releases up to this serial."""
        if serial != self._release_serial:
            self._release_serial = serial
            for stream in self.streams.values():
                stream.announce(serial)

    def hand_over(self) -> None:
        """End every live stream with the error that sends its device to its standby; what was committed goes first."""
        if self.streams:
            log.info("handing %s over to other verifiers", counted(len(self.streams), "live session"))
        for stream in self.streams.values():
            stream.fail(Draining("this verifier is draining; resume on another verifier"))

    def release(self, stream: SessionStream) -> None:
        """Release a session in the engine and end its recording; its place is free unless a later epoch has it."""
        stream.close()
        if self.streams.get(stream.session_id) is stream:
            del self.streams[stream.session_id]
            now = time.monotonic()
            self._ended.pop(stream.session_id, None)
            self._ended[stream.session_id] = now
            while next(iter(self._ended.values())) < now - RECENT_S:
                self._ended.popitem(last=False)
            self._left.set()

    def hold_back(self, store_unix: float, everybody: bool, tenants: Collection[str]) -> None:
        """Let sessions attach only with a place that is kept for them: those of everybody, or of these tenants.

        store_unix: the time by the store's clock. It holds until the next call, for a few seconds at most.
        """
        self._all_held_back, self._held_back = everybody, frozenset(tenants)
        self._told_at, self._store_unix = time.monotonic(), store_unix

    async def finished(self) -> None:
        while self.streams:
            self._left.clear()
            await self._left.wait()

    def _refuse_beyond_share(self, claims: Claims) -> None:
        """Raise Overloaded for a stream beyond its tenant's limit, and for a session whose place was given back while
        its tenant may have no new one. A session that was live a moment ago may attach again."""
        tenant, most = claims.tenant, claims.max_streams
        if most and sum(stream.claims.tenant == tenant for stream in self.streams.values()) >= most:
            raise Overloaded(
                f"tenant {tenant} has all the {most} streams that it may have at one verifier; try again once one has"
                " ended",
                retry_after_s=RETRY_FULL_S,
            )
        now = time.monotonic()
        passed_s = now - self._told_at
        if passed_s >= TOLD_S or not (self._all_held_back or tenant in self._held_back):
            return
        recent = self._ended.get(claims.session_id, -math.inf) > now - RECENT_S
        if not recent and claims.place_until_unix < self._store_unix + passed_s:
            why = "tenants wait for places" if self._all_held_back else f"tenant {tenant} has used its tokens up"
            raise Overloaded(
                f"no place is kept for this session, and {why}; resume it at the coordinator", retry_after_s=0.0
            )
