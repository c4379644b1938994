"""One draft in memory, and workers that sessions borrow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.drafter import CalibratedSource, Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.health import DraftHealth
from edge_agent.drafting.offline_generation import Deliveries, written
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.sources.ngram import PromptLookup
from edge_agent.drafting.worker import DraftWorker
from outrider.artifacts.hashing import file_digest
from outrider.core.acceptance.calibrator import AcceptancePrior, Calibrator
from outrider.core.errors import ModelRefused
from outrider.core.vocabulary import compare_token_tables

if TYPE_CHECKING:
    from edge_agent.drafting.sources.llama import LlamaSource
    from outrider.llama import LlamaModel, TreeContext

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8)
_LOOKUP_ALONE = DecodeLatency(((1, 1e-4),))


@dataclass(frozen=True)
class DraftOptions:
    """How drafts run on this device."""

    workers: int = 2
    """Sessions that may draft at once; further ones run without a draft rather than wait."""
    threads: int = 1
    """CPU threads of a decode."""
    context: int = 4096
    """Tokens that a draft's context holds, never more than the draft was trained for."""
    prompt_lookup: bool = True
    cpu_share: float = 1.0
    """Of one core's time, for all sessions together; 1 is no cap."""
    share: CpuBudget | None = None
    """The account of that time, where several drafts have it together."""


