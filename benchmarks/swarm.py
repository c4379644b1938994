"""Check that a swarm of light clients over real gRPC behaves as live devices do.

`Swarm` runs jobs in a few processes (benchmarks.support.draft_replay.worker); nothing there evaluates a model. This
program records held-out prompts, then sends each by a live device and by a light client in turn, one session at a time
on loopback, the verifier on one core and the drafting device on another. Both run in processes of the swarm, alike but
for the draft's passes, and begin with what was learned while recording. `acceptance_over_live` is the median, over
prompts and rounds, of the replay's tokens per step over the live one's; it must be within 5% of 1. So should be
`tokens_per_step_over_live`, which is of all tokens and all steps.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recording import DraftRecording
from benchmarks.support.draft_replay.swarm import Swarm, record_drafts, settings
from benchmarks.support.harness import Criterion, Pair, Size

TOLERANCE = 0.05


async def against_live(
    recorded: DraftRecording, swarm: Swarm, rounds: int
) -> dict[str, list[tuple[SessionOutcome, SessionOutcome]]]:
    """Return by setting the outcomes of a live session and of its replay, for each prompt and round."""
    found: dict[str, list[tuple[SessionOutcome, SessionOutcome]]] = {}
    for turn in range(rounds):
        for number, recording in enumerate(recorded.recordings):
            setting = recording.call.name.rpartition(" ")[2]
            played = {}
            for live in harness.rotated((True, False), turn + number):
                outcome = await swarm.play(SessionJob(number, live=live))
                if outcome.error:
                    raise RuntimeError(f"{recording.call.name}, {'live' if live else 'replayed'}: {outcome.error}")
                played[live] = outcome
            if played[True].wrong:
                raise RuntimeError(f"the live output of {recording.call.name} is not the recorded one")
            found.setdefault(setting, []).append((played[True], played[False]))
    return found


def report(found: Mapping[str, Sequence[tuple[SessionOutcome, SessionOutcome]]]) -> dict[str, dict[str, float]]:
    """Print a line per setting; medians of live, replayed and their ratio, by setting.

    found: pairs (live, replayed).
    """
    result = {}
    for setting, pairs in found.items():
        ratios = [_per_step(replayed) / _per_step(live) for live, replayed in pairs]
        live = statistics.median(_per_step(live) for live, _ in pairs)
        replay = statistics.median(_per_step(replayed) for _, replayed in pairs)
        wrong = sum(replayed.wrong for _, replayed in pairs)
        asked, missed = (sum(getattr(replayed, name) for _, replayed in pairs) for name in ("asked", "missed"))
        print(
            f"{setting:<8} tokens per step: live {live:.2f}, replayed {replay:.2f}, ratio {harness.spread(ratios)};"
            f" {len(pairs)} pairs, {wrong} wrong tokens, {missed} of {asked} questions beyond the recording",
            flush=True,
        )
        tokens_per_step = [_per_step_of_all([pair[which] for pair in pairs]) for which in range(2)]
        result[setting] = {
            "of_all": round(tokens_per_step[1] / tokens_per_step[0], 4),
            "live": round(live, 3),
            "replayed": round(replay, 3),
            "ratio": round(statistics.median(ratios), 4),
            "wrong": wrong,
        }
    return result


def _per_step(outcome: SessionOutcome) -> float:
    return outcome.tokens / outcome.steps


def _per_step_of_all(outcomes: Sequence[SessionOutcome]) -> float:
    return sum(one.tokens for one in outcomes) / sum(one.steps for one in outcomes)


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("swarm", __doc__).parse_args(argv)
    pair = Pair.in_folder(options.models)
    rounds, count, tokens = options.size.pick(smoke=(1, 1, 32), quick=(1, 3, 64), full=(5, 18, 96))
    _, device_core = harness.cores()
    prompts = pair.encode(harness.prompts("heldout", count))
    async with harness.one_verifier(pair, prefix_cache=False) as cluster:
        where = ServiceAddress(cluster.verifiers[0].address, cluster.address)
        recorded = await record_drafts(where, pair, prompts, settings(tokens))
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch, "recorded.json")
            recorded.save(file)
            print(f"{len(recorded.recordings)} recordings; {_pace(recorded)}", flush=True)
            async with Swarm(file, where, cores=[device_core], draft=pair.draft) as swarm:
                found = report(await against_live(recorded, swarm, rounds))
    _finish(found, options.size)


def _pace(recorded: DraftRecording) -> str:
    decodes = ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in recorded.decodes)
    return f"ms per recorded decode by width: {decodes}; commit {1000 * recorded.commit_s:.2f}"


def _finish(found: Mapping[str, Mapping[str, float]], size: Size) -> None:
    wrong = sum(int(values["wrong"]) for values in found.values())
    far = [name for name, values in found.items() if abs(values["ratio"] - 1.0) > TOLERANCE]
    harness.finish(
        {
            "acceptance_over_live": {setting: values["ratio"] for setting, values in found.items()},
            "tokens_per_step_over_live": {setting: values["of_all"] for setting, values in found.items()},
            "tokens_per_step_live": {setting: values["live"] for setting, values in found.items()},
            "tokens_per_step_replayed": {setting: values["replayed"] for setting, values in found.items()},
            "wrong_tokens": wrong,
        },
        [
            Criterion.none("replayed tokens that are not the target's", wrong),
            Criterion(
                f"settings whose ratio is more than {TOLERANCE:g} from 1",
                "none",
                ", ".join(far) or "none",
                not far,
                enforced_from=Size.FULL,
            ),
            *(
                Criterion.bound(
                    f"{name}, tokens per step of all replayed sessions over those of live ones",
                    values["of_all"],
                    at_least=1.0 - TOLERANCE,
                    at_most=1.0 + TOLERANCE,
                    enforced_from=None,
                )
                for name, values in found.items()
            ),
        ],
        size,
    )


if __name__ == "__main__":
    asyncio.run(main())
