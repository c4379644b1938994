"""Who may begin: places, KV slots, and how long the prompts before it would keep a session from its first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.kv_pool import KVPool
from cloud_verifier.engine.scheduler import OVERDUE, StepBudget, prompt_rows, steps_to_read
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.errors import Overloaded
from outrider.core.step_cost import StepCost


class Admission:
    """Asked before a session is taken; refuses before anything is computed."""

    def __init__(
        self, config: EngineConfig, pool: KVPool, ledger: StepProfiler, live: Mapping[str, EngineSession]
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
        waiting_s, most_s = self._waiting_s(session), self._config.first_token_s
        if older is None and waiting_s > most_s:
            session.release()
            raise Overloaded(
                f"the prompts before it would keep it from its first token for {waiting_s:.1f} s,"
                f" over first_token_s = {most_s:g}",
                retry_after_s=min(30.0, max(0.2, waiting_s - most_s)),
            )

    def _waiting_s(self, session: EngineSession) -> float:
        """How much later others' prompts make a new session's first token, by the cost model.

        What its own takes is not counted: a long prompt must find a moment to come in, however busy the verifier is.
        """
        able = [other for other in self._live.values() if other.protocol.may_step]
        before = [other.pending for other in able if other.pending > 1]
        if session.pending == 1 or not before:
            return 0.0
        generating, ledger = len(able) - len(before), self._ledger

        def seconds(prompts: Sequence[int]) -> float:
            between_s = ledger.between_s
            return first_token_s(
                session.pending, prompts, generating, self._config.budget, ledger.cost, between_s=between_s
            )

        return seconds(before) - seconds(())

    def _retry_after(self) -> float:
        """Seconds until the first of the live sessions can be through, by plain steps; between 0.2 and 30."""
        left = [s.protocol.attach.max_tokens - s.protocol.position for s in self._live.values()]
        return min(30.0, max(0.2, self._ledger.step_s * min(left, default=0)))


def first_token_s(
    own: int, before: Sequence[int], generating: int, budget: StepBudget, cost: StepCost, *, between_s: float = 0.0
) -> float:
    """About how many seconds it takes to read a prompt of `own` tokens behind others, by the rules of the scheduler.

    before: what is left of each of them, in order. Nobody is taken to come or to end meanwhile.
    between_s: what passes between two steps.
    """
    beside = generating + len(before) // 2  # who is through generates; on average half of them

    def seconds(steps: int, rows: int) -> float:
        rows = min(budget.rows, min(rows, own + sum(before)) + beside)
        return steps * (between_s + cost.seconds(rows, min(rows, 1 + beside)))

    if generating:
        rows = prompt_rows(beside, budget)
        return seconds(steps_to_read(own, before, rows), rows)
    # Prompts have the whole budget to themselves until one of them is through and generates.
    rows = budget.rows
    if not before:
        return seconds(-(-own // rows), rows)
    turns = [-(-before[0] // rows), *((OVERDUE + 1) * -(-other // rows) for other in before[1:])]
    alone = steps_to_read(own, before, rows)
    until = min(turns)
    if alone <= until:
        return seconds(alone, rows)
    read, left = until * rows, []
    for other in before:
        left.append(max(0, other - read))
        read = max(0, read - other)
    left_own = max(1, own - max(read, until // (OVERDUE + 1) * rows))
    return seconds(until, rows) + first_token_s(left_own, left, 1, budget, cost, between_s=between_s)
