"""Hold a draft in memory: GGUF models that propose tokens together, sources without a model, or both."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.artifacts.store import file_digest
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import ModelRefused
from outrider.core.vocabulary import compare_token_tables
from outrider.wire.v1.coordinator_pb2 import Prior

if TYPE_CHECKING:
    from edge_agent.drafting.sources.llama import LlamaSource
    from edge_agent.drafting.worker import DraftWorker
    from outrider.llama import LlamaModel, TreeContext

log = logging.getLogger(__name__)

NGRAM = "ngram"
"""Name and release of a draft of n-grams alone."""
CONTEXT = 4096
"""Tokens of a context that is made however much memory is free."""
WIDTHS = (1, 2, 4, 8)
"""Numbers of nodes for which the duration of a decode is measured."""
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
    added: frozenset[int] = frozenset()
    """Ids of the target's added tokens, which a draft may have as other ones."""


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
    context_length: int = CONTEXT
    """Tokens of a worker's context."""
    unlike: Sequence[int] = ()
    """Ids of special tokens that differ from the target's."""
    latency: DecodeLatency | None = None
    """How long decodes take; the first worker measures it."""

    def context(self) -> TreeContext:
        """Return a context, which belongs to the calling thread."""
        from outrider.llama import TreeContext

        return TreeContext(self.model, n_ctx=self.context_length)

    def source(self, context: TreeContext) -> LlamaSource:
        from edge_agent.drafting.sources.llama import LlamaSource

        return LlamaSource(context, shared_vocabulary=self.shared_vocabulary, unlike=self.unlike)

    def calibrated(self, context: TreeContext) -> CalibratedSource:
        """Return a source with what was learned of it; measures a decode's duration if nobody has."""
        from outrider.llama import measure_widths

        if self.latency is None:
            self.latency = DecodeLatency(tuple(sorted(measure_widths(context, WIDTHS).items())))
            in_ms = ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in self.latency.seconds)
            log.info("draft %s: ms per decode by nodes: %s", self.name, in_ms)
        return CalibratedSource(self.source(context), *self.calibrators, self.latency, self.shared_vocabulary)


@dataclass(eq=False)
class Draft:
    """A draft in memory, which `load` makes and a DraftPool frees. Without models, the free sources draft alone."""

    name: str
    release: str = ""
    """The same on every device that has this draft; empty where it is not to be compared."""
    models: tuple[LoadedModel, ...] = ()
    """The best one first; every worker drafts with all of them."""
    ngram_calibrators: tuple[Calibrator, Calibrator] = field(default_factory=lambda: (Calibrator(), Calibrator()))
    missing: str = ""
    """Why a model that was asked for is not among these; the requests say so."""
    failure: str = ""
    """Why no worker can start any more: one could not, and not every session tries again."""
    users: int = 0
    """Sessions that it drafts for, which the pool counts."""
    workers: list[DraftWorker] = field(default_factory=list)
    """The threads that draft with it, which the pool starts and ends."""
    idle: list[DraftWorker] = field(default_factory=list)
    """Those of them that no session uses."""

    @property
    def has_model(self) -> bool:
        return bool(self.models)

    def apply_prior(self, prior: Prior) -> None:
        """Start from the acceptance that verifiers measured elsewhere, as long as little was learned here."""
        for calibrator in self.models[0].calibrators if self.models else self.ngram_calibrators:
            calibrator.start_from(prior)

    def drafter(self, owned: contextlib.ExitStack) -> Drafter:
        """Return a drafter for the calling thread. owned: closes its contexts."""
        models = [one.calibrated(owned.enter_context(one.context())) for one in self.models]
        return Drafter([*models, CalibratedSource(NgramSource(), *self.ngram_calibrators)])

    def close(self) -> None:
        """Free the models. No worker may use them any more."""
        for loaded in self.models:
            loaded.model.close()


def ngram_draft(missing: str = "") -> Draft:
    """Return a draft without a model, which proposes what the text repeats. missing: why a wanted model is not used."""
    return Draft(NGRAM, NGRAM, missing=missing)


async def load(
    path: Path | Sequence[Path], name: str, digest: str = "", *, target_table: Sequence[bytes], options: DraftOptions
) -> Draft:
    """Load a GGUF file, or several, and compare their vocabularies with the target's.

    path: of several, the best one first; one that is refused is left out, unless it is the last one left.
    name: for people; several are named by their files. digest: SHA-256 of a single file in hex, where it is known.
    Raises ModelRefused, VocabularyMismatch, ImportError without llama-cpp-python.
    """
    paths = [(path, name, digest)] if isinstance(path, Path) else [(one, one.name, "") for one in path]
    loading = asyncio.create_task(asyncio.to_thread(_load_all, paths, target_table, options))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:  # the thread goes on, and nobody would free what it loads
        loading.add_done_callback(_free)
        raise


def _load_all(paths: Sequence[tuple[Path, str, str]], target_table: Sequence[bytes], options: DraftOptions) -> Draft:
    """Load files, each with its name and its digest or ""."""
    models: list[LoadedModel] = []
    missing: list[str] = []
    with contextlib.ExitStack() as failing:
        for number, (path, name, digest) in enumerate(paths, start=1):
            try:
                loaded = _load(path, name, target_table, options, digest)
            except ModelRefused as error:
                if not models and number == len(paths):
                    raise
                missing.append(f"the draft {name} is left out: {error}")
                log.warning("%s", missing[-1])
                continue
            failing.callback(loaded.model.close)
            models.append(loaded)
        for loaded in models:
            loaded.context_length = _context_length(loaded, options, contexts=options.workers * len(models))
        failing.pop_all()
    release = models[0].digest
    if len(models) > 1:
        release = hashlib.sha256("".join(loaded.digest for loaded in models).encode()).hexdigest()
    return Draft(" + ".join(loaded.name for loaded in models), release, tuple(models), missing="; ".join(missing))


def _load(path: Path, name: str, target_table: Sequence[bytes], options: DraftOptions, digest: str) -> LoadedModel:
    from outrider.llama import LlamaModel
    from outrider.llama.trial import survived

    if digest:  # it came over the network
        survived(path, f"the draft {name},")
    model = LlamaModel.load(path, threads=options.threads)
    try:
        special = model.special_ids() | options.added
        shared, unlike = compare_token_tables(model.token_table(), target_table, special, f"the draft {name}")
        digest = digest or file_digest(path)
        return LoadedModel(name, model, shared, digest, unlike=unlike)
    except BaseException:
        model.close()
        raise


def _context_length(loaded: LoadedModel, options: DraftOptions, contexts: int) -> int:
    """Return the tokens of a worker's context; tells if sessions may outgrow it. contexts: of all workers."""
    model, positions = loaded.model, options.positions or CONTEXT
    length = min(positions, model.n_ctx_train)
    if length > CONTEXT:
        room = int(_MEMORY_SHARE * free_memory()) // (contexts * model.token_bytes())
        length = max(CONTEXT, min(length, room))
    if length < positions:
        why = "it was trained for no more" if length == model.n_ctx_train else "there is no memory for more"
        log.info("draft %s: sessions of over %d tokens go on by n-grams alone: %s", loaded.name, length, why)
    return length


def free_memory() -> int:
    """Return the bytes of memory that this process may still take; 0 where the system does not say."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, max(0, limit - used))
    return free


def _free(loading: asyncio.Task[Draft]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
