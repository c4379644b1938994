"""What operators see of verifiers and sessions, and what they say about them. Records in, records out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coordinator.config import CoordinatorConfig
from coordinator.records import SessionStatus, VerifierStatus
from coordinator.store.redis_store import SESSIONS_AT_ONCE, Store
from outrider.core.errors import NotFound

log = logging.getLogger(__name__)

CORDON_MS = 30 * 86_400_000
"""How long a cordon outlives its verifier."""
SCANNED = 10_000
"""Sessions looked at for one page: a tenant with few of them is found over several pages."""


@dataclass(frozen=True)
class SessionsAsked:
    """Which sessions an operator wants to see."""

    session_id: str = ""
    """This one alone; "" is all, as in the next two."""
    verifier_id: str = ""
    tenant: str = ""
    after: tuple[str, str] | None = None
    """(verifier id, session id) of the last one that he has seen."""
    limit: int = 500


class Operators:
    """One for each process; holds no state."""

    def __init__(self, store: Store, config: CoordinatorConfig) -> None:
        self._store = store
        self._config = config

    async def verifiers(self, verifier_id: str, after: str, limit: int) -> tuple[list[VerifierStatus], str]:
        """This one, or all ("") after one, by id; and after whom the next page begins, "" where there is none.

        Raises NotFound or Unavailable.
        """
        if verifier_id:
            found = await self._store.verifiers([verifier_id])
            if not found:
                raise _no_verifier(verifier_id)
            return found, ""
        ids = [name for name in await self._store.fleet() if name > after]
        return await self._store.verifiers(ids[:limit]), ids[limit - 1] if len(ids) > limit else ""

    async def steer(self, verifier_id: str, order: str) -> VerifierStatus | None:
        """Cordon, uncordon or drain; the verifier as it is then. None: it is not registered (any more).

        Raises NotFound or Unavailable.
        """
        if not await self._store.steer(verifier_id, order, keep_ms=CORDON_MS):
            raise _no_verifier(verifier_id)
        log.info("%s of verifier %s by an operator", order, verifier_id)
        return next(iter(await self._store.verifiers([verifier_id])), None)

    async def sessions(self, asked: SessionsAsked) -> tuple[list[SessionStatus], str]:
        """Those that hold a place, by verifier and id; and after whom the next page begins, "" where there is none.

        Raises NotFound or Unavailable.
        """
        if asked.session_id:
            return [await self._session(asked.session_id)], ""
        found: list[SessionStatus] = []
        looked = 0
        async for verifier_id, lot in self._lots(asked):
            for seated in await self._store.sessions((verifier_id, session_id) for session_id in lot):
                if asked.tenant in ("", seated.telemetry.tenant):
                    found.append(seated)
                if len(found) == asked.limit:
                    return found, f"{verifier_id}/{seated.telemetry.session_id}"
            looked += len(lot)
            if looked >= SCANNED:
                return found, f"{verifier_id}/{lot[-1]}"
        return found, ""

    async def kill(self, session_id: str) -> str:
        """End a session for good; the verifier that served it last. Raises NotFound or Unavailable."""
        where = await self._store.kill_session(session_id, keep_ms=self._config.session_ms)
        if not where:
            raise _no_session(session_id)
        log.info("session %s on verifier %s was killed by an operator", session_id, where[0])
        return where[0]

    async def _session(self, session_id: str) -> SessionStatus:
        where = await self._store.where(session_id)
        found = await self._store.sessions((verifier_id, session_id) for verifier_id in where)
        if not found:
            raise _no_session(session_id)
        return found[0]

    async def _lots(self, asked: SessionsAsked) -> AsyncIterator[tuple[str, list[str]]]:
        """Verifier and ids of sessions there, in order, after the one that was seen last."""
        ids = await self._store.fleet()
        if asked.verifier_id:
            if asked.verifier_id not in ids:
                raise _no_verifier(asked.verifier_id)
            ids = [asked.verifier_id]
        last_verifier, last_session = asked.after or ("", "")
        for verifier_id in ids:
            if verifier_id < last_verifier:
                continue
            held = await self._store.seats_of(verifier_id)
            if verifier_id == last_verifier:
                held = [session_id for session_id in held if session_id > last_session]
            for start in range(0, len(held), SESSIONS_AT_ONCE):
                yield verifier_id, held[start : start + SESSIONS_AT_ONCE]


def _no_verifier(verifier_id: str) -> NotFound:
    return NotFound(f"no verifier {verifier_id} is registered; `outrider verifiers list` shows those that are")


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id} has a place; `outrider sessions list` shows those that have")
