"""Distil a draft from a tenant's traffic by the product's own loop, and measure what that gains and takes.

The loop begins with the pair's draft. Devices without a draft ask a verifier the tenant's questions, those of
`--traffic FILE` or half of our own of reasoning, as often as needed; the tenant has agreed to its prompts and answers
being recorded. `outrider-distill once` then builds a dataset, trains, exports, evaluates offline against the first
draft, and publishes. The acceptance length is that of a live device with each draft at temperature 0.8: on questions of
the tenant's kind that were not asked before (`same_domain`) and on chat (`other_domain`). `degenerate` counts texts
that end in a loop.

`offline` is the loop's evaluation: whether it published, why not, and its figures. `minutes` are those of each stage.
At last devices with sessions under way are given the new draft, whatever the evaluation said: `swap_ms` is the time
from the last proposal of the old draft to the first of the new one. `--losses` trains with each loss alone, too.

Caveat: minutes of training on two cores, which also serve the traffic; a draft learns more from more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Pair, quantile, rounded, say
from coordinator.cluster import Cluster
from edge_agent.bench.users import GREEDY, SAMPLED, Users, run_users
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.artifacts.store import file_digest
from outrider.core.errors import BadRequest, Unavailable

TENANT, OTHER = "reasoning", "chat"
"""Categories of our prompts: of the tenant's questions, and of another domain."""
LOSSES = ("kl", "tv", "hybrid")
RESULTS = {"dataset": "dataset.log", "training": "done.json", "export": "export.json", "gate": "gate.json"}
"""The last file that each stage of the loop writes."""
FLUSH_S = 1.0
AT_ONCE = 16
"""Requests of the tenant at a time."""
SWAP_S = 300.0
"""Time after which a device that does not draft with the new draft never will. No figure depends on it."""
REFUSED = 3
"""Exit status of `outrider-distill once` if the offline evaluation refuses the draft."""


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    requests: int = 450
    tokens: int = 128
    """Tokens of a request, at most."""
    train_minutes: float = 4.0
    heldout: int = 16
    """Prompts to measure with, of each domain."""
    heldout_tokens: int = 96
    devices: int = 8
    """Devices that change their draft."""
    training: Mapping[str, Any] = field(default_factory=lambda: {"batch_tokens": 2_048})
    dataset: Mapping[str, Any] = field(default_factory=lambda: {"heldout_share": 0.15})
    gate: Mapping[str, Any] = field(default_factory=dict)


QUICK = Setting(
    requests=48,
    tokens=48,
    train_minutes=0.3,
    heldout=2,
    heldout_tokens=32,
    devices=2,
    training={"batch_tokens": 512, "micro_tokens": 512, "learning_rate": 1e-3, "warmup_steps": 3, "measure_steps": 20},
    dataset={"heldout_share": 0.25, "validation_share": 0.15},
    gate={"sessions": 4},
)


class System:
    """Runs a coordinator that serves drafts, a verifier that records, and the loop's command."""

    def __init__(self, pair: Pair, setting: Setting, cluster: Cluster, folder: Path) -> None:
        self.pair = pair
        self.cluster = cluster
        self.artifacts, self.state, self.key = folder / "artifacts", folder / "state", folder / "publisher.pem"
        self._traffic = folder / "traffic"
        self._setting = setting

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, pair: Pair, setting: Setting) -> AsyncIterator[System]:
        async with harness.cluster() as cluster:
            system = cls(pair, setting, cluster, Path(os.environ["OUTRIDER_EDGE_CACHE_DIR"]))
            system.artifacts.mkdir(parents=True)
            # No device is drawn for a trial of the new draft: all of them get it at the same time, in mid-session.
            recorded = ("--recording-share", "1", "--recording-prompts", "--canary-share", "0.001")
            drafts = ("--artifacts", str(system.artifacts), "--http", "127.0.0.1:0")
            await cluster.start_coordinator(*harness.LOOPBACK, *recorded, *drafts)
            models = ("--model", str(pair.target), "--draft", str(pair.draft))
            log = ("--traffic", str(system._traffic), "--traffic-flush-s", str(FLUSH_S))
            await cluster.start_verifier(*models, *log)
            yield system

    async def distill(self, *arguments: str, allowed: Sequence[int] = (0,), **settings: Any) -> str:
        """Run `outrider-distill`, and return what it prints. Raises Unavailable with its last line if it fails."""
        given = {
            "traffic": self._traffic,
            "target": self.pair.target,
            "draft": self.pair.draft,
            "artifacts": self.artifacts,
            "key": self.key,
            "state_dir": self.state,
            "coordinator": self.cluster.address,
            "fresh_tokens": 1,
            "training_options": json.dumps(
                {"threads": harness.CORES, "minutes": self._setting.train_minutes, **self._setting.training}
            ),
            "dataset_options": json.dumps(dict(self._setting.dataset)),
            "gate": json.dumps(dict(self._setting.gate)),
            **settings,
        }
        variables = {f"OUTRIDER_DISTILL_{name.upper()}": str(value) for name, value in given.items()}
        return await command("cloud_verifier.distill.cli", *arguments, allowed=allowed, variables=variables)

    async def stabilise(self, digest: str) -> None:
        """Make a published draft that of all devices, as an operator does."""
        where = ("--coordinator", self.cluster.address)
        while True:
            shown = json.loads(await command("coordinator.cli", "releases", "show", digest, "--output", "json", *where))
            if shown["releases"][0]["state"] == "stable":
                return
            await command("coordinator.cli", "releases", "promote", digest, *where)


