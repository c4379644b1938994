"""Who may begin: places, KV slots, and how long the prompts before it would keep a session from its first token."""

from __future__ import annotations

from collections.abc import Mapping

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.kv_pool import KVPool
from cloud_verifier.engine.ledger import StepLedger
from cloud_verifier.engine.scheduler import OVERDUE
from cloud_verifier.engine.session import EngineSession
from outrider.core.errors import Overloaded


class Admission:
    """Asked before a session is taken; refuses before anything is computed."""

    def __init__(
        self, config: EngineConfig, pool: KVPool, ledger: StepLedger, live: Mapping[str, EngineSession]
    ) -> None:
        self._config = config
        self._pool = pool
        self._ledger = ledger
        self._live = live

    def admit(self, session: EngineSession, older: EngineSession | None) -> None:
        """Give the session its prefix. Raises Overloaded where, in place of `older`, it finds no room.

        No more is promised than the pool holds. A chat between its turns is no live session: its slots are in the
        prefix cache, go to whoever needs them, and are computed again when it returns. A live one generates all the
        time, but for one whose device confirms nothing (rule 16), and that one the engine ends when others need room:
        its slots pass to the prefix cache as well, and its device comes back for what it has not received.
        """
        if not session.needed:
            return
        if older is None and len(self._live) >= self._config.max_sessions:
            raise Overloaded(f"all {self._config.max_sessions} sessions are taken", retry_after_s=self._retry_after())
        if older is not None and self._config.prefix_cache:
            older.share()  # it may go on, should there be no room for the new one
        if self._config.prefix_cache:
            session.take_prefix()
        room = self._pool.unreserved + (older.held_alone if older else 0)
        if session.needed > room:
            needed = session.needed
            session.release()
            raise Overloaded(f"{needed} KV slots are needed, {room} are free", retry_after_s=self._retry_after())
        late_s = self._first_token_s(session) - self._config.first_token_s
        if older is None and late_s > 0.0:
            session.release()
            raise Overloaded(
                f"the prompts before it would keep its first token for {late_s + self._config.first_token_s:.1f} s, "
                f"over first_token_s = {self._config.first_token_s:g}",
                retry_after_s=min(30.0, max(0.2, late_s)),
            )

    def _first_token_s(self, session: EngineSession) -> float:
        """How long others' prompts keep a new session waiting, by the cost model; 0 for one that has none to read.

        Not longer than it takes until it is overdue and comes before them.
        """
        able = [other for other in self._live.values() if other.protocol.may_step]
        owed = [other.pending for other in able if other.pending > 1]
        if session.pending == 1 or not owed:
            return 0.0
        generating = len(able) - len(owed)
        rows = self._config.budget.prefill_rows if generating else self._config.token_budget
        steps = min(-(-sum(owed) // rows), OVERDUE * len(owed))
        return steps * self._ledger.cost.seconds(rows + generating, generating + 1)

    def _retry_after(self) -> float:
        """Seconds until the first of the live sessions can be through, by plain steps; between 0.2 and 30."""
        left = [s.protocol.attach.max_tokens - s.protocol.position for s in self._live.values()]
        return min(30.0, max(0.2, self._ledger.step_s * min(left, default=0)))
