"""Drive one session: attach to verifiers, deliver what they commit, and keep the draft in step with them.

The event loop owns the DeviceSession, a worker thread owns the draft. A commit goes to the client before anything else
happens. What the draft proposes comes in by callback and leaves in paced messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.session.channels import Channels
from edge_agent.session.failover import Route
from edge_agent.session.send_pacing import SendPacing
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import Received, VerifierStream
from outrider.core.errors import InternalError, OutriderError, ProtocolViolation
from outrider.core.protocol.device import Delivery, DeviceSession, ReattachNeeded
from outrider.core.protocol.messages import Commit, Directive, Finish, Open, Opened, SessionLimits
from outrider.core.text import short_id
from outrider.telemetry import logs, traces
from outrider.wire.checks import limits_of
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1.coordinator_pb2 import Grant

log = logging.getLogger(__name__)

_UNKNOWN = SessionLimits(nodes=0)
"""Limits of a session whose verifier has not said its own: nothing is drafted."""


class SessionDriver:
    """Runs one session from Open to its end.

    draft: drafts for it as long as the session runs. statistics: has the session's id. announced: the draft release for
    which the session was opened, as its ticket says. on_release_notice: receives the serial of the cluster's draft
    releases, which grows with every change.
    """

    def __init__(
        self,
        session: DeviceSession,
        draft: DraftSession,
        route: Route,
        channels: Channels,
        statistics: Statistics,
        *,
        vocabulary_hash: bytes = b"",
        announced: str = "",
        on_release_notice: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._session = session
        self._draft = draft
        self._route = route
        self._channels = channels
        self._statistics = statistics
        self._vocabulary_hash = vocabulary_hash
        self._opened_for = announced
        self._on_release_notice = on_release_notice
        session.limits = _UNKNOWN
        self._pacing = SendPacing(session, draft, channels, statistics)
        self._deliveries: asyncio.Queue[Delivery | OutriderError] = asyncio.Queue()
        self._stream: VerifierStream | None = None
        self._announced = ""
        """The release that the verifier knows to propose the nodes."""
        self.winding_down: asyncio.Task[None] | None = None
        """The rest of the session's work after `deliveries` has ended; await or cancel it before the loop ends."""
        self._note_draft()

    async def deliveries(self) -> AsyncGenerator[Delivery, None]:
        """Yield what the verifier commits, in order, until the sequence ends. Closing the iterator cancels the session.

        Raises the error of a session that can be attached nowhere.
        """
        runner = asyncio.create_task(self._run())
        try:
            while True:
                item = await self._deliveries.get()
                if isinstance(item, OutriderError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            self._stop()
            self.winding_down = asyncio.create_task(_wind_down(runner))

    def cancel(self) -> None:
        """End the session from outside: `deliveries` ends with a cancelled one, whatever it waits for."""
        self._stop()
        self._deliveries.put_nowait(Delivery((), (), (), (), Finish.CANCELLED))

    # --- attaching

    async def _run(self) -> None:
        """Attach until the sequence has ended; an error that no attach can mend goes to the client."""
        session_id = self._statistics.session_id
        logs.note(session=session_id)
        try:
            with traces.span("outrider.device.session", session_id=short_id(session_id)):
                while not self._session.finished:
                    grant, epoch = await self._route.next()
                    with traces.span("outrider.device.attach", epoch=epoch):
                        await self._attach(grant, epoch)
        except OutriderError as error:
            self._deliveries.put_nowait(error)
        except Exception as error:
            log.exception("a session's driver failed")
            self._deliveries.put_nowait(InternalError(f"the session's driver failed: {type(error).__name__}: {error}"))

    async def _attach(self, grant: Grant, epoch: int) -> None:
        """Run one stream from Open to its end. Returns where the session is over or another attach may help."""
        before = self._session.progress
        self._statistics.attached(grant.address)
        try:
            async with VerifierStream(self._channels, grant, self._statistics, self._draft.level_ms) as stream:
                self._open(stream, epoch, limits_of(grant.limits) if grant.HasField("limits") else None)
                while not self._session.finished:
                    self._handle(await stream.receive())
        except OutriderError as error:
            if self._session.finished:
                return
            log.info("attach with epoch %d at %s ended: %s", epoch, grant.address, error)
            self._statistics.attach_failure = str(error)
            self._route.failed(error, progressed=self._session.progress > before)
        finally:
            self._stream = None
            self._pacing.close()

    def _open(self, stream: VerifierStream, epoch: int, limits: SessionLimits | None) -> None:
        """Send Open before the draft reads the prompt, so that the verifier reads it meanwhile.

        Appends may follow at once where the limits are known: from the ticket, or from an earlier attach.
        """
        limits = limits or self._session.limits
        attach = self._session.attach(epoch, limits)
        session_id = self._statistics.session_id
        stream.open(Open(session_id=session_id, attach=attach, vocabulary_hash=self._vocabulary_hash))
        self._stream, self._announced = stream, self._opened_for
        if not self._draft.begun:
            self._draft.begin(self._pacing.plan, self._on_draft_change, self._statistics.swaps_s.append)
        if limits.nodes:
            self._begin_appending(stream)

    def _begin_appending(self, stream: VerifierStream) -> None:
        """Send the nodes that survived before another release is announced, since they may be the former one's."""
        self._pacing.open(stream)
        self._announce_draft()

    # --- what the verifier says

    def _handle(self, message: Received) -> None:
        match message:
            case Commit():
                self._on_commit(message)
            case Opened():
                self._on_opened(message)
            case Directive():
                self._pacing.replan(message)
            case pb.Ping():
                self._statistics.rtt_ms = message.rtt_ms
                self._pacing.replan()
            case pb.ReleaseNotice():
                self._on_release_notice(message.serial)

    def _on_opened(self, opened: Opened) -> None:
        if opened.epoch != self._session.epoch:
            raise ProtocolViolation(f"opened.epoch is {opened.epoch}, must be {self._session.epoch}", field="epoch")
        if opened.vocabulary_size:  # 0 from a verifier that does not say
            self._draft.vocabulary_size = opened.vocabulary_size
        self._adopt(limits_of(opened.limits))
        self._pacing.replan(opened.directive)
        if self._stream is not None and not self._pacing.is_open:
            self._begin_appending(self._stream)
        else:
            self._pacing.flush()

    def _adopt(self, limits: SessionLimits) -> None:
        """Keep to the verifier's limits. Raises ReattachNeeded where the tree was grown or sent under larger ones."""
        before = self._session.limits
        smaller = limits.nodes < before.nodes or limits.depth < before.depth or limits.in_flight < before.in_flight
        self._session.limits = limits
        if smaller and (self._pacing.is_open or len(self._session.tree)):
            raise ReattachNeeded(f"the verifier allows {limits}, the device began with {before}")

    def _on_commit(self, commit: Commit) -> None:
        """Deliver to the client first, then answer the verifier, then inform the draft: each step delays the next."""
        size = self._draft.vocabulary_size
        if commit.epoch == self._session.epoch and max(commit.token, default=0) >= size:
            raise ProtocolViolation(
                f"a token id in commit.token is {max(commit.token)}, must be less than {size}, the vocabulary size"
            )
        delivery = self._session.on_commit(commit)
        if delivery is None:
            return
        self._statistics.evaluated += commit.evaluated
        if delivery.tokens:
            accepted, proposed = sum(delivery.accepted), sum(delivery.proposed)
            self._statistics.delivered(len(delivery.tokens), accepted, proposed)
        if delivery.tokens or delivery.finish:
            self._deliveries.put_nowait(delivery)
        if not self._session.finished:
            self._pacing.on_commit()
            self._draft.commit(delivery)

    # --- what the draft says

    def _on_draft_change(self) -> None:
        self._note_draft()
        self._announce_draft()
        self._pacing.flush()

    def _note_draft(self) -> None:
        self._statistics.uses(self._draft.name, self._draft.release or "", self._draft.failure)
        self._statistics.draft_busy = self._draft.busy

    def _announce_draft(self) -> None:
        """Announce another release to the verifier, after the nodes that the former one has proposed."""
        release = self._draft.release
        if self._stream is None or not self._pacing.is_open or release is None or release == self._announced:
            return
        self._pacing.flush_unsent()
        self._stream.send(pb.ClientMessage(draft=pb.DraftInUse(release=release)))
        self._announced = release

    # --- the end

    def _stop(self) -> None:
        """Cancel what still runs and return the draft's worker: the client has all, or wants no more."""
        self._draft.end()
        cancel = self._session.cancel()
        if cancel is not None and self._stream is not None:
            self._stream.send(pb.ClientMessage(cancel=cancel))


async def _wind_down(runner: asyncio.Task[None]) -> None:
    """Let the stream end by itself for a moment, then end it."""
    await asyncio.wait({runner}, timeout=0.5)
    runner.cancel()
    await asyncio.wait({runner})
