"""Run light clients in a process of their own, a child of benchmarks.support.draft_replay.swarm.Swarm, by JSON lines.

{"id": n, "recording": i, ...Job}  -> {"id": n, ...Outcome}, when it has ended
The end of the input ends the process, and what still runs with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.support.draft_replay.client import Player, ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recording import DraftRecording


async def serve(player: Player) -> None:
    """Play the jobs that arrive on stdin, one per line, all at the same time."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps({"ready": True}), flush=True)
    running: set[asyncio.Task[None]] = set()
    async for line in lines:
        request = json.loads(line)
        number = request.pop("id")
        task = asyncio.create_task(_answer(player, number, SessionJob(**request)))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _answer(player: Player, number: int, job: SessionJob) -> None:
    try:
        outcome = await player.play(job)
    except Exception as error:
        outcome = SessionOutcome(error=f"{type(error).__name__}: {error}")
    print(json.dumps({"id": number} | asdict(outcome)), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support.draft_replay.worker", description=__doc__)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("where", type=json.loads, help="fields of replay.Where, as JSON")
    parser.add_argument("--draft", type=Path, help="the draft's file, for live jobs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-swarm-") as scratch:
        recorded, where = DraftRecording.load(options.recorded), ServiceAddress(**options.where)
        release = f"recorded-{options.recorded.stem}"
        async with Player(recorded, where, Path(scratch), release, options.draft) as player:
            gc.collect()
            gc.freeze()  # looking through the recordings again would stop all sessions for a while
            await serve(player)


if __name__ == "__main__":
    asyncio.run(main())
