"""Keep a client's drafts, the threads that draft with them, and the sessions that these draft for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.loading import Draft, LoadedModel, ngram_draft
from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.worker import DraftWorker
from outrider.core.errors import ModelRefused, Overloaded
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Finish
from outrider.core.tree import ROOT

log = logging.getLogger(__name__)

RETIRE_S = 10.0
"""Time that a third draft waits for sessions to leave the first one, before it is put off."""
_IDLE_WORKERS = 4
"""Idle workers that are kept without a model: another one is started in no time."""


class DraftPool:
    """Gives a client's sessions a worker of the draft in use, and replaces the draft while they run.

    A session for which there is none, or whose draft fails, goes on by n-grams alone.
    workers: sessions that may draft with a model at once.
    """

    def __init__(self, workers: int) -> None:
        self.draft: Draft | None = None
        """The draft of new sessions, which the pool frees; None without speculation."""
        self.ngram: Draft | None = ngram_draft()
        """What drafts where no model can; None once the pool is closed."""
        self._most_workers = workers
        self._sessions: set[DraftSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired: set[Draft] = set()
        """Replaced drafts that are not freed yet, since sessions use them."""
        self._all_freed = asyncio.Event()
        self._all_freed.set()
        self._offline_thread: ThreadPoolExecutor | None = None

    @contextlib.asynccontextmanager
    async def session(self, session: DeviceSession) -> AsyncIterator[DraftSession]:
        """Draft for a session while the body runs. A session of one token gets no draft: its only step needs none."""
        speculates = not session.request.undrafted and session.max_tokens > 1
        draft = self.draft if speculates else None
        drafting = DraftSession(session, self)
        try:
            if draft is not None:
                await self._begin(drafting, draft)
            if speculates:
                self._sessions.add(drafting)
                if draft is not self.draft:  # it was replaced while the worker started
                    self._in_background(drafting.change_to(self.draft))
            yield drafting
        finally:
            self._sessions.discard(drafting)
            drafting.end()

    def replace(self, draft: Draft | None) -> None:
        """Give new sessions this draft at once, and live ones when it has read their text; free the old one then."""
        old, self.draft = self.draft, draft
        for drafting in sorted(self._sessions, key=_turn):
            self._in_background(drafting.change_to(draft))
        if old is not None and old not in (draft, self.ngram):
            self._retired.add(old)
            self._all_freed.clear()
            self._free_if_unused(old)

    def fall_back(self, drafting: DraftSession) -> None:
        """Let a session whose draft has failed go on by n-grams alone, in the background."""
        if self.ngram is not None and drafting.draft is not None and drafting.draft.has_model:
            log.info("a session goes on by n-grams alone: %s", drafting.failure)
            self._in_background(drafting.change_to(self.ngram))

    async def start(self, draft: Draft) -> None:
        """Start a draft's first worker now rather than in the first request. Raises ModelRefused if none can start."""
        with contextlib.suppress(Overloaded):
            self.give_back(await self.take(draft))

    async def retired(self) -> bool:
        """Wait until replaced drafts are freed, so that one model is in memory; return False if that takes long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_S):
                await self._all_freed.wait()
        return not self._retired

    async def close(self) -> None:
        """Free all drafts. The sessions must have ended."""
        for task in self._tasks:
            task.cancel()
        if self._offline_thread is not None:
            await asyncio.to_thread(self._offline_thread.shutdown)
        for draft in {*self._retired, self.draft, self.ngram} - {None}:
            await self.free(draft)  # type: ignore[arg-type]
        self.draft = self.ngram = None

    # --- workers

    async def take(self, draft: Draft) -> DraftWorker:
        """Borrow a worker until `give_back`.

        Raises ModelRefused if no worker can start, Overloaded if all are in use.
        """
        if draft.idle:
            worker = draft.idle.pop(0)
        elif draft.failure:
            raise ModelRefused(draft.failure)
        elif not draft.has_model or len(draft.workers) < self._most_workers:
            worker = started(draft)
        else:
            raise Overloaded(f"all draft workers are in use; draft_workers is {self._most_workers}")
        draft.users += 1
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except asyncio.CancelledError:
            self.give_back(worker)
            raise
        except Exception as error:
            draft.failure = f"the draft {draft.name} cannot start: {error}"
            log.warning("%s", draft.failure)
            draft.workers.remove(worker)
            self._let_go(draft)
            raise ModelRefused(draft.failure) from error
        return worker

    def give_back(self, worker: DraftWorker) -> None:
        """End the worker's session and keep the worker for the next one, unless enough are idle."""
        worker.end()
        draft = worker.draft
        if draft.has_model or len(draft.idle) < _IDLE_WORKERS:
            draft.idle.append(worker)
        else:
            draft.workers.remove(worker)
            worker.close(timeout_s=0.0)  # its thread ends soon, and nothing waits for it
        self._let_go(draft)

    # --- sessions

    async def _begin(self, drafting: DraftSession, draft: Draft) -> None:
        """Give a session its first worker, and note if it is not the one that the session should have."""
        try:
            drafting.use(await self.take(draft))
            drafting.failure = draft.missing
        except (ModelRefused, Overloaded) as error:
            if self.ngram is not None and draft.has_model:
                with contextlib.suppress(ModelRefused):
                    drafting.use(await self.take(self.ngram))
            drafting.busy = isinstance(error, Overloaded)
            drafting.failure = "" if drafting.busy else str(error)
            log.info("a session drafts %s: %s", "by n-grams alone" if drafting.drafting else "nothing", error)

    def _in_background(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a draft could not be changed: %s", error, exc_info=error)

    # --- freeing

    def _let_go(self, draft: Draft) -> None:
        """Count one user less."""
        draft.users -= 1
        self._free_if_unused(draft)

    def _free_if_unused(self, draft: Draft) -> None:
        if draft in self._retired and not draft.users:
            self._in_background(self.free(draft))

    async def free(self, draft: Draft) -> None:
        """Free a draft that no session uses, with its workers."""
        draft.failure = f"the draft {draft.name} was replaced"  # for those who come too late
        draft.idle.clear()
        for worker in draft.workers:
            await asyncio.to_thread(worker.close)
        draft.workers.clear()
        draft.close()
        self._retired.discard(draft)
        if not self._retired:
            self._all_freed.set()

    # --- without a verifier

    async def generate_offline(self, task: DraftTask) -> AsyncGenerator[Delivery, None]:
        """Continue the task's sequence with the model alone, one unverified token at a time.

        The noise is that of the verified sequence, so the draft generates the same tokens again with the same seed.
        Raises ModelRefused without a model or where it proposes nothing, ContextFull for a sequence that is too long.
        """
        draft = self.draft
        if draft is None or not draft.has_model:
            raise ModelRefused("there is no draft model that could generate alone")
        thread = self._offline_thread = self._offline_thread or ThreadPoolExecutor(1, "outrider-offline")
        loop, deliveries = asyncio.get_running_loop(), _written(draft.models[0], task)
        draft.users += 1
        try:
            while (delivery := await loop.run_in_executor(thread, next, deliveries, None)) is not None:
                yield delivery
        finally:
            await asyncio.wrap_future(thread.submit(deliveries.close))
            self._let_go(draft)


def started(draft: Draft) -> DraftWorker:
    """Return a new worker, whose thread makes its drafter. Raises ModelRefused if no thread can start."""
    try:
        worker = DraftWorker(draft)
    except RuntimeError as error:  # the draft is not to blame, and the next session may find a thread
        raise ModelRefused(f"the draft {draft.name} cannot start now: {error}") from error
    draft.workers.append(worker)
    return worker


def _written(model: LoadedModel, task: DraftTask) -> Generator[Delivery, None, None]:
    """Yield what a model writes alone, all on one thread."""
    with model.context() as context:
        source = model.source(context)
        source.begin(task)
        for position in range(len(task.received), task.max_tokens):
            [proposals] = source.expand([NodeContext(ROOT, ROOT, -1, position, ())])
            if not proposals:
                raise ModelRefused("the draft's logits are not numbers, so it cannot generate alone")
            token = proposals[0].token
            last = position + 1 == task.max_tokens
            finish = Finish.EOS if token in task.ends else Finish.LENGTH if last else Finish.NONE
            yield Delivery((token,), (True,), (False,), (), finish, verified=False)
            if finish:
                return
            source.advance((), (token,))


def _turn(drafting: DraftSession) -> int:
    """Return in which order sessions change to another draft: those with a model's worker, n-grams alone, none."""
    if not drafting.drafting or drafting.draft is None:
        return 2
    return 0 if drafting.draft.has_model else 1
