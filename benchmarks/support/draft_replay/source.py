"""Replay a recorded draft: the device's own drafter, growth and calibrators over recorded answers, without a model.

A recorded decode takes its recorded time on the draft's thread, which sleeps meanwhile, as llama.cpp would let the
others run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.support.draft_replay.recording import DraftRecording, RecordedProposals, copied, place
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.pool import DraftOptions, DraftPool
from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.drafting.worker import DraftWorker
from outrider.core.acceptance.calibrator import AcceptancePrior, Calibrator
from outrider.core.errors import BadRequest
from outrider.core.tree import ROOT


class ReplayedSource:
    """Answer from a recording, each time after the draft's recorded time, for which the calling thread sleeps."""

    def __init__(
        self,
        recorded: DraftRecording,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._recordings = {(r.call.prompt, r.call.sampling): r for r in recorded.recordings}
        self._vocabulary = recorded.vocabulary
        self._decodes = DecodeLatency(recorded.decodes)
        self._commit_s = recorded.commit_s
        self._correction_s = recorded.correction_s
        self._clock = clock
        self._sleep = sleep
        self._overslept = 0.0
        self._recording: RecordedProposals | None = None
        self._position = 0
        self._evaluated: set[int] = set()
        self.asked = 0
        self.missed = 0
        """Questions that the recording does not answer; their answer is empty."""

    def begin(self, task: DraftTask) -> None:
        """Begin a session. Raises BadRequest if the request is not recorded; the session then has no draft."""
        self._recording = self._recordings.get((task.prompt, task.sampling))
        if self._recording is None:
            raise BadRequest(f"no recording of this prompt of {len(task.prompt)} tokens with {task.sampling}")
        self._position, self._evaluated = len(task.received), set()
        self._take(self._recording.prefill_s)

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in tokens. A committed token that was not evaluated costs a decode, as for a model."""
        known = 0
        while known < len(path) and path[known] in self._evaluated:
            known += 1
        self._position += len(tokens)
        tail = len(tokens) - known
        if tail:
            self._evaluated.clear()
            self._take(self._correction_s + self._decodes.of(tail) - self._decodes.of(1))
        else:
            self._take(self._commit_s)

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        evaluated = [node.id for node in nodes if node.id != ROOT]
        self._evaluated.update(evaluated)
        if evaluated:
            self._take(self._decodes.of(len(evaluated)))
        return [self._answer(node) for node in nodes]

    def knows(self, token: int) -> bool:
        return token < self._vocabulary

    def _answer(self, node: NodeContext) -> list[Proposal]:
        if self._recording is None:
            return []
        self.asked += 1
        found = self._recording.answers.get(place(self._recording.call.output, self._position, node.path))
        self.missed += found is None
        return list(found or ())

    def _take(self, seconds: float) -> None:
        """Let the recorded time pass; if a sleep is too long, the next one is shorter by the excess."""
        wanted = seconds - self._overslept
        if wanted <= 0:
            self._overslept -= seconds
            return
        until = self._clock() + wanted
        self._sleep(wanted)
        self._overslept = max(0.0, self._clock() - until)


class WrongSpanSource:
    """Replace a source's proposals within a span by wrong ones, as a draft's are on text that it does not know.

    output: what the target says. Below a wrong proposal there is no recorded answer; the last one stands in for it, so
    that a tree in the span grows as deep as any other.
    """

    def __init__(self, below: DraftSource, output: Sequence[int], span: tuple[int, int], vocabulary: int) -> None:
        self._below = below
        self._output = output
        self._span = range(*span)
        self._vocabulary = vocabulary
        self._position = 0
        self._last: Sequence[Proposal] = ()

    def begin(self, task: DraftTask) -> None:
        self._position = len(task.received)
        self._below.begin(task)

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._position += len(tokens)
        self._below.advance(path, tokens)

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        found = self._below.expand(nodes)
        return [self._replaced(self._position + len(n.path), p) for n, p in zip(nodes, found, strict=True)]

    def knows(self, token: int) -> bool:
        return self._below.knows(token)

    def _replaced(self, position: int, proposals: list[Proposal]) -> list[Proposal]:
        self._last = proposals or self._last
        if position not in self._span or position >= len(self._output):
            return proposals
        wrong = [replace(p, token=(p.token + 1) % self._vocabulary) for p in self._last]
        return [p for p in wrong if p.token != self._output[position]]


class ReplayedDrafts(DraftPool):
    """Replay a draft. It begins with the recording's observations, and learns as a live draft does.

    taught: `recorded.calibrators()`, if they were made before; making them takes a while.
    wrap: wraps each source, for instance to make it worse.
    release: as in DraftPool; two drafts that share one share what the coordinator expects of them.
    ngram_only: whether the recorded model is left out, and n-grams alone propose.
    drafter: makes the drafter of these sources, for one that does not draft as the product does.
    """

    def __init__(
        self,
        recorded: DraftRecording,
        taught: Sequence[Calibrator] = (),
        workers: int = 1,
        wrap: Callable[[DraftSource], DraftSource] = lambda source: source,
        release: str = "recorded",
        ngram_only: bool = False,
        drafter: Callable[[Sequence[CalibratedSource]], Drafter] = Drafter,
    ) -> None:
        release = f"{release}-ngram" if ngram_only else release
        super().__init__("recorded", DraftOptions(workers=workers), release=release)
        self._ngram_only = ngram_only
        self._recorded = recorded
        own = taught or recorded.calibrators()
        greedy, sampled, ngram_greedy, ngram_sampled = map(copied, own)
        self._model_calibrators, self._ngram_calibrators = (greedy, sampled), (ngram_greedy, ngram_sampled)
        self._wrap = wrap
        self._drafter = drafter
        self.sources: list[ReplayedSource] = []
        self.drafters: list[Drafter] = []

    def apply_prior(self, prior: AcceptancePrior) -> None:
        """Apply a prior as a pool with a model does; the recording stands for the model."""
        for calibrator in self._model_calibrators:
            calibrator.start_from(prior)

    def _worker(self) -> DraftWorker:
        source = ReplayedSource(self._recorded)
        self.sources.append(source)
        widths = DecodeLatency(self._recorded.widths)
        model = CalibratedSource(self._wrap(source), *self._model_calibrators, widths)
        ngram = CalibratedSource(self._wrap(NgramSource()), *self._ngram_calibrators)
        drafter = self._drafter([ngram] if self._ngram_only else [model, ngram])
        self.drafters.append(drafter)
        return DraftWorker(lambda: drafter)
