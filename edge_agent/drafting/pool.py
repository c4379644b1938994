"""Hold a draft in memory, of one model or of several, and the workers that draft with it for sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.drafting.worker import DraftWorker
from outrider.artifacts.store import file_digest
from outrider.core.acceptance.calibrator import AcceptancePrior, Calibrator
from outrider.core.errors import ModelRefused, Overloaded
from outrider.core.protocol.device import Delivery
from outrider.core.protocol.messages import Finish
from outrider.core.tree import ROOT
from outrider.core.vocabulary import compare_token_tables

if TYPE_CHECKING:
    from edge_agent.drafting.sources.llama import LlamaSource
    from outrider.llama import LlamaModel, TreeContext

log = logging.getLogger(__name__)

_A = TypeVar("_A")

NGRAM = "ngram"
"""Name and release of a draft of n-grams alone."""
WIDTHS = (1, 2, 4, 8)
"""Numbers of nodes for which the duration of a decode is measured."""
CONTEXT = 4096
"""Tokens of a context that needs no look at the memory."""
_IDLE_WORKERS = 4
"""Idle workers that a draft of n-grams alone keeps: another one is started in no time."""
_MEMORY_SHARE = 0.25
"""Share of the free memory that the contexts of all workers take together, if they are longer than that."""


@dataclass(frozen=True)
class DraftOptions:
    """The resources that a client's drafts may use on this device."""

    workers: int = 2
    """Sessions that may draft with a model at once; further ones draft by n-grams alone rather than wait."""
    threads: int = 1
    """CPU threads of a decode."""
    positions: int = 0
    """Positions of the target, for which a draft's context has room as far as it was trained for them, and as the
    contexts of all workers leave three quarters of the free memory; 0 if they are not known."""
    ngram: bool = True
    """Whether n-grams of the text propose tokens beside the model."""
    budget: CpuBudget | None = None
    """CPU time of all drafts together; None is no cap."""


@dataclass
class LoadedModel:
    """A GGUF file in memory, with what all sessions learn of it together."""

    name: str
    model: LlamaModel
    shared_vocabulary: int
    """Number of ids that it shares with the target."""
    digest: str
    """SHA-256 of the file, in hex."""
    calibrators: tuple[Calibrator, Calibrator] = field(default_factory=lambda: (Calibrator(), Calibrator()))
    """(greedy, sampled); acceptance hardly depends on the session."""
    context_length: int = 0
    """Tokens of a worker's context."""
    latency: DecodeLatency | None = None
    """How long decodes take; the first worker measures it."""


