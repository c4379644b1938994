"""Run a drafter on a thread of its own, so that drafting never makes the event loop wait.

The event loop leaves its requests in an inbox, which the thread reads between two decodes; updates come back through a
callback. llama.cpp releases the GIL while it decodes, so commits reach the client meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

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
    def empty(self) -> bool:
        return self == _Inbox()


class DraftWorker:
    """Runs one drafter on one thread, one session at a time; later ones profit from what its context still holds."""

    def __init__(self, draft: Draft) -> None:
        """draft: makes the drafter, on this thread. Raises RuntimeError if no thread can start."""
        self.draft = draft
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
        with contextlib.ExitStack() as owned:
            try:
                self._drafter = self.draft.drafter(owned)
            except BaseException as error:
                owned.close()  # what it had taken before it failed
                self.ready.set_exception(error)
                return
            self.ready.set_result(None)
            try:
                self._run(self._drafter)
            finally:
                self._report = self._drafter = None  # they hold the session's text

    def _run(self, drafter: Drafter) -> None:
        rests = True
        while not (inbox := self._next_requests(wait=rests)).close:
            try:
                self._serve(drafter, inbox)
                rests = self._report is None or not self._draft(drafter)
            except Exception as error:
                # Whatever breaks in the draft, the session goes on without it. A text that is too long may be common.
                level = logging.INFO if isinstance(error, BadRequest) else logging.WARNING
                debugs = log.isEnabledFor(logging.DEBUG)
                log.log(level, "the draft gave up for this session: %s", error, exc_info=debugs)
                self._send(_described(error))
                self._report, rests = None, True

    def _next_requests(self, *, wait: bool) -> _Inbox:
        """Take all requests, after waiting for one if there is none."""
        with self._inbox_changed:
            if wait:
                self._inbox_changed.wait_for(lambda: not self._inbox.empty)
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
            drafter.advance(inbox.tokens)
        self._send(drafter.harvest(moved=True))  # surviving nodes go out before the next decode

    def _draft(self, drafter: Drafter) -> bool:
        """Run one decode, and return whether another one may follow."""
        moved = drafter.step()
        self._send(drafter.harvest(moved=moved))
        return moved

    def _send(self, news: DraftUpdate | str | None) -> None:
        if news is not None and self._report is not None:
            self._report(news)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
