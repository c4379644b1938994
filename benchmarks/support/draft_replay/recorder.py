"""Record a draft's answers wherever a device's tree could go, around a known output of the target.

The real drafter is led along the output, one position at a time, and grows its tree from every root until nothing is
worth a decode (at a quarter of a device's `min_acceptance`, so that a replay under other conditions finds what it asks
for). Every answer of the draft is recorded under its place: the output up to a position, and the tokens that leave it
there. A replay (benchmarks.support.draft_replay.client) runs the device's own drafter, growth and driver over these
answers, so there is no second growth policy, and it knows what is below a root only once a Commit or its own proposal
has led there.

The times of decodes are taken separately, on some of the requests, with pauses like those of a device that waits for
its verifier, since a pass after a pause takes longer than one of many in a row. They are medians over the passes
between two pauses.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.support.draft_replay.recording import (
    DraftRecording,
    Observation,
    Place,
    RecordedProposals,
    RecordedRequest,
    place,
)
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.pool import CONTEXT, WIDTHS, DraftOptions
from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.llama import LlamaSource
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Agreement, Calibrator
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.tree import ROOT
from outrider.core.vocabulary import compare_token_tables
from outrider.llama import LlamaModel, TreeContext, measure_widths

ROOM = 256
"""Most nodes of a recorded tree: more than any device holds, so that none is left out for want of room."""
SLOW_STEP_MS = 1_000.0
"""Step time so long that a device's own time costs nothing, and `min_acceptance` alone bounds the tree."""
TIMED, TIMED_TOKENS = 6, 48
"""Number of requests on which times are taken, and the most tokens of each."""
TIMED_DECODES = 6
"""The most decodes between two pauses, about as many as a device has time for in a step."""
PAUSE_S = 0.02
"""Length of a pause."""


class RecordingSource:
    """Record the answers of another source and their durations."""

    def __init__(self, below: DraftSource, clock: Callable[[], float] = time.perf_counter) -> None:
        self._below = below
        self._clock = clock
        self._output: tuple[int, ...] = ()
        self._position = 0
        self._evaluated: set[int] = set()
        self.answers: dict[Place, tuple[Proposal, ...]] = {}
        self.prefill_s = 0.0
        self.decodes: defaultdict[int, list[float]] = defaultdict(list)
        self.commits: list[float] = []
        """Seconds of each advance by a token that was evaluated already."""
        self.corrections: list[float] = []
        """Seconds of each advance by a token that was not."""

    def lead(self, output: Sequence[int]) -> None:
        """Begin another recording."""
        self._output, self.answers = tuple(output), {}

    def forget_times(self) -> None:
        for times in (self.decodes, self.commits, self.corrections):
            times.clear()

    def begin(self, task: DraftTask) -> None:
        self._position, self._evaluated = len(task.received), set()
        began = self._clock()
        self._below.begin(task)
        self.prefill_s = self._clock() - began

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._position += len(tokens)
        known = len(path) == len(tokens) and self._evaluated.issuperset(path)
        began = self._clock()
        self._below.advance(path, tokens)
        (self.commits if known else self.corrections).append(self._clock() - began)
        if not known:
            self._evaluated.clear()

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        began = self._clock()
        found = self._below.expand(nodes)
        evaluated = [node.id for node in nodes if node.id != ROOT]
        if evaluated:
            self.decodes[len(evaluated)].append(self._clock() - began)
        self._evaluated.update(evaluated)
        for node, proposals in zip(nodes, found, strict=True):
            self.answers[place(self._output, self._position, node.path)] = tuple(proposals)
        return found

    def knows(self, token: int) -> bool:
        return self._below.knows(token)