class DraftPool:
    """A draft and its workers, which `load` or `ngram_only` makes and `close` frees.

    models: the best one first; every worker drafts with all of them. Without any, n-grams draft alone.
    """

    def __init__(
        self,
        name: str,
        options: DraftOptions,
        models: Sequence[LoadedModel] = (),
        release: str = "",
    ) -> None:
        self.name = name
        self.release = release
        """The same on every device that has this draft; empty where it is not to be compared."""
        self._options = options
        self._models = tuple(models)
        self._ngram_calibrators = (Calibrator(), Calibrator())
        for loaded in self._models:
            loaded.context_length = self._chosen_length(loaded.model)
        self._workers: list[DraftWorker] = []
        self._idle: list[DraftWorker] = []
        self.start_failure = ""
        """Why a worker could not start; such a worker keeps its place, so that not every session tries again."""
        self._offline_thread: ThreadPoolExecutor | None = None
        self._users = 0
        self._unused = asyncio.Event()
        """Set whenever no session uses the draft."""
        self._unused.set()

    @classmethod
    async def load(
        cls,
        path: Path | Sequence[Path],
        name: str,
        target_table: Sequence[bytes],
        options: DraftOptions,
        digest: str = "",
    ) -> Self:
        """Load a GGUF file, or several, and compare their vocabularies with the target's.

        path: of several, the best one first; one that is refused is left out, unless it is the last one left.
        name: for people; several are named by their files. digest: SHA-256 of a single file in hex, where it is known.
        Raises ModelRefused, VocabularyMismatch, ImportError without llama-cpp-python.
        """
        paths = [(path, name, digest)] if isinstance(path, Path) else [(one, one.name, "") for one in path]
        loading = asyncio.create_task(asyncio.to_thread(_load_all, paths, target_table, options))
        try:
            models = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the thread goes on, and nobody would free what it loads
            loading.add_done_callback(_free)
            raise
        release = models[0].digest
        if len(models) > 1:
            release = hashlib.sha256("".join(loaded.digest for loaded in models).encode()).hexdigest()
        return cls(" + ".join(loaded.name for loaded in models), options, models, release)

    @classmethod
    def ngram_only(cls, options: DraftOptions) -> Self:
        """Make a draft without a model, which proposes what the text repeats, in any number of sessions at once."""
        return cls(NGRAM, dataclasses.replace(options, workers=sys.maxsize), release=NGRAM)

    @property
    def has_model(self) -> bool:
        """Return whether a model drafts, rather than n-grams alone."""
        return bool(self._models)

    def apply_prior(self, prior: AcceptancePrior) -> None:
        """Start from the acceptance that verifiers measured elsewhere, as long as little was learned here."""
        for calibrator in self._models[0].calibrators if self._models else self._ngram_calibrators:
            calibrator.start_from(prior)

    async def take(self) -> DraftWorker:
        """Borrow a worker until `give_back`.

        Raises ModelRefused if no worker can start, Overloaded if all are in use.
        """
        if self._idle:
            worker = self._idle.pop()
        elif len(self._workers) < self._options.workers:
            worker = self._started_worker()
        elif self.start_failure:
            raise ModelRefused(self.start_failure)
        else:
            raise Overloaded(f"all draft workers are in use; draft_workers is {self._options.workers}")
        self._add_user()
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except asyncio.CancelledError:
            self.give_back(worker)
            raise
        except Exception as error:
            self.start_failure = f"the draft {self.name} cannot start: {error}"
            log.warning("%s", self.start_failure)
            self._remove_user()
            raise ModelRefused(self.start_failure) from error
        return worker

    def give_back(self, worker: DraftWorker) -> None:
        """End the worker's session and keep the worker for the next one, unless enough are idle."""
        worker.end()
        if self._models or len(self._idle) < _IDLE_WORKERS:
            self._idle.append(worker)
        else:
            self._workers.remove(worker)
            worker.close(timeout_s=0.0)  # its thread ends soon, and nothing waits for it
        self._remove_user()

    async def generate_offline(self, task: DraftTask, on_token: Callable[[], None]) -> AsyncGenerator[Delivery, None]:
        """Continue the task's sequence with the model alone, one unverified token at a time; `on_token` counts them.

        The noise is that of the verified sequence, so the draft generates the same tokens again with the same seed.
        Raises ModelRefused without a model or where it proposes nothing, ContextFull for a sequence that is too long.
        """
        if not self._models:
            raise ModelRefused(f"the draft {self.name} has no model that could generate alone")
        thread = self._offline_thread = self._offline_thread or ThreadPoolExecutor(1, "outrider-offline")
        loop = asyncio.get_running_loop()

        async def on_thread(work: Callable[[], _A]) -> _A:
            return await loop.run_in_executor(thread, work)

        self._add_user()
        try:
            source, context = await on_thread(lambda: self._model_source(self._models[0]))
            try:
                await on_thread(lambda: source.begin(task))
                for position in range(len(task.received), task.max_tokens):
                    token = await on_thread(lambda at=position: _next_token(source, at))  # type: ignore[misc]
                    last = position + 1 == task.max_tokens
                    finish = Finish.EOS if token in task.ends else Finish.LENGTH if last else Finish.NONE
                    on_token()
                    yield Delivery((token,), (True,), (False,), (), finish, verified=False)
                    if finish:
                        return
                    await on_thread(lambda new=token: source.advance((), (new,)))  # type: ignore[misc]
            finally:
                thread.submit(context.close)
        finally:
            self._remove_user()

    async def warm_up(self) -> None:
        """Start the first worker now rather than in the first request. Each session is told of a failure."""
        with contextlib.suppress(ModelRefused, Overloaded):
            self.give_back(await self.take())

    async def unused(self) -> None:
        """Return once no session uses the draft."""
        await self._unused.wait()

    async def close(self) -> None:
        for worker in tuple(self._workers):
            await asyncio.to_thread(worker.close)
        if self._offline_thread is not None:
            await asyncio.to_thread(self._offline_thread.shutdown)
        for loaded in self._models:
            loaded.model.close()

    def _add_user(self) -> None:
        self._users += 1
        self._unused.clear()

    def _remove_user(self) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    def _started_worker(self) -> DraftWorker:
        """Return a new worker, whose thread builds its drafter. Raises ModelRefused if no thread can start."""
        try:
            worker = self._worker()
        except RuntimeError as error:  # the draft is not to blame, and the next session may find a thread
            raise ModelRefused(f"the draft {self.name} cannot start now: {error}") from error
        self._workers.append(worker)
        return worker

    def _worker(self) -> DraftWorker:
        budget = self._options.budget
        if not self._models:
            return DraftWorker(lambda: Drafter([self._ngram_source()]), budget=budget)
        owned = contextlib.ExitStack()

        def build() -> Drafter:
            sources: list[CalibratedSource] = []
            for number, loaded in enumerate(self._models, start=1):
                try:
                    sources.append(self._calibrated(loaded, owned))
                except Exception as error:
                    if not sources and number == len(self._models):
                        raise
                    log.warning("the draft %s cannot start, and others go on: %s", loaded.name, error)
            free = [self._ngram_source()] if self._options.ngram else []
            return Drafter([*sources, *free])

        return DraftWorker(build, owned.close, budget)

    def _ngram_source(self) -> CalibratedSource:
        return CalibratedSource(NgramSource(), *self._ngram_calibrators)

    def _calibrated(self, loaded: LoadedModel, owned: contextlib.ExitStack) -> CalibratedSource:
        """Return a model's source for the calling thread. owned: closes its context."""
        from outrider.llama import measure_widths

        source, context = self._model_source(loaded)
        owned.callback(context.close)
        if loaded.latency is None:
            loaded.latency = DecodeLatency.measured(measure_widths(context, WIDTHS))
            in_ms = ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in loaded.latency.seconds)
            log.info("draft %s: ms per decode by nodes: %s", loaded.name, in_ms)
        return CalibratedSource(source, *loaded.calibrators, loaded.latency)

    def _chosen_length(self, model: LlamaModel) -> int:
        """Return the tokens of a worker's context; tells if sessions may outgrow it."""
        positions = self._options.positions or CONTEXT
        length = min(positions, model.n_ctx_train)
        if length > CONTEXT:
            contexts = self._options.workers * len(self._models)
            room = int(_MEMORY_SHARE * free_memory()) // (contexts * model.token_bytes())
            length = max(CONTEXT, min(length, room))
        if length < positions:
            why = "it was trained for no more" if length == model.n_ctx_train else "there is no memory for more"
            log.info("draft %s: sessions of over %d tokens go on by n-grams alone: %s", self.name, length, why)
        return length

    def _model_source(self, loaded: LoadedModel) -> tuple[LlamaSource, TreeContext]:
        """Return a source and its context, which belongs to the calling thread."""
        from edge_agent.drafting.sources.llama import LlamaSource
        from outrider.llama import TreeContext

        context = TreeContext(loaded.model, n_ctx=loaded.context_length, threads=self._options.threads)
        return LlamaSource(context, shared_vocabulary=loaded.shared_vocabulary), context