class DraftPool:
    """Workers of one draft. Use as an async context manager; made by `load` or `lookup_only`."""

    def __init__(
        self,
        name: str,
        options: DraftOptions,
        model: LlamaModel | None = None,
        shared_vocabulary: int = 0,
        release: str = "",
        health: DraftHealth | None = None,
    ) -> None:
        self.name = name
        self.release = release
        """Alike on every device that has this draft; empty where it is not to be compared."""
        self.health = health or DraftHealth()
        self._options = options
        self._model = model
        self._shared = shared_vocabulary
        # Learned by all sessions together: a draft's luck hardly depends on who asks.
        self._of_model = (Calibrator(), Calibrator())
        self._of_lookup = (Calibrator(), Calibrator())
        self._widths: DecodeLatency | None = None
        self._share = options.share or CpuBudget(options.cpu_share, options.threads)
        self._idle: list[DraftWorker] = []
        self._workers: list[DraftWorker] = []
        self._alone: ThreadPoolExecutor | None = None
        """The thread of those that write without a verifier."""
        self._lent = 0
        self._returned = asyncio.Event()
        """Set whenever no worker is lent out."""
        self._returned.set()

    @classmethod
    async def load(
        cls,
        path: Path,
        name: str,
        target_table: Sequence[bytes],
        options: DraftOptions,
        digest: str = "",
        health: DraftHealth | None = None,
    ) -> Self:
        """Load a GGUF and compare its vocabulary with the target's.

        name: for people. digest: SHA-256 of the file in hex, where it is known.
        Raises ModelRefused, VocabularyMismatch, ImportError without llama-cpp-python.
        """
        loading = asyncio.create_task(asyncio.to_thread(_load, path, target_table, options, digest))
        try:
            model, shared, known = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the thread goes on: what it loads is nobody's
            loading.add_done_callback(_free)
            raise
        return cls(name, options, model, shared, known, health)

    @classmethod
    def lookup_only(cls, options: DraftOptions) -> Self:
        """No model: guesses from what the text has said before."""
        return cls("lookup", options, release="lookup")

    @property
    def has_model(self) -> bool:
        return self._model is not None

    def expect(self, measured: AcceptancePrior) -> None:
        """Start from what verifiers measured of this draft's guesses elsewhere, as long as little was learned here."""
        for calibrator in self._of_lookup if self._model is None else self._of_model:
            calibrator.expect(measured.first, measured.sibling, measured.positions)

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[DraftWorker | None]:
        """A worker for one session, None where all are lent out or the draft cannot start."""
        worker = await self.take()
        try:
            yield worker
        finally:
            if worker is not None:
                self.give_back(worker)

    async def take(self) -> DraftWorker | None:
        """As `borrow`, until `give_back`."""
        worker = self._at_hand()
        if worker is None:
            return None
        self._lent += 1
        self._returned.clear()
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except asyncio.CancelledError:
            self.give_back(worker)
            raise
        except Exception as error:
            log.warning("the draft %s cannot start: %s", self.name, error)
            self._came_back()
            return None
        return worker

    def give_back(self, worker: DraftWorker) -> None:
        worker.end()
        self._idle.append(worker)
        self._came_back()

    async def alone(self, task: DraftTask, wrote: Callable[[], None]) -> Deliveries:
        """What the model itself writes, only where `has_model`; see `solo.written`. wrote: called for each token."""
        if self._alone is None:
            self._alone = ThreadPoolExecutor(1, "outrider-solo")
        self._lent += 1
        self._returned.clear()
        try:
            async with contextlib.aclosing(written(task, self._own_source, self._alone)) as deliveries:
                async for delivery in deliveries:
                    wrote()
                    yield delivery
        finally:
            self._came_back()

    async def warm_up(self) -> None:
        """Start the first worker now rather than in the first request."""
        async with self.borrow():
            pass

    async def all_back(self) -> None:
        """Return once no session has a worker."""
        await self._returned.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            await asyncio.to_thread(worker.close)
        if self._alone is not None:
            await asyncio.to_thread(self._alone.shutdown)
        if self._model is not None:
            self._model.close()

    def _at_hand(self) -> DraftWorker | None:
        if self._idle:
            return self._idle.pop()
        if len(self._workers) >= self._options.workers:
            return None
        self._workers.append(self._worker())
        return self._workers[-1]

    def _came_back(self) -> None:
        self._lent -= 1
        if not self._lent:
            self._returned.set()

    def _worker(self) -> DraftWorker:
        lookup = CalibratedSource(PromptLookup(), *self._of_lookup, leads=self._model is None)
        if self._model is None:
            return DraftWorker(lambda: Drafter(None, lookup, _LOOKUP_ALONE), share=self._share)
        return self._model_worker(self._model, lookup if self._options.prompt_lookup else None)

    def _model_worker(self, model: LlamaModel, lookup: CalibratedSource | None) -> DraftWorker:
        from outrider.llama import measure_widths

        held: list[TreeContext] = []

        def build() -> Drafter:
            """On the worker's thread, which owns the context from then on."""
            source, context = self._source(model)
            held.append(context)
            if self._widths is None:
                self._widths = DecodeLatency.measured(measure_widths(context, WIDTHS))
                log.info("draft %s: ms per decode by width: %s", self.name, _in_ms(self._widths))
            return Drafter(CalibratedSource(source, *self._of_model), lookup, self._widths, health=self.health)

        def release() -> None:
            for context in held:
                context.close()

        return DraftWorker(build, release, self._share, failed=self.health.failed)

    def _own_source(self) -> tuple[LlamaSource, Callable[[], None]]:
        """For one text, on the thread that calls."""
        if self._model is None:
            raise ModelRefused(f"the draft {self.name} has no model that could write alone")
        source, context = self._source(self._model)
        return source, context.close

    def _source(self, model: LlamaModel) -> tuple[LlamaSource, TreeContext]:
        """The thread that calls owns the context."""
        from edge_agent.drafting.sources.llama import LlamaSource
        from outrider.llama import TreeContext

        size = min(self._options.context, model.n_ctx_train)
        context = TreeContext(model, n_ctx=size, threads=self._options.threads)
        return LlamaSource(context, shared_vocabulary=self._shared), context


def _load(path: Path, target_table: Sequence[bytes], options: DraftOptions, digest: str) -> tuple[LlamaModel, int, str]:
    """(the model, ids that it shares with the target, SHA-256 of its file)"""
    from outrider.llama import LlamaModel

    model = LlamaModel.load(path, threads=options.threads)
    try:
        return model, compare_token_tables(model.token_table(), target_table), digest or file_digest(path)
    except BaseException:
        model.close()
        raise


def _free(loading: asyncio.Task[tuple[LlamaModel, int, str]]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result()[0].close()


def _in_ms(widths: DecodeLatency) -> str:
    return ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in widths.seconds)
