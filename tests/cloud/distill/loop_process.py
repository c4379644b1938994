"""Run the loop as a process of its own, over real child processes whose stages are fakes:

python loop_process.py FOLDER COORDINATOR [once]     the loop
python loop_process.py STAGE RUN_DIR                 a stage; training takes until FOLDER/go exists
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from loop_fakes import TARGET, FakeLog, World, passage, write_stage

from cloud_verifier.distill.data.traffic_counts import TrafficCounter
from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publishing.publisher import Publisher, ReleaseLedger
from cloud_verifier.distill.publishing.release_client import ReleaseClient
from cloud_verifier.distill.stage_processes import run_stage
from outrider.artifacts.store import ArtifactStore
from outrider.wire.ticket import Signer

STAGES = ("dataset", "training", "export", "gate")


async def loop(folder: Path, address: str) -> None:
    config = World(
        folder, settings={"retry_s": 0.1, "poll_s": 0.05, "nice": 3, "train_minutes": 1.0, "stage_minutes": 1.0}
    ).config
    modules = {stage: [__file__, stage] for stage in STAGES}
    log = FakeLog([passage("one", 1_000, "sums", 500.0)])
    async with ReleaseClient(address, admin_token=lambda: "sesame") as releases:
        publisher = Publisher(
            releases,
            ReleaseLedger(config.state / "releases"),
            ArtifactStore(config.artifacts, ".gguf"),
            Signer.load(folder / "key.pem"),
            TARGET,
        )
        counter = TrafficCounter(log, TARGET.weights_hash, config.alarm_tokens)
        loop = DistillLoop(config, partial(run_stage, config, commands=modules), publisher, counter)
        work = asyncio.create_task(loop.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        await work


def stage(name: str, run: Path) -> None:
    folder = run.parent.parent.parent
    if name == "training":
        with (folder / "trainers").open("a") as file:
            file.write(f"{os.getpid()} {os.nice(0)}\n")
        while not (folder / "go").exists():
            time.sleep(0.01)
    write_stage(name, run)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if sys.argv[1] in STAGES:
        stage(sys.argv[1], Path(sys.argv[2]))
    else:
        try:
            asyncio.run(loop(Path(sys.argv[1]), sys.argv[2]))
        except asyncio.CancelledError:
            print("ended in order", flush=True)
