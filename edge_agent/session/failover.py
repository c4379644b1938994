"""Decide where a session attaches next: the same verifier, its standby, or one that the coordinator names.

A route returns grants, each with a greater epoch than the one before, and learns how each attach failed. The
session attaches with all tokens that it has received, so an attach can neither repeat nor lose one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from edge_agent.session.channels import VerifierSilent
from outrider.core import errors
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb

_MAX_EPOCH = (1 << 63) - 1
MAX_REFUSALS = 4
"""Tickets that may be refused in a row: those that a session had, and as many new ones of the coordinator's."""
FIRST_CONTACT_S = 3.5
"""Time for which a single verifier is looked for: its address is more likely wrong than the verifier restarting."""


def next_attach(error: OutriderError) -> Literal["here", "elsewhere", "nowhere"]:
    """Return at which verifier another attach may help after this error."""
    match error:
        case VerifierSilent() | errors.Draining() | errors.Overloaded() | errors.InternalError():
            return "elsewhere"
        case errors.Unauthenticated() | errors.PermissionDenied():
            return "elsewhere"  # the ticket has expired, or another verifier has the address now
        case errors.Unavailable() | errors.Fenced():
            return "here"
    return "nowhere"


Resume = Callable[[pb.ResumeSessionRequest], Awaitable[pb.OpenSessionResponse]]
"""Asks the coordinator for new grants. Raises core errors."""


class Route:
    """The verifiers to which a session attaches, one after another: primary, standby, and what `resume` names then.

    Raises Unavailable for a placement without a verifier.
    """

    @classmethod
    def direct(cls, address: str, backoff: Backoff, *, tls: bool = False) -> Route:
        """Return the route to a single verifier that is known by its address, without a coordinator.

        Epochs count from 1: the session's id is random and known to this process alone, and a small epoch saves bytes
        in every message.
        """
        grant = pb.Grant(address=address, tls=tls, epoch_first=1, epoch_last=_MAX_EPOCH)
        placement = pb.OpenSessionResponse(primary=grant)

        async def resume(_: pb.ResumeSessionRequest) -> pb.OpenSessionResponse:
            return placement

        return cls(placement, resume, backoff)

    def __init__(self, placement: pb.OpenSessionResponse, resume: Resume, backoff: Backoff) -> None:
        self._grants = _grants_of(placement)
        if not self._grants:
            raise Unavailable("the coordinator gave no verifier; is one registered for this target?")
        self._session_id = placement.session_id
        self._resume = resume
        self._backoff = backoff
        self._ticket = self._grants[0].ticket
        self._is_placed = bool(self._grants[0].verifier_id)
        """Whether a coordinator has named the verifier."""
        self._epoch = 0
        self._failed_ids: list[str] = []
        self._attempts = 0
        """Failed attaches at the first grant's verifier."""
        self._pause_s = 0.0
        self._refusals = 0
        """Tickets that were refused since the last progress."""

    async def next(self) -> tuple[pb.Grant, int]:
        """Return the verifier and the epoch of the next attach, after any pause. Raises where no verifier is left."""
        while True:
            while self._grants:
                grant = self._grants[0]
                epoch = max(self._epoch + 1, grant.epoch_first)
                if epoch <= grant.epoch_last:
                    self._epoch = epoch
                    return grant, epoch
                self._grants.pop(0)
            await self._request_grants()

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        """Note that the attach ended with `error`. Raises `error` where no other attach can help.

        progressed: whether it delivered tokens.
        """
        if progressed:
            self._backoff.progressed()
            self._attempts = self._refusals = 0
        where = next_attach(error)
        refused = isinstance(error, errors.Unauthenticated | errors.PermissionDenied)
        self._refusals += refused
        # Without a coordinator nobody gives another ticket, and where new ones are refused, too, none will do.
        if where == "nowhere" or self._refusals > (MAX_REFUSALS if self._is_placed else 0):
            raise error
        self._backoff.failed(error)
        self._attempts += 1
        self._pause_s = error.retry_after_s
        if self._grants and (where == "elsewhere" or self._attempts > 1):
            failed = self._grants.pop(0)
            self._attempts = 0
            if failed.verifier_id not in self._failed_ids:
                self._failed_ids.append(failed.verifier_id)

    async def _request_grants(self) -> None:
        """Ask the coordinator for new grants until it has some; it may be away for a while itself."""
        while not self._grants:
            await asyncio.sleep(self._backoff.pause_s(self._pause_s))
            self._pause_s = 0.0
            try:
                request = pb.ResumeSessionRequest(
                    session_id=self._session_id,
                    ticket=self._ticket,
                    failed_verifiers=self._failed_ids,
                    last_epoch=self._epoch,
                )
                self._grants = _grants_of(await self._resume(request))
            except (errors.Unavailable, errors.Overloaded, errors.InternalError) as error:
                self._backoff.failed(error)
                self._pause_s = error.retry_after_s
                continue
            self._failed_ids = []
            if not self._grants:
                self._backoff.failed(Unavailable("the coordinator knows no verifier that could take the session over"))
        self._ticket = self._grants[0].ticket


def _grants_of(placement: pb.OpenSessionResponse) -> list[pb.Grant]:
    """Return the grants for the primary verifier and for the standby, as far as there are any."""
    return [getattr(placement, name) for name in ("primary", "standby") if placement.HasField(name)]
