"""Answer operators' calls about verifiers, sessions and windows: records in, records out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from coordinator.config import SESSION_MS, TICKET_MS, CoordinatorConfig
from coordinator.records import SessionStatus, VerifierStatus, WindowBounds, WindowDecision
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from coordinator.store.sessions import SessionStore, WindowStore
from coordinator.store.verifiers import VerifierStore
from outrider.core.errors import BadRequest, NotFound
from outrider.core.text import short_id

log = logging.getLogger(__name__)

CORDON_MS = 30 * 86_400_000
"""Milliseconds for which a cordon outlives its verifier."""
MAX_SCANNED = 10_000
"""Sessions looked at for one page: a tenant with few of them is found over several pages."""
STATUS_SESSIONS = 1_000
"""Sessions that one Status answer lists: about 100 bytes each."""
STATUS_VERIFIERS = 1_000
"""Verifiers that one Status answer lists: about 500 bytes each."""


class AdminHandlers:
    """The calls of operators. It holds no state. Every method raises Unavailable while the store is away."""

    def __init__(self, store: RedisStore, config: CoordinatorConfig) -> None:
        self.store_name = store.name
        self._verifiers, self._sessions, self._windows = VerifierStore(store), SessionStore(store), WindowStore(store)
        self._config = config
        self._started = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Return the seconds since this coordinator started."""
        return time.monotonic() - self._started

    async def status(self) -> tuple[list[VerifierStatus], list[SessionStatus], int, int]:
        """Return verifiers and sessions, as many as an answer lists, and how many there are of each."""
        ids = await self._verifiers.ids()
        held, total = await self._sessions.held(ids, STATUS_SESSIONS)
        verifiers = await self._verifiers.find(ids[:STATUS_VERIFIERS])
        return verifiers, await self._sessions.find(held), len(ids), total

    async def verifiers(self, verifier_id: str, after: str, limit: int) -> tuple[list[VerifierStatus], str]:
        """Return one verifier, or a page of all (""), and the start of the next page or "". Raises NotFound."""
        if verifier_id:
            found = await self._verifiers.find([verifier_id])
            if not found:
                raise _no_verifier(verifier_id)
            return found, ""
        ids = [name for name in await self._verifiers.ids() if name > after]
        return await self._verifiers.find(ids[:limit]), ids[limit - 1] if len(ids) > limit else ""

    async def update_verifier(self, verifier_id: str, action: str) -> VerifierStatus | None:
        """Cordon, uncordon or drain a verifier (`action`); return its status, None if it has left. Raises NotFound."""
        if not await self._verifiers.update(verifier_id, action, keep_ms=CORDON_MS):
            raise _no_verifier(verifier_id)
        log.info("%s of verifier %s by an operator", action, verifier_id)
        return next(iter(await self._verifiers.find([verifier_id])), None)

    async def session(self, session_id: str) -> SessionStatus:
        """Return a session that holds a place. Raises NotFound."""
        verifier_ids = await self._sessions.verifiers_of(session_id)
        found = await self._sessions.find((verifier_id, session_id) for verifier_id in verifier_ids)
        if not found:
            raise _no_session(session_id)
        return found[0]

    async def sessions(
        self, verifier_id: str, tenant: str, after: tuple[str, str], limit: int
    ) -> tuple[list[SessionStatus], str]:
        """Return a page of the sessions that hold a place, by verifier and id, and where the next page begins.

        verifier_id, tenant: of these sessions alone; "" is any. after: verifier and session id of the last one of the
        page before. The second value is "" at the end. Raises NotFound.
        """
        ids = await self._verifiers.ids()
        if verifier_id and verifier_id not in ids:
            raise _no_verifier(verifier_id)
        found: list[SessionStatus] = []
        scanned = 0
        for name in [verifier_id] if verifier_id else [name for name in ids if name >= after[0]]:
            held = [(name, session_id) for session_id in await self._sessions.held_by(name)]
            rest = [one for one in held if one > after]
            for start in range(0, len(rest), SESSIONS_AT_ONCE):
                batch = rest[start : start + SESSIONS_AT_ONCE]
                for session in await self._sessions.find(batch):
                    if tenant in ("", session.telemetry.tenant):
                        found.append(session)
                    if len(found) == limit:
                        return found, f"{name}/{session.telemetry.session_id}"
                scanned += len(batch)
                if scanned >= MAX_SCANNED:
                    return found, "/".join(batch[-1])
        return found, ""

    async def kill(self, session_id: str) -> str:
        """End a session for good and return the verifier that served it last. Raises NotFound."""
        verifier_ids = await self._sessions.kill(session_id, keep_ms=SESSION_MS, ticket_ms=TICKET_MS)
        if not verifier_ids:
            raise _no_session(session_id)
        log.info("session %s on verifier %s was killed by an operator", short_id(session_id), verifier_ids[0])
        return verifier_ids[0]

    async def windows(self, session_id: str) -> tuple[list[WindowDecision], Mapping[str, WindowBounds], int]:
        """Return the decisions on one session's window, or on all ("") as far as an answer lists them.

        The second value is the bounds by session id, those of "" for all others; the third the number of decisions.
        """
        everything = (await self._windows.decisions(await self._verifiers.ids())).values()
        found = [decision for decision in everything if session_id in ("", decision.session_id)]
        shown = found[:STATUS_SESSIONS]
        named = [session_id] if session_id else []
        return shown, await self._windows.bounds([one.session_id for one in shown] + named), len(found)

    async def set_bounds(self, session_id: str, bounds: WindowBounds | None) -> None:
        """Set the bounds of a session's window, or of every other session's (""). Raises NotFound or BadRequest."""
        if not self._config.window_control:
            raise BadRequest("this coordinator leaves windows to its verifiers (window_control is off)")
        if not await self._windows.set_bounds(session_id, bounds):
            raise _no_session(session_id)


def _no_verifier(verifier_id: str) -> NotFound:
    return NotFound(f"no verifier {verifier_id} is registered; `outrider verifiers list` shows those that are")


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id} has a place; `outrider sessions list` shows those that have")
