"""The thread that owns a draft: it drafts without pause and never makes the event loop wait.

Commands go in through a queue and are obeyed between two decodes; growth comes out through a callback. llama.cpp
releases the GIL while it decodes, so Commits reach the client meanwhile.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.errors import BadRequest

log = logging.getLogger(__name__)

Done = TypeVar("Done")

Report = Callable[["DraftUpdate | DraftFailed"], None]
"""Called on the worker's thread; must not block."""


@dataclass(frozen=True)
class DraftFailed:
    """The session goes on without a draft."""

    reason: str


@dataclass(frozen=True)
class _Begin:
    task: DraftTask
    plan: SpeculationPlan
    report: Report


@dataclass(frozen=True)
class _Commit:
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Replan:
    plan: SpeculationPlan


@dataclass(frozen=True)
class _End:
    pass


@dataclass(frozen=True)
class _Close:
    pass


_Command = _Begin | _Commit | _Replan | _End | _Close


class DraftWorker:
    """One thread, one drafter, one session at a time; later sessions profit from what its context still holds.

    build: makes the drafter on the worker's thread. release: frees what `build` took, on the same thread. share: of the
    CPU, with all who draft on this device; prompts are read whatever it says. failed: hears, on the worker's thread,
    what the draft itself is to blame for.
    """

    def __init__(
        self,
        build: Callable[[], Drafter],
        release: Callable[[], None] = lambda: None,
        share: CpuBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._build = build
        self._release = release
        self._share = share or CpuBudget()
        self._clock = clock
        self._failed = failed
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._drafter: Drafter | None = None
        self._report: Report | None = None
        self.ready: Future[None] = Future()
        """Done when the drafter is built; carries what went wrong."""
        self._thread = threading.Thread(target=self._main, name="outrider-draft", daemon=True)
        self._thread.start()

    @property
    def decode_s(self) -> float:
        """Seconds that one decode takes, lately."""
        return self._drafter.decode_s if self._drafter else float("inf")

    def begin(self, task: DraftTask, plan: SpeculationPlan, report: Report) -> None:
        """Take a session over; whatever was drafted before is dropped."""
        self._inbox.put(_Begin(task, plan, report))

    def commit(self, tokens: Iterable[int]) -> None:
        self._inbox.put(_Commit(tuple(tokens)))

    def replan(self, plan: SpeculationPlan) -> None:
        self._inbox.put(_Replan(plan))

    def end(self) -> None:
        """Stop drafting; nothing is reported after the command has been read."""
        self._inbox.put(_End())

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and free its context. Blocks for at most one decode."""
        self._inbox.put(_Close())
        self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            self._drafter = self._build()
        except BaseException as error:
            self._failed(_told(error))
            self._release()  # what it had taken before it failed
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            self._serve(self._drafter)
        finally:
            self._release()

    def _serve(self, drafter: Drafter) -> None:
        rest_s = math.inf
        held: list[_Command] = []
        while True:
            commands = self._commands(rest_s, held)
            if any(isinstance(command, _Close) for command in commands):
                return
            rest_s = self._share.rest_s(awaited=drafter.plan.waits)
            if rest_s > 0 and commands and all(isinstance(command, _Commit | _Replan) for command in commands):
                held = commands  # to catch up with a Commit is drafting, too
                continue
            held = []
            try:
                for command in commands:
                    self._obey(drafter, command)
                if commands and self._report:
                    self._tell(drafter.harvest(moved=True))  # survivors first, before the next decode
                rest_s = math.inf if self._report is None else self._draft(drafter)
            except Exception as error:
                # Whatever ails the draft, the session goes on as plain cloud streaming.
                log.warning("the draft gave up for this session: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
                if not isinstance(error, BadRequest):  # a text that is too long for it is none of its faults
                    self._failed(_told(error))
                self._tell(DraftFailed(_told(error)))
                self._report, rest_s = None, math.inf

    def _draft(self, drafter: Drafter) -> float:
        """One decode, unless its time is not there yet; seconds until the next."""
        if self._share.capped:  # whether anybody waits takes a look at the whole tree
            awaited = drafter.awaited
            rest_s = self._share.rest_s(awaited=awaited)
            if rest_s > (drafter.plan.draft_wait_s if awaited else drafter.plan.step_s):
                self._tell(drafter.harvest(moved=False))
            if rest_s > 0:
                return rest_s
        moved = self._booked(drafter.step)
        self._tell(drafter.harvest(moved=moved))
        return 0.0 if moved else math.inf

    def _booked(self, work: Callable[[], Done]) -> Done:
        begun = self._clock()
        try:
            return work()
        finally:
            self._share.spent(self._clock() - begun)

    def _obey(self, drafter: Drafter, command: _Command) -> None:
        match command:
            case _Begin():
                self._report = command.report
                drafter.begin(command.task, command.plan)
            case _Commit() if self._report is not None:
                self._booked(functools.partial(drafter.advance, command.tokens))
            case _Replan():
                drafter.plan = command.plan
            case _End():
                self._report = None

    def _commands(self, wait_s: float, held: list[_Command]) -> list[_Command]:
        """What was held and what has come in; Commits that follow one another become one, so that a late draft catches
        up at once."""
        commands = list(held)
        try:
            while True:
                command = self._inbox.get(wait_s > 0, None if math.isinf(wait_s) else wait_s)
                wait_s = 0.0
                last = commands[-1] if commands else None
                if isinstance(command, _Commit) and isinstance(last, _Commit):
                    commands[-1] = _Commit(last.tokens + command.tokens)
                else:
                    commands.append(command)
        except queue.Empty:
            return commands

    def _tell(self, news: DraftUpdate | DraftFailed | None) -> None:
        if news is not None and self._report is not None:
            self._report(news)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
