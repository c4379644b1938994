"""Decide which sessions may begin: what the target can never hold is refused, what finds no room now comes later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import TargetExecutor
from cloud_verifier.engine.scheduler import OVERDUE, StepBudget, prompt_rows
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.step_profiler import StepProfiler
from outrider.core.errors import BadRequest, Overloaded
from outrider.core.protocol.messages import Attach, Finish, SessionLimits
from outrider.core.step_cost import StepCost


def check_attach(
    attach: Attach, limits: SessionLimits, executor: TargetExecutor, *, allow_lossy_rules: bool = False
) -> None:
    """Raise BadRequest for a session that the target could never hold, however idle it is, or for an acceptance rule
    that is not allowed.

    All other bounds, those of token ids among them, are those of `outrider.wire.checks.check_attach`.
    """
    tokens, longest = len(attach.prompt) + attach.max_tokens, executor.capabilities.max_sequence
    got, field = f"{len(attach.prompt)} + {attach.max_tokens}", "prompt length + max_tokens"
    if tokens > longest:
        raise BadRequest.bound(field, got, f"at most {longest}, the target's longest sequence")
    held = longest_session(limits, executor)
    if tokens > held:
        raise BadRequest.bound(field, got, f"at most {held}, what the verifier can hold")
    if attach.sampling.HasField("typical") and not allow_lossy_rules:
        allowed = "coupled: the operator of this verifier does not allow lossy rules (allow_lossy_rules of engine_args)"
        raise BadRequest.bound("acceptance_rule", "typical", allowed)


def longest_session(limits: SessionLimits, executor: TargetExecutor) -> int:
    """Return the most tokens of a session, prompt and output together, that an idle target holds beside its nodes."""
    return max(1, min(executor.capabilities.max_sequence, executor.usage.capacity - limits.nodes))


class Admission:
    """Admits sessions by the number of live ones, by the target's room, and by the time until their first token."""

    def __init__(
        self, config: EngineConfig, executor: TargetExecutor, profiler: StepProfiler, live: Mapping[str, EngineSession]
    ) -> None:
        self._config = config
        self._executor = executor
        self._profiler = profiler
        self._live = live

    def admit(self, session: EngineSession, replaced: EngineSession | None) -> None:
        """Admit a session, which then has its cached prefix. Raises Overloaded if there is no room for it.

        replaced: the live session whose place it takes.

        No more is admitted than the target holds. A chat between its turns is no live session: its slots are in the
        prefix cache, are evicted if others need them, and are computed again when it returns. A live session generates
        all the time, unless its device confirms nothing (rule 16): such a session ends when others need room. Its slots
        pass to the prefix cache as well, and its device attaches again for what it has not received.
        """
        if session.protocol.finish is not Finish.NONE:
            return  # it is complete, and only sends what its device has not received
        if replaced is None and len(self._live) >= self._config.max_sessions:
            raise Overloaded(f"all {self._config.max_sessions} sessions are taken", retry_after_s=self._retry_after())
        try:
            self._executor.admit(session, replaced)
        except Overloaded as error:
            raise Overloaded(str(error), retry_after_s=self._retry_after()) from None
        waiting_s, most_s = self._waiting_s(session), self._config.first_token_s
        if replaced is None and waiting_s > most_s:
            self._executor.end(session, cache=False)
            raise Overloaded(
                f"the prompts before it would keep it from its first token for {waiting_s:.1f} s,"
                f" over first_token_s = {most_s:g}",
                retry_after_s=min(30.0, max(0.2, waiting_s - most_s)),
            )

    def _waiting_s(self, session: EngineSession) -> float:
        """Return how much later other sessions' prompts make the session's first token, by the cost model.

        The time of its own prompt does not count: a long prompt must find its moment, however busy the verifier is.
        """
        able = [other for other in self._live.values() if other.protocol.may_step]
        before = [other.pending for other in able if other.pending > 1]
        if session.pending == 1 or not before:
            return 0.0
        rest = (len(able) - len(before), self._config.budget, self._profiler.cost, self._profiler.between_s)
        return first_token_s(session.pending, before, *rest) - first_token_s(session.pending, (), *rest)

    def _retry_after(self) -> float:
        """Return the seconds, from 0.2 to 30, after which the first live session can end by plain steps."""
        left = [session.left for session in self._live.values()]
        return min(30.0, max(0.2, self._profiler.step_s * min(left, default=0)))


def first_token_s(
    own: int, before: Sequence[int], generating: int, budget: StepBudget, cost: StepCost, between_s: float = 0.0
) -> float:
    """Estimate the seconds to read a prompt of `own` tokens beside earlier ones, by the rules of the scheduler.

    Shorter ones come before it, and generate once they are read. Longer ones come before it when they are overdue.
    before: tokens that are left of each other prompt. between_s: seconds between two steps. Sessions that begin or end
    meanwhile are left out.
    """
    shorter, steps, seconds = sorted(other for other in before if other <= own), 0.0, 0.0
    for read, tokens in enumerate((*shorter, own)):
        rows = prompt_rows(generating + read, 1 + len(before) - read, budget, cost)
        beside = min(generating + read, budget.rows)
        full = min(budget.rows, min(rows, own + sum(before)) + beside)
        steps += tokens / rows
        seconds += tokens / rows * (between_s + cost.seconds(full, min(full, 1 + beside)))
    longer = len(before) - len(shorter)
    overdue = longer / max(OVERDUE + 1, longer + 1) if steps > OVERDUE else 0.0
    return seconds / (1.0 - overdue) * max(1.0, 1.0 / steps)
