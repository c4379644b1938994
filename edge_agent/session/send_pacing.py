"""Decide when a session's Appends leave the device: at once if the verifier waits for them, else once a step."""

from __future__ import annotations

import asyncio
import math

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.growth import SpeculationPlan, departure_time
from edge_agent.session.channels import Channels
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import VerifierStream
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import FIRST_DIRECTIVE, Append, Directive
from outrider.wire.v1 import session_pb2 as pb


class SendPacing:
    """Paces the nodes of a session's tree, for as long as a stream is open for Appends."""

    def __init__(self, session: DeviceSession, draft: DraftSession, channels: Channels, statistics: Statistics) -> None:
        self._session = session
        self._draft = draft
        self._channels = channels
        self._statistics = statistics
        self._directive = FIRST_DIRECTIVE
        self._stream: VerifierStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._step_began = 0.0
        """When the verifier began its step, on the clock by which its commits arrive here."""
        self._sent_at = -math.inf
        self._departs = -math.inf
        """When the next message may leave that the verifier does not wait for."""

    @property
    def _rtt_s(self) -> float:
        """Return the round trip to the session's verifier, 0 if it is not known."""
        return self._channels.rtt_s.get(self._statistics.address, 0.0)

    @property
    def plan(self) -> SpeculationPlan:
        """Return the verifier's directive within the session's limits."""
        waits = self._rtt_s < self._directive.draft_wait_ms / 1000
        return SpeculationPlan.of(self._directive, self._session.limits, waits=waits)

    def replan(self, directive: Directive | None = None) -> None:
        """Draft by a new directive, or by the old one and another round trip."""
        if directive is not None:
            self._directive = directive
        self._draft.replan(self.plan)

    def open(self, stream: VerifierStream) -> None:
        """Begin to send, with the nodes that survived a former stream."""
        self._stream = stream
        self.flush()

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def close(self) -> None:
        """Send nothing more on this stream."""
        self._stream = None
        self._sent_at = self._departs = -math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_commit(self) -> None:
        """Answer a commit: the verifier has begun its next step."""
        now, plan = asyncio.get_running_loop().time(), self.plan
        self._step_began = now
        departs = departure_time(plan, self._rtt_s, now, max(now, self._sent_at + plan.pause_s))
        # Commits that come faster than the directive's step time must not postpone a message that waits to depart.
        self._departs = min(departs, self._departs) if self._timer is not None else departs
        self.flush()

    def flush(self) -> None:
        """Send unsent nodes and the base: now if the verifier waits for them, else at the next departure."""
        if self._stream is None or self._session.finished:
            return
        now, plan, rtt_s = asyncio.get_running_loop().time(), self.plan, self._rtt_s
        awaited = plan.waits and not self._verifier_has_nodes()
        if now < self._departs and not awaited and not self._session.base_is_stale:
            self._flush_at(self._departs)
            return
        # Rule 4: while the verifier has nodes of ours it waits for nothing, so `idle` alone would be of no use. `poll`
        # keeps rule 5 in any case.
        resting = self._draft.rests(plan, rtt_s) and (self._session.has_unsent or not len(self._session.tree))
        append = self._session.poll(resting=resting)
        if append is None:
            return
        self._send(self._stream, append)
        if awaited:
            self._step_began = now + rtt_s  # its step begins when this arrives
        self._sent_at = now
        self._departs = departure_time(plan, rtt_s, self._step_began, now + plan.pause_s)

    def flush_unsent(self) -> None:
        """Send nodes that wait to depart, without changing when the next ones do."""
        if self._stream is not None and self._session.has_unsent:
            append = self._session.poll(resting=False)
            if append is not None:
                self._send(self._stream, append)

    def _send(self, stream: VerifierStream, append: Append) -> None:
        stream.send(pb.ClientMessage(append=append))
        self._statistics.appends += 1
        self._statistics.drafted += len(append.token)

    def _verifier_has_nodes(self) -> bool:
        """Return whether the verifier has a live node of ours, or one is on its way to it."""
        oldest = next(iter(self._session.tree), None)
        return oldest is not None and self._session.was_sent(oldest.id)

    def _flush_at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()
