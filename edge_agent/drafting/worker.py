"""Run a drafter on a thread of its own, so that drafting never makes the event loop wait.

The event loop leaves its requests in an inbox, which the thread reads between two decodes; updates come back through a
callback. llama.cpp releases the GIL while it decodes, so commits reach the client meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

Result = TypeVar("Result")

Report = Callable[[DraftUpdate | str], None]
"""Receives what was drafted, or why the draft cannot serve the session any further, which goes on without it.

Called on the worker's thread, so it must not block.
"""


@dataclass
class _Inbox:
    """The requests that the thread has not read yet.

    It keeps their sum, not their order, so a draft that lags behind catches up in one evaluation.
    """

    begin: tuple[DraftTask, Report] | None = None
    end: bool = False
    close: bool = False
    plan: SpeculationPlan | None = None
    tokens: tuple[int, ...] = ()

    @property
    def urgent(self) -> bool:
        """Return whether it holds more than a commit or a plan, which may wait for the CPU budget."""
        return self.begin is not None or self.end or self.close

    @property
    def empty(self) -> bool:
        return not (self.urgent or self.plan is not None or self.tokens)


class DraftWorker:
    """Runs one drafter on one thread, one session at a time; later ones profit from what its context still holds.

    draft: what it drafts with. build: makes the drafter, on the worker's thread. release: frees what `build` took, on
    the same thread. budget: of CPU time; only prompts are read whatever it says.
    """

    def __init__(
        self,
        draft: Draft,
        build: Callable[[], Drafter],
        release: Callable[[], None] = lambda: None,
        budget: CpuBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draft = draft
        self._build = build
        self._release = release
        self._budget = budget or CpuBudget()
        self._clock = clock
        self._inbox = _Inbox()
        self._inbox_changed = threading.Condition()
        """Guards the inbox."""
        self._drafter: Drafter | None = None
        self._report: Report | None = None
        self.ready: Future[None] = Future()
        """Done when the drafter is built; carries the error where that failed."""
        self._thread = threading.Thread(target=self._main, name="outrider-draft", daemon=True)
        self._thread.start()

    @property
    def decode_s(self) -> float:
        """Return the moving average of the duration of a decode; infinite where there is no drafter yet or any more."""
        drafter = self._drafter
        return drafter.decode_s if drafter else float("inf")

    def begin(self, task: DraftTask, plan: SpeculationPlan, report: Report) -> None:
        """Begin a session; whatever was drafted before is dropped."""
        with self._inbox_changed:
            self._inbox = _Inbox(begin=(task, report), plan=plan, close=self._inbox.close)
            self._inbox_changed.notify()

    def commit(self, tokens: Iterable[int]) -> None:
        """Append committed tokens to the session's sequence."""
        with self._inbox_changed:
            self._inbox.tokens += tuple(tokens)
            self._inbox_changed.notify()

    def replan(self, plan: SpeculationPlan) -> None:
        with self._inbox_changed:
            self._inbox.plan = plan
            self._inbox_changed.notify()

    def end(self) -> None:
        """End the session; once the thread has read this, its text is dropped and nothing is reported."""
        with self._inbox_changed:
            self._inbox = _Inbox(end=True, close=self._inbox.close)
            self._inbox_changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and free its context. Blocks for at most one decode."""
        with self._inbox_changed:
            self._inbox.close = True
            self._inbox_changed.notify()
        self._thread.join(timeout_s)

    # --- on the worker's thread

    def _main(self) -> None:
        try:
            self._drafter = self._build()
        except BaseException as error:
            self._release()  # what it had taken before it failed
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            self._run(self._drafter)
        finally:
            self._report = self._drafter = None  # they hold the session's text
            self._release()

    def _run(self, drafter: Drafter) -> None:
        pause_s: float | None = None
        while not (inbox := self._next_requests(drafter, pause_s)).close:
            try:
                self._serve(drafter, inbox)
                pause_s = None if self._report is None else self._draft(drafter)
            except Exception as error:
                # Whatever breaks in the draft, the session goes on without it. A text that is too long may be common.
                level = logging.INFO if isinstance(error, BadRequest) else logging.WARNING
                debugs = log.isEnabledFor(logging.DEBUG)
                log.log(level, "the draft gave up for this session: %s", error, exc_info=debugs)
                self._send(_described(error))
                self._report = pause_s = None

    def _next_requests(self, drafter: Drafter, pause_s: float | None) -> _Inbox:
        """Wait for requests, at most `pause_s` seconds where it is not None, and take all of them.

        Commits and plans wait until the CPU budget allows for drafting: to catch up with a commit is drafting, too.
        """
        with self._inbox_changed:
            self._inbox_changed.wait_for(lambda: not self._inbox.empty, pause_s)
            while not (self._inbox.empty or self._inbox.urgent):
                pause_s = self._budget.pause_s(awaited=drafter.plan.waits)
                if pause_s <= 0:
                    break
                self._inbox_changed.wait_for(lambda: self._inbox.urgent, pause_s)
            inbox, self._inbox = self._inbox, _Inbox()
            return inbox

    def _serve(self, drafter: Drafter, inbox: _Inbox) -> None:
        if inbox.end:
            self._report = None
            drafter.end()
        if inbox.begin is not None and inbox.plan is not None:
            task, self._report = inbox.begin
            drafter.begin(task, inbox.plan)
        elif inbox.plan is not None:
            drafter.replan(inbox.plan)
        if self._report is None or inbox.empty:
            return
        if inbox.tokens:
            self._timed(lambda: drafter.advance(inbox.tokens))
        self._send(drafter.harvest(moved=True))  # surviving nodes go out before the next decode

    def _draft(self, drafter: Drafter) -> float | None:
        """Run one decode, unless the budget forbids it; return the pause before the next one, None without an end."""
        if self._budget.capped:  # whether the verifier waits takes a look at the whole tree
            awaited = drafter.awaited
            pause_s = self._budget.pause_s(awaited=awaited)
            if pause_s > (drafter.plan.draft_wait_s if awaited else drafter.plan.step_s):
                self._send(drafter.harvest(moved=False))
            if pause_s > 0:
                return pause_s
        moved = self._timed(drafter.step)
        self._send(drafter.harvest(moved=moved))
        return 0.0 if moved else None

    def _timed(self, work: Callable[[], Result]) -> Result:
        """Charge the time that the work takes to the budget."""
        begun = self._clock()
        try:
            return work()
        finally:
            self._budget.spend(self._clock() - begun)

    def _send(self, news: DraftUpdate | str | None) -> None:
        if news is not None and self._report is not None:
            self._report(news)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