class ObservedCalibrator(Calibrator):
    """Record a calibrator's observations, so that they can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[Observation] = []

    def observe(
        self, rank: int, margin: float, depth: int, accepted: bool, agreement: Agreement = Agreement.UNKNOWN
    ) -> None:
        self.lessons.append((rank, margin, depth, accepted, agreement))
        super().observe(rank, margin, depth, accepted, agreement)


class DraftRecorder:
    """Record requests one after another; the draft learns on the way, as a device's does."""

    def __init__(
        self,
        source: DraftSource,
        widths: DecodeLatency,
        plan: SpeculationPlan,
        *,
        vocabulary: int,
        ends: Sequence[int] = (),
    ) -> None:
        self._source = RecordingSource(source)
        self._witnesses = [ObservedCalibrator() for _ in range(4)]
        greedy, sampled, ngram_greedy, ngram_sampled = self._witnesses
        model = CalibratedSource(self._source, greedy, sampled, widths)
        self._drafter = Drafter([model, CalibratedSource(NgramSource(), ngram_greedy, ngram_sampled)])
        self._widths = widths
        self._plan = plan
        self._vocabulary = vocabulary
        self._ends = tuple(ends)

    def record(self, call: RecordedRequest) -> RecordedProposals:
        """Grow the tree from every position of the output."""
        drafter, source = self._drafter, self._source
        self._begin(call)
        for token in call.output:
            while drafter.step():
                pass
            drafter.advance([token])
        return RecordedProposals(call, source.prefill_s, dict(source.answers))

    def finish(self, recordings: Sequence[RecordedProposals], *, timed: bool = True) -> DraftRecording:
        """Return the recording of the draft, as the last call of a recorder.

        timed: whether it is to be played, so that times are taken first.
        """
        source, lessons = self._source, tuple(tuple(witness.lessons) for witness in self._witnesses)
        if timed:
            source.forget_times()
            for recorded in recordings[:: max(1, len(recordings) // TIMED)][:TIMED]:
                self._take_times(recorded.call)
        decodes = {width: statistics.median(seconds) for width, seconds in source.decodes.items()}
        decodes = decodes or dict(self._widths.seconds)
        commit_s = statistics.median(source.commits or [0.0])
        return DraftRecording(
            recordings=tuple(recordings),
            vocabulary=self._vocabulary,
            widths=self._widths.seconds,
            decodes=tuple(sorted(decodes.items())),
            commit_s=commit_s,
            correction_s=statistics.median(source.corrections or [commit_s + DecodeLatency.measured(decodes).of(1)]),
            lessons=lessons,
            ends=self._ends,
        )

    def _begin(self, call: RecordedRequest) -> None:
        self._source.lead(call.output)
        ends = frozenset(() if call.ignore_eos else self._ends)
        self._drafter.begin(DraftTask(call.prompt, (), call.sampling, call.max_tokens, ends), self._plan)

    def _take_times(self, call: RecordedRequest) -> None:
        self._begin(call)
        for token in call.output[:TIMED_TOKENS]:
            for _ in range(TIMED_DECODES):
                if not self._drafter.step():
                    break
            time.sleep(PAUSE_S)
            self._drafter.advance([token])


def generous(directive: Directive, limits: SessionLimits) -> SpeculationPlan:
    """Return the plan to record under: a device's, with a quarter of its `min_acceptance` and room for all nodes."""
    wide = replace(
        directive,
        window_nodes=ROOM,
        window_depth=limits.depth,
        min_acceptance=directive.min_acceptance / 4,
        step_ms=SLOW_STEP_MS,
    )
    return SpeculationPlan.of(wide, replace(limits, nodes=ROOM))


@contextlib.contextmanager
def recorder(
    draft: Path, table: Sequence[bytes], plan: SpeculationPlan, ends: Sequence[int]
) -> Iterator[DraftRecorder]:
    """Yield a recorder of a draft on llama.cpp, set up as on a device. table: the target's tokens."""
    options = DraftOptions()
    model = LlamaModel.load(draft, threads=options.threads)
    try:
        shared = compare_token_tables(model.token_table(), table)
        context = TreeContext(model, n_ctx=min(CONTEXT, model.n_ctx_train), threads=options.threads)
        try:
            widths = DecodeLatency.measured(measure_widths(context, WIDTHS))
            source = LlamaSource(context, shared_vocabulary=shared)
            yield DraftRecorder(source, widths, plan, vocabulary=shared, ends=ends)
        finally:
            context.close()
    finally:
        model.close()
