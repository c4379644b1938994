"""Check that a swarm of light clients over real gRPC behaves as live devices do.

`Swarm` runs jobs in a few processes (benchmarks.support.draft_replay.worker); nothing there evaluates a model. This
program records held-out prompts, then sends each by a live device and by a light client in turn, one session at a time
on loopback, the verifier on one core and the drafting device on another. `acceptance_over_live` is the median, over
prompts and rounds, of the replay's tokens per step over the live one's; it must be within 5% of 1.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome, options_of
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest
from benchmarks.support.draft_replay.swarm import Swarm, record_drafts, settings
from benchmarks.support.harness import Criterion, Pair, Size
from edge_agent.sdk.client import AsyncClient

TOLERANCE = 0.05


async def against_live(
    recorded: DraftRecording, swarm: Swarm, client: AsyncClient, rounds: int
) -> dict[str, list[tuple[float, SessionOutcome]]]:
    """Return by setting the tokens per step of a live session and the replay's outcome, for each prompt and round."""
    found: dict[str, list[tuple[float, SessionOutcome]]] = {}
    for turn in range(rounds):
        for number, recording in enumerate(recorded.recordings):
            setting = recording.call.name.rpartition(" ")[2]
            live_first = (turn + number) % 2 == 0
            live = await _live(client, recording.call) if live_first else 0.0
            replayed = await swarm.play(SessionJob(number))
            live = live or await _live(client, recording.call)
            if replayed.error:
                raise RuntimeError(f"the replay of {recording.call.name} failed: {replayed.error}")
            found.setdefault(setting, []).append((live, replayed))
    return found


async def _live(client: AsyncClient, call: RecordedRequest) -> float:
    completion = await client.generate(call.prompt, **options_of(call))
    if completion.token_ids != call.output:
        raise RuntimeError(f"the live output of {call.name} is not the recorded one: run benchmarks.lossless")
    return completion.statistics.tokens_per_step


def report(found: Mapping[str, Sequence[tuple[float, SessionOutcome]]]) -> dict[str, dict[str, float]]:
    """Print a line per setting; medians of live, replayed and their ratio, by setting."""
    result = {}
    for setting, pairs in found.items():
        ratios = [replayed.tokens / replayed.steps / live for live, replayed in pairs]
        live = statistics.median(live for live, _ in pairs)
        replay = statistics.median(replayed.tokens / replayed.steps for _, replayed in pairs)
        wrong = sum(replayed.wrong for _, replayed in pairs)
        asked, missed = (sum(getattr(replayed, name) for _, replayed in pairs) for name in ("asked", "missed"))
        print(
            f"{setting:<8} tokens per step: live {live:.2f}, replayed {replay:.2f}, ratio {harness.spread(ratios)};"
            f" {len(pairs)} pairs, {wrong} wrong tokens, {missed} of {asked} questions beyond the recording",
            flush=True,
        )
        result[setting] = {
            "live": round(live, 3),
            "replayed": round(replay, 3),
            "ratio": round(statistics.median(ratios), 4),
            "wrong": wrong,
        }
    return result


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
            async with (
                AsyncClient(coordinator=cluster.address, timeout=None) as client,
                Swarm(file, where, cores=[device_core]) as swarm,
            ):
                for recording in recorded.recordings:  # the live draft learns as the recorded one has
                    await _live(client, recording.call)
                found = report(await against_live(recorded, swarm, client, rounds))
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
        ],
        size,
    )


if __name__ == "__main__":
    asyncio.run(main())
