"""Store a known output of the target, and the draft's answers wherever a tree could go around it.

No model is needed to read one. `benchmarks.support.draft_replay.recorder` makes them,
`benchmarks.support.draft_replay.client` plays them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_agent.drafting.sources.base import Proposal
from outrider.core.acceptance.calibrator import Agreement, Calibrator
from outrider.core.sampling import SamplingParams

Place = tuple[int, tuple[int, ...]]
"""The number of output tokens before a place, and the tokens after them that are not the output's."""
Observation = tuple[int, float, int, bool, Agreement]
"""One observation of a calibrator: rank, margin, depth, whether the proposal was accepted, and agreement."""


@dataclass(frozen=True)
class RecordedRequest:
    """Hold a request and the tokens that the target generated for it."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    output: tuple[int, ...]
    ignore_eos: bool = False


@dataclass(frozen=True)
class RecordedProposals:
    """Hold the draft's proposals around one request."""

    call: RecordedRequest
    prefill_s: float
    answers: Mapping[Place, tuple[Proposal, ...]]


@dataclass(frozen=True)
class DraftRecording:
    """Hold the recordings of one draft on one device, with its speed and the observations to begin with."""

    recordings: tuple[RecordedProposals, ...]
    vocabulary: int
    """Number of ids known to the draft, from 0 on."""
    widths: tuple[tuple[int, float], ...]
    """Seconds of a decode by width as the device measured them at its start, for its growth to plan with."""
    decodes: tuple[tuple[int, float], ...]
    """Median seconds of a decode by width, scoring included, with a device's pauses: the time that a replay takes."""
    commit_s: float
    """Median seconds to take in a token that was evaluated already."""
    correction_s: float
    """Median seconds to take in a token that was not evaluated: at least a decode."""
    lessons: tuple[tuple[Observation, ...], ...]
    """Observations of the four calibrators (model greedy, model sampled, n-gram greedy, n-gram sampled): those that
    the device had made by the end of recording, unless they are replaced by those of other prompts."""
    ends: tuple[int, ...] = ()

    def calibrators(self) -> list[Calibrator]:
        """Return new calibrators that have made all these observations, in the order of `lessons`."""
        taught = []
        for lessons in self.lessons:
            calibrator = Calibrator()
            for lesson in lessons:
                calibrator.observe(*lesson)
            taught.append(calibrator)
        return taught

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"recordings": [_to_json(r) for r in self.recordings]}))

    @classmethod
    def load(cls, path: Path) -> DraftRecording:
        data = json.loads(path.read_text())
        return cls(
            recordings=tuple(map(_from_json, data["recordings"])),
            vocabulary=data["vocabulary"],
            widths=tuple((int(w), float(s)) for w, s in data["widths"]),
            decodes=tuple((int(w), float(s)) for w, s in data["decodes"]),
            commit_s=data["commit_s"],
            correction_s=data["correction_s"],
            lessons=tuple(
                tuple((int(r), float(m), int(d), bool(a), Agreement(g)) for r, m, d, a, g in lessons)
                for lessons in data["lessons"]
            ),
            ends=tuple(data["ends"]),
        )


def copied(calibrator: Calibrator) -> Calibrator:
    """Return a calibrator that knows the same and learns from then on by itself.

    `copy.deepcopy` takes 25 times as long, during which a process with sessions serves none of them.
    """
    made = copy.copy(calibrator)
    made._pooled = _copied(calibrator._pooled)
    made._by_depth = [_copied(rows) for rows in calibrator._by_depth]
    made._table = [[list(row) for row in rows] for rows in calibrator._table]
    return made


def _copied(rows: list[list[Any]]) -> list[list[Any]]:
    return [[type(tally)(tally.tried, tally.accepted) for tally in row] for row in rows]


def place(output: Sequence[int], position: int, path: Sequence[int]) -> Place:
    """Return the unique name of the place `path` below the first `position` tokens of the output."""
    shared = 0
    while shared < len(path) and position + shared < len(output) and path[shared] == output[position + shared]:
        shared += 1
    return position + shared, tuple(path[shared:])


def _to_json(recording: RecordedProposals) -> dict[str, Any]:
    answers = [
        [position, path, [[p.token, p.rank, p.margin] for p in proposals]]
        for (position, path), proposals in recording.answers.items()
    ]
    return {"call": asdict(recording.call), "prefill_s": recording.prefill_s, "answers": answers}


def _from_json(data: dict[str, Any]) -> RecordedProposals:
    call, answers = data["call"], data["answers"]
    return RecordedProposals(
        call=RecordedRequest(
            name=call["name"],
            prompt=tuple(call["prompt"]),
            sampling=_sampling(call["sampling"]),
            max_tokens=call["max_tokens"],
            output=tuple(call["output"]),
            ignore_eos=call["ignore_eos"],
        ),
        prefill_s=data["prefill_s"],
        answers={
            (position, tuple(path)): tuple(Proposal(token, rank, margin) for token, rank, margin in proposals)
            for position, path, proposals in answers
        },
    )


def _sampling(data: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**data, "logit_bias": tuple((token, bias) for token, bias in data["logit_bias"])})
