"""Where a session attaches next: the same verifier, the standby, or whoever the coordinator names.

A route hands out hops, each with a greater epoch than the last, and is told how each one ended. Delivered tokens are
the session's own business: it attaches with all that it received, so a hop can neither repeat nor lose one.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from edge_agent.session.stream import VerifierSilent
from outrider.core import errors
from outrider.core.backoff import Backoff
from outrider.core.errors import BadRequest, OutriderError, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.codecs import limits_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb

FIRST_CONTACT_S = 3.5
"""How long a verifier that stands alone is looked for: its address is rather wrong than it just restarts."""


@dataclass(frozen=True)
class AttachTarget:
    """One attach."""

    address: str
    epoch: int
    tls: bool = False
    ticket: bytes = b""
    verifier_id: str = ""
    limits: SessionLimits | None = None
    """Known before the verifier answers; None: wait for Opened before the first Append."""


class Route(Protocol):
    async def next(self) -> AttachTarget:
        """Where to attach now; waits out any back-off. Raises where there is nowhere left."""

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        """The hop ended with `error` after delivering tokens or not. Raises `error` where another hop cannot help."""

    def learned(self, limits: SessionLimits) -> None:
        """The limits that the verifier told in Opened."""


class Step(enum.Enum):
    """What an error says about the next hop."""

    HERE = "the same verifier, once more"
    ELSEWHERE = "another verifier"
    NOWHERE = "no verifier could help"


def after(error: OutriderError) -> Step:
    """Where to go after `error`."""
    match error:
        case VerifierSilent() | errors.Draining():
            return Step.ELSEWHERE
        case errors.Unavailable() | errors.Fenced():
            return Step.HERE
        case errors.Overloaded() | errors.InternalError():
            return Step.ELSEWHERE
        case errors.Unauthenticated() | errors.PermissionDenied():
            return Step.ELSEWHERE  # the ticket has expired, or another verifier has taken the address over
    return Step.NOWHERE


class DirectRoute:
    """One verifier, known by its address, without a coordinator.

    Epochs are counted from 1: the session's id is random and known to this process alone, and a small epoch saves
    bytes in every message.
    """

    def __init__(self, address: str, backoff: Backoff, *, tls: bool = False) -> None:
        self._address = address
        self._tls = tls
        self._backoff = backoff
        self._epoch = 0
        self._limits: SessionLimits | None = None
        self._pause_s = 0.0

    async def next(self) -> AttachTarget:
        await asyncio.sleep(self._pause_s)
        self._epoch += 1
        return AttachTarget(self._address, self._epoch, tls=self._tls, limits=self._limits)

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        if progressed:
            self._backoff.progressed()
        if after(error) is Step.NOWHERE or isinstance(error, errors.Unauthenticated | errors.PermissionDenied):
            raise error
        self._backoff.failed(error)
        self._pause_s = 0.0 if progressed else self._backoff.pause_s(_retry_after(error))

    def learned(self, limits: SessionLimits) -> None:
        self._limits = limits


@dataclass(frozen=True)
class Grants:
    """What the coordinator gave for one session: the primary first, then the standby."""

    session_id: str
    grants: tuple[pb.Grant, ...]

    @property
    def ticket(self) -> bytes:
        """The first; empty where there is none."""
        return self.grants[0].ticket if self.grants else b""


Resume = Callable[[bytes, Sequence[str], int], Awaitable[Grants]]
"""(any ticket of the session, verifiers that failed, greatest epoch used) -> new grants"""


class GrantRoute:
    """Primary, standby, coordinator: the first two need nobody but the verifiers."""

    def __init__(self, grants: Grants, resume: Resume, backoff: Backoff) -> None:
        if not grants.grants:
            raise Unavailable("the coordinator gave no verifier; is one registered for this target?")
        self._queue = list(grants.grants)
        self._resume = resume
        self._backoff = backoff
        self._ticket = grants.grants[0].ticket
        self._epoch = 0
        self._failed_ids: list[str] = []
        self._tries_here = 0
        self._pause_s = 0.0

    async def next(self) -> AttachTarget:
        while True:
            while self._queue:
                grant = self._queue[0]
                epoch = max(self._epoch + 1, grant.epoch_first)
                if epoch <= grant.epoch_last:
                    self._epoch = epoch
                    return AttachTarget(
                        grant.address, epoch, grant.tls, grant.ticket, grant.verifier_id, limits_of(grant.ticket)
                    )
                self._queue.pop(0)
            await self._ask()

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        if progressed:
            self._backoff.progressed()
            self._tries_here = 0
        step = after(error)
        if step is Step.NOWHERE:
            raise error
        self._backoff.failed(error)
        self._tries_here += 1
        self._pause_s = _retry_after(error)
        if self._queue and (step is Step.ELSEWHERE or self._tries_here > 1):
            gone = self._queue.pop(0)
            self._tries_here = 0
            if gone.verifier_id not in self._failed_ids:
                self._failed_ids.append(gone.verifier_id)

    def learned(self, limits: SessionLimits) -> None:
        """The ticket has said it already."""

    async def _ask(self) -> None:
        """New grants from the coordinator; it may be away for a while itself."""
        while True:
            await asyncio.sleep(self._backoff.pause_s(self._pause_s))
            self._pause_s = 0.0
            try:
                answer = await self._resume(self._ticket, tuple(self._failed_ids), self._epoch)
            except (errors.Unavailable, errors.Overloaded, errors.InternalError) as error:
                self._backoff.failed(error)
                self._pause_s = _retry_after(error)
                continue
            self._queue = list(answer.grants)
            self._failed_ids = []
            if self._queue:
                self._ticket = self._queue[0].ticket
                return
            self._backoff.failed(Unavailable("the coordinator knows no verifier that could take the session over"))


def limits_of(ticket: bytes) -> SessionLimits | None:
    """The limits in a ticket's claims, which anybody may read; None where there is no ticket. Raises BadRequest."""
    if not ticket:
        return None
    try:
        claims = pb.TicketClaims.FromString(pb.SignedTicket.FromString(ticket).claims)
    except DecodeError as error:
        raise BadRequest("the coordinator's ticket cannot be read; is it much newer than this client?") from error
    return limits_from_proto(claims.limits)


def _retry_after(error: OutriderError) -> float:
    return error.retry_after_s if isinstance(error, errors.Overloaded | errors.Unavailable) else 0.0
