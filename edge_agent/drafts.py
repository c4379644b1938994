"""The draft of a client: one model in memory, and workers that sessions borrow."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from edge_agent.cpu_share import CpuShare
from edge_agent.drafter import Drafter, Voice
from edge_agent.growth import Widths
from edge_agent.placement import Measured
from edge_agent.sources.prompt_lookup import PromptLookup
from edge_agent.worker import DraftWorker
from outrider.core.survival import Calibrator
from outrider.core.vocabulary import compare_token_tables

if TYPE_CHECKING:
    from outrider.llama import LlamaModel

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8)
_LOOKUP_ALONE = Widths(((1, 1e-4),))


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


class DraftPool:
    """Workers of one draft. Use as an async context manager; made by `load` or `lookup_only`."""

    def __init__(
        self,
        name: str,
        options: DraftOptions,
        model: LlamaModel | None = None,
        shared_vocabulary: int = 0,
        release: str = "",
    ) -> None:
        self.name = name
        self.release = release
        """Alike on every device that has this draft; empty where it is not to be compared."""
        self._options = options
        self._model = model
        self._shared = shared_vocabulary
        # Learned by all sessions together: a draft's luck hardly depends on who asks.
        self._of_model = (Calibrator(), Calibrator())
        self._of_lookup = (Calibrator(), Calibrator())
        self._widths: Widths | None = None
        self._share = CpuShare(options.cpu_share, options.threads)
        self._idle: list[DraftWorker] = []
        self._workers: list[DraftWorker] = []

    @classmethod
    async def load(
        cls, path: Path, name: str, target_table: Sequence[bytes], options: DraftOptions, digest: str = ""
    ) -> Self:
        """Load a GGUF and compare its vocabulary with the target's.

        name: for people. digest: SHA-256 of the file in hex, where it is known.
        Raises ModelRefused, VocabularyMismatch, ImportError without llama-cpp-python.
        """
        return await asyncio.to_thread(cls._load, path, name, target_table, options, digest)

    @classmethod
    def _load(cls, path: Path, name: str, target_table: Sequence[bytes], options: DraftOptions, digest: str) -> Self:
        from outrider.llama import LlamaModel

        model = LlamaModel.load(path, threads=options.threads)
        try:
            shared = compare_token_tables(model.token_table(), target_table)
        except BaseException:
            model.close()
            raise
        return cls(name, options, model, shared, digest or _digest(path))

    @classmethod
    def lookup_only(cls, options: DraftOptions) -> Self:
        """No model: guesses from what the text has said before."""
        return cls("lookup", options, release="lookup")

    def expect(self, measured: Measured) -> None:
        """Start from what verifiers measured of this draft's guesses elsewhere, as long as little was learned here."""
        for calibrator in self._of_lookup if self._model is None else self._of_model:
            calibrator.expect(measured.first, measured.sibling, measured.positions)

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[DraftWorker | None]:
        """A worker for one session, None where all are lent out or the draft cannot start."""
        worker = await self._take()
        try:
            yield worker
        finally:
            if worker is not None:
                worker.end()
                self._idle.append(worker)

    async def warm_up(self) -> None:
        """Start the first worker now rather than in the first request."""
        async with self.borrow():
            pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            await asyncio.to_thread(worker.close)
        if self._model is not None:
            self._model.close()

    async def _take(self) -> DraftWorker | None:
        if self._idle:
            worker = self._idle.pop()
        elif len(self._workers) < self._options.workers:
            worker = self._worker()
            self._workers.append(worker)
        else:
            return None
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except asyncio.CancelledError:
            self._idle.append(worker)
            raise
        except Exception as error:
            log.warning("the draft %s cannot start: %s", self.name, error)
            return None
        return worker

    def _worker(self) -> DraftWorker:
        lookup = Voice(PromptLookup(), *self._of_lookup, leads=self._model is None)
        if self._model is None:
            return DraftWorker(lambda: Drafter(None, lookup, _LOOKUP_ALONE), share=self._share)
        return self._model_worker(self._model, lookup if self._options.prompt_lookup else None)

    def _model_worker(self, model: LlamaModel, lookup: Voice | None) -> DraftWorker:
        from edge_agent.sources.llama_source import LlamaSource
        from outrider.llama import TreeContext, measure_widths

        held: list[TreeContext] = []

        def build() -> Drafter:
            """On the worker's thread, which owns the context from then on."""
            size = min(self._options.context, model.n_ctx_train)
            context = TreeContext(model, n_ctx=size, threads=self._options.threads)
            held.append(context)
            if self._widths is None:
                self._widths = Widths.measured(measure_widths(context, WIDTHS))
                log.info("draft %s: ms per decode by width: %s", self.name, _in_ms(self._widths))
            source = LlamaSource(context, shared_vocabulary=self._shared)
            return Drafter(Voice(source, *self._of_model), lookup, self._widths)

        def release() -> None:
            for context in held:
                context.close()

        return DraftWorker(build, release, self._share)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_ms(widths: Widths) -> str:
    return ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in widths.seconds)