def _next_token(source: LlamaSource, position: int) -> int:
    """Return the draft's own token at a generated position."""
    proposals = source.expand([NodeContext(ROOT, ROOT, -1, position, ())])[0]
    if not proposals:
        raise ModelRefused("the draft's logits are not numbers, so it cannot generate alone")
    return proposals[0].token


def _load_all(
    paths: Sequence[tuple[Path, str, str]], target_table: Sequence[bytes], options: DraftOptions
) -> list[LoadedModel]:
    """Load files, each with its name and its digest or "". One that is refused is left out, unless all are."""
    models: list[LoadedModel] = []
    try:
        for number, (path, name, digest) in enumerate(paths, start=1):
            try:
                models.append(_load(path, name, target_table, options, digest))
            except ModelRefused as error:
                if not models and number == len(paths):
                    raise
                log.warning("the draft %s is left out: %s", name, error)
    except BaseException:
        for loaded in models:
            loaded.model.close()
        raise
    return models


def _load(path: Path, name: str, target_table: Sequence[bytes], options: DraftOptions, digest: str) -> LoadedModel:
    from outrider.llama import LlamaModel
    from outrider.llama.trial import survived

    if digest:  # it came over the network
        survived(path, f"the draft {name},")
    model = LlamaModel.load(path, threads=options.threads)
    try:
        shared = compare_token_tables(model.token_table(), target_table)
        return LoadedModel(name, model, shared, digest or file_digest(path))
    except BaseException:
        model.close()
        raise


def free_memory() -> int:
    """Return the bytes of memory that this process may still take; 0 where the system does not say."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
        with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
            limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
            free = min(free, max(0, limit - used))
        return free
    except (OSError, KeyError, ValueError):
        pass
    try:  # half of all memory, where no more than that is known
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 0


def _free(loading: asyncio.Task[list[LoadedModel]]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        for loaded in loading.result():
            loaded.model.close()
