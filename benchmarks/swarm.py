"""A swarm of light clients over real gRPC, and the check that it behaves as live devices do.

`Swarm` runs jobs in a few processes (benchmarks.support.draft_replay.worker); nothing there evaluates a model. Run as a
program it records held-out prompts, then sends each by a live device and by a light client in turn, one session at a
time on loopback, the verifier on one core and whoever drafts on another. `acceptance_over_live` is the median, over
prompts and rounds, of the replay's tokens per step over the live one's; it must be within 5% of 1.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome, options_of
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest
from benchmarks.support.draft_replay.swarm import SETTINGS, Swarm, make_tape
from benchmarks.support.harness import Pair
from edge_agent.sdk.client import AsyncClient

TOLERANCE = 0.05


async def against_live(
    tape: DraftRecording, swarm: Swarm, client: AsyncClient, rounds: int
) -> dict[str, list[tuple[float, SessionOutcome]]]:
    """By setting: tokens per step of a live session, and the replay's outcome, for each prompt and round."""
    found: dict[str, list[tuple[float, SessionOutcome]]] = {}
    for turn in range(rounds):
        for number, recording in enumerate(tape.recordings):
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


async def main() -> None:
    options = harness.arguments("swarm", __doc__).parse_args()
    pair = Pair.in_folder(options.models)
    rounds, count = (2, 4) if options.quick else (5, 18)
    verifier_core, device_core = harness.cores()
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = {p.id: tokenizer.encode(p.text, add_special_tokens=False).ids for p in harness.prompts("heldout")[:count]}
    async with harness.cluster(prefix_cache=False) as cluster:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", cores=[device_core])
        arguments = ["--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1"]
        verifier = await cluster.start_verifier(*arguments, cores=[verifier_core])
        harness.pin(device_core)
        where = ServiceAddress(verifier.address, cluster.address)
        tape = await make_tape(where, pair, prompts, SETTINGS)
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
            file = Path(scratch, "tape.json")
            tape.save(file)
            print(f"{len(tape.recordings)} recordings; {_pace(tape)}", flush=True)
            async with (
                AsyncClient(coordinator=cluster.address) as client,
                Swarm(file, where, cores=[device_core]) as swarm,
            ):
                for recording in tape.recordings:  # the live draft learns as the recorded one has
                    await _live(client, recording.call)
                found = report(await against_live(tape, swarm, client, rounds))
    _finish(found)


def _pace(tape: DraftRecording) -> str:
    decodes = ", ".join(f"{width}: {1000 * seconds:.2f}" for width, seconds in tape.decodes)
    return f"ms per recorded decode by width: {decodes}; commit {1000 * tape.commit_s:.2f}"


def _finish(found: Mapping[str, Mapping[str, float]]) -> None:
    harness.finish(
        {
            "acceptance_over_live": {setting: values["ratio"] for setting, values in found.items()},
            "tokens_per_step_live": {setting: values["live"] for setting, values in found.items()},
            "tokens_per_step_replayed": {setting: values["replayed"] for setting, values in found.items()},
            "wrong_tokens": sum(int(values["wrong"]) for values in found.values()),
        }
    )
    if any(values["wrong"] or abs(values["ratio"] - 1.0) > TOLERANCE for values in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