async def command(
    module: str, *arguments: str, allowed: Sequence[int] = (0,), variables: Mapping[str, str] | None = None
) -> str:
    """Run a command of the product, and return what it prints. Raises Unavailable with its last line if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=harness.ROOT,
        env=os.environ | (variables or {}),
    )
    try:
        output = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode not in allowed:
        last = (output.strip() or f"status {process.returncode}").splitlines()[-1]
        raise Unavailable(f"`python -m {module} {' '.join(arguments[:2])}` failed: {last}")
    return output


# --- the loop


@dataclass(frozen=True)
class Distilled:
    """Hold what one run of the loop left."""

    file: Path
    minutes: Mapping[str, float]
    """By stage."""
    verdict: Mapping[str, Any]
    trained: Mapping[str, Any]

    @classmethod
    def read(cls, state: Path) -> Distilled:
        """Read the latest run in the loop's folder. Raises Unavailable if it has no draft."""
        runs = sorted((state / "runs").glob("*"), key=lambda folder: int(folder.name))
        if not runs or not (runs[-1] / "gate.json").is_file():
            raise Unavailable("the loop has trained no draft: there is too little traffic, or it has failed")
        folder = runs[-1]
        ends = [(folder / name).stat().st_mtime for name in ("job.json", *RESULTS.values())]
        return cls(
            folder / "draft.gguf",
            {name: round((end - begun) / 60.0, 2) for name, (begun, end) in zip(RESULTS, pairwise(ends), strict=True)},
            json.loads((folder / "gate.json").read_bytes()),
            json.loads((folder / "done.json").read_bytes()),
        )


async def record(system: System, setting: Setting, questions: Sequence[Sequence[int]]) -> int:
    """Let the tenant ask these questions in turn, and return the tokens of the answers."""
    async with AsyncClient(
        coordinator=system.cluster.address, draft=None, timeout=None, traffic_class=TENANT
    ) as client:

        async def ask(number: int) -> int:
            turn, which = divmod(number, len(questions))
            sampling = SAMPLED | {"seed": number} if turn or which % 2 else GREEDY
            return len((await client.generate(questions[which], max_tokens=setting.tokens, **sampling)).token_ids)

        tokens = await asyncio.gather(*map(ask, range(setting.requests)))
    await asyncio.sleep(3 * FLUSH_S)
    return sum(tokens)


async def distilled(system: System, **settings: Any) -> Distilled:
    """Run the loop once."""
    await system.distill("once", allowed=(0, REFUSED), **settings)
    return await asyncio.to_thread(Distilled.read, Path(settings.get("state_dir", system.state)))


# --- what is measured


