"""Run a drafter on a thread of its own, so that drafting never makes the event loop wait.

The event loop leaves requests, which the thread carries out between two decodes; updates come back through a callback.
llama.cpp releases the GIL while it decodes, so commits reach the client meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

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


class DraftWorker:
    """Runs one drafter on one thread, one session at a time; later ones profit from what its context still holds."""

    def __init__(self, draft: Draft) -> None:
        """draft: makes the drafter, on this thread. Raises RuntimeError if no thread can start."""
        self.draft = draft
        self.ready: Future[None] = Future()
        """Done when the drafter is built; carries the error where that failed."""
        self._requests: list[Callable[[Drafter], None]] = []
        """What the thread has yet to carry out, in order."""
        self._closing = False
        self._asked = threading.Condition()
        """Guards the two above, and wakes the thread."""
        self._drafter: Drafter | None = None
        self._report: Report | None = None
        """Where what is drafted goes; None between sessions. The thread alone changes it."""
        self._thread = threading.Thread(target=self._main, name="outrider-draft", daemon=True)
        self._thread.start()

    @property
    def decode_s(self) -> float:
        """Return the moving average of the duration of a decode; infinite where there is no drafter yet or any more."""
        drafter = self._drafter
        return drafter.decode_s if drafter else float("inf")

    def begin(self, task: DraftTask, plan: SpeculationPlan, report: Report) -> None:
        """Begin a session; whatever was drafted before is dropped."""

        def begin(drafter: Drafter) -> None:
            self._report = report
            drafter.begin(task, plan)

        self._ask(begin, instead=True)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the session's sequence."""

        def commit(drafter: Drafter) -> None:
            if self._report is not None:  # the draft may have given up
                drafter.advance(tokens)

        self._ask(commit)

    def replan(self, plan: SpeculationPlan) -> None:
        self._ask(lambda drafter: drafter.replan(plan))

    def end(self) -> None:
        """End the session; once the thread has read this, its text is dropped and nothing is reported."""

        def end(drafter: Drafter) -> None:
            self._report = None
            drafter.end()

        self._ask(end, instead=True)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and free its context. Blocks for at most one decode."""
        with self._asked:
            self._closing = True
            self._asked.notify()
        self._thread.join(timeout_s)

    def _ask(self, request: Callable[[Drafter], None], *, instead: bool = False) -> None:
        """Leave a request for the thread. instead: of those that it has not read, which are of an earlier session."""
        with self._asked:
            if instead:
                self._requests.clear()
            self._requests.append(request)
            self._asked.notify()

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
        """Carry out requests as they come, and draft while a session has something left to draft."""
        drafts = False
        while True:
            with self._asked:
                while not (drafts or self._requests or self._closing):
                    self._asked.wait()
                requests, self._requests = self._requests, []
            if self._closing:
                return
            try:
                for request in requests:
                    request(drafter)
                if requests and self._report is not None:
                    self._send(drafter.harvest(moved=True))  # surviving nodes go out before the next decode
                drafts = self._report is not None and drafter.step()
                if self._report is not None:
                    self._send(drafter.harvest(moved=drafts))
            except Exception as error:
                # Whatever breaks in the draft, the session goes on without it. A text that is too long may be common.
                level = logging.INFO if isinstance(error, BadRequest) else logging.WARNING
                debugs = log.isEnabledFor(logging.DEBUG)
                log.log(level, "the draft gave up for this session: %s", error, exc_info=debugs)
                self._send(f"{type(error).__name__}: {error}")
                self._report, drafts = None, False

    def _send(self, news: DraftUpdate | str | None) -> None:
        if news is not None and self._report is not None:
            self._report(news)