@dataclass(frozen=True)
class Domains:
    """Hold the tenant's prompts, and what drafts are measured on. All are the target's tokens."""

    questions: list[list[int]]
    heldout: Mapping[str, list[list[int]]]
    """`same_domain` and `other_domain`, each with a prompt more, to warm up with."""

    @classmethod
    def of(cls, options: argparse.Namespace, pair: Pair, setting: Setting) -> Domains:
        other = list(harness.prompts(options, pair, 1 + setting.heldout, category=OTHER).values())
        source = argparse.Namespace(**vars(options) | {"prompts": options.traffic or options.prompts, "measured": {}})
        asked = list(harness.prompts(source, pair, category="" if options.traffic else TENANT).values())
        options.measured["traffic"] = source.measured["prompts"]
        heldout = 1 + min(setting.heldout, len(asked) // 2 - 1)
        return cls(asked[:-heldout], {"same_domain": asked[-heldout:], "other_domain": other})


async def row_of(system: System, name: str, draft: Path, setting: Setting, domains: Domains) -> dict[str, Any]:
    """Return the row of a draft."""
    row: dict[str, Any] = {"draft": name, "degenerate": 0}
    for domain, prompts in domains.heldout.items():
        users = Users(
            {"coordinator": system.cluster.address},
            prompts,
            draft=str(draft),
            options=SAMPLED | {"max_tokens": setting.heldout_tokens},
        )
        run = await run_users(users, sorted(os.sched_getaffinity(0))[-1:])
        row |= {domain: rounded(run.acceptance_length), "degenerate": row["degenerate"] + run.degenerate}
    say(row)
    return row


async def swaps(system: System, new: Path, setting: Setting, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Give devices a new draft while they generate; return the milliseconds that each swap took."""
    address, digest = system.cluster.address, file_digest(new)
    keys = (await system.distill("key")).split()[-1]
    settings = EdgeSettings(release_keys=keys)
    found: list[float] = []

    async def device(number: int) -> None:
        cache = system.state.parent / f"device-{number}"
        until_s, release, turn = time.monotonic() + SWAP_S, "", 0
        async with AsyncClient(coordinator=address, cache_dir=cache, settings=settings, timeout=None) as client:
            await client.prepare()
            while release != digest:
                if time.monotonic() > until_s:
                    raise Unavailable(f"a device has not changed to the new draft within {SWAP_S:.0f} s")
                options = SAMPLED | {"max_tokens": 256, "ignore_eos": True}
                done = (await client.generate(prompts[(number + turn) % len(prompts)], **options)).statistics
                if release:  # until then it drafts n-grams alone, and loads the first release
                    found.extend(1e3 * seconds for seconds in done.swaps_s)
                elif done.release:
                    ready.release()
                release, turn = done.release, turn + 1

    ready = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        for number in range(setting.devices):
            group.create_task(device(number))
        for _ in range(setting.devices):
            await ready.acquire()
        await system.stabilise(digest)
    return found


async def measure(options: argparse.Namespace) -> None:
    pair, setting = Pair.of(options), QUICK if options.quick else Setting()
    domains = Domains.of(options, pair, setting)
    async with System.running(pair, setting) as system:
        await system.distill("key")
        published = await system.distill("publish", str(pair.draft))
        await system.stabilise(digest_in(published))
        recorded = await record(system, setting, domains.questions)
        say(f"{recorded} tokens recorded")
        rows = [await row_of(system, "before", pair.draft, setting, domains)]
        for loss in LOSSES if options.losses else ():
            # No draft gains so much: it is evaluated, and not published.
            apart = {"state_dir": system.state / loss, "training_options_loss": loss, "gate_gain": 100.0}
            run = await distilled(system, **apart)
            rows.append(await row_of(system, f"after, {loss}", run.file, setting, domains))
        run = await distilled(system)
        rows.append(await row_of(system, "after", run.file, setting, domains))
        if not run.verdict["passed"]:
            await system.distill("publish", str(run.file))
        swap_ms = await swaps(system, run.file, setting, domains.questions)
    harness.finish(
        options,
        f"{recorded} recorded tokens of {min(setting.requests, len(domains.questions))} questions,"
        f" {setting.train_minutes:g} minutes of training on {harness.CORES} cores, up to {setting.heldout} prompts a"
        " domain.",
        rows,
        recorded_tokens=recorded,
        steps=run.trained["step"],
        minutes=run.minutes,
        offline={name: run.verdict[name] for name in ("passed", "reasons", "metrics")},
        swaps=len(swap_ms),
        swap_ms_p50=rounded(statistics.median(swap_ms) if swap_ms else None, 1),
        swap_ms_max=rounded(quantile(swap_ms, 1.0), 1),
    )


def digest_in(output: str) -> str:
    """Return the digest that `outrider-distill publish` prints. Raises BadRequest if there is none."""
    found = re.search(r"\b[0-9a-f]{64}\b", output)
    if found is None:
        raise BadRequest(f"`outrider-distill publish` names no release: {output[-200:]}", field="release")
    return found[0]


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("distill", __doc__)
    parser.add_argument("--traffic", type=Path, metavar="FILE", help="the tenant's questions (default: our reasoning)")
    parser.add_argument("--losses", action="store_true", help="train with each loss alone, too")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
