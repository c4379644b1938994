"""Distil a draft from a tenant's traffic by the product's own loop, and measure what that gains and takes.

The loop begins with the pair's draft. Devices without a draft ask the tenant's questions, those of `--traffic FILE` or
half of our own of reasoning, again and again as far as needed, and others chat; all have agreed to prompts and answers
being recorded. `outrider-distill once` then builds a dataset, trains, exports, evaluates offline against the first
draft, and publishes.

The acceptance length is that of a live device with each draft, which also drafts from n-grams, without the verifier's
own sources: on questions of the tenant's kind that were never asked before, those of `--heldout FILE` or the other half
(`same_domain`), and on both turns of our chats (`other_domain`), each asked once per draft and temperature.
`degenerate` counts texts that end in a loop. The text is the same with every draft, so `gains` compares them on the
same texts: what live devices gained, and what the draft alone did on first turns, read by llama.cpp in trees of 12
(`before`, `after`, `gain`, and the middle 95% of bootstrap samples of the prompts).

`offline` is the loop's evaluation: whether it published, why not, and its figures. `minutes` are those of each stage.
At last devices with sessions under way are given the new draft, whatever the evaluation said: `swap_ms` is the time
from the last proposal of the old draft to the first of the new one. `--losses` trains with each loss alone, too.

Caveat: minutes of training on two cores; a draft learns more from more.
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

import numpy as np

from benchmarks.support import harness
from benchmarks.support.harness import Pair, quantile, rounded, say
from cloud_verifier.distill.evaluation import compare
from cloud_verifier.distill.texts import Text as Recorded
from cloud_verifier.traffic.recorder import FLUSH_S
from coordinator.cluster import Cluster
from edge_agent.bench.users import GREEDY, SAMPLED, PromptInput, Run, Text, Users, differing, run_users
from edge_agent.config import EdgeSettings
from edge_agent.prompts import read_prompts
from edge_agent.sdk.client import AsyncClient
from outrider.artifacts.store import file_digest
from outrider.core.errors import BadRequest, Unavailable

TENANT, OTHER = "reasoning", "chat"
"""Categories of our prompts: of the tenant's questions, and of another domain."""
LOSSES = ("kl", "tv", "hybrid")
SAMPLINGS = {"greedy": GREEDY, "T=0.8": SAMPLED}
RESULTS = {"dataset": "plan.json", "training": "done.json", "export": "export.json", "gate": "gate.json"}
"""The file that each stage of the loop writes at its end; the plan of the training is written as that begins."""
SWAP_S = 300.0
"""Time after which a device that does not draft with the new draft never will. No figure depends on it."""
REFUSED = 3
"""Exit status of `outrider-distill once` if the offline evaluation refuses the draft."""


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    requests: int = 400
    tokens: int = 128
    """Tokens of a request, at most."""
    chats: int = 150
    """Requests of others."""
    train_minutes: float = 8.0
    heldout: int = 20
    """Prompts to measure with, of each domain; of chats as many as there are."""
    heldout_tokens: int = 64
    devices: int = 8
    """Devices that change their draft."""
    training: Mapping[str, Any] = field(default_factory=dict)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    gate: Mapping[str, Any] = field(default_factory=dict)


QUICK = Setting(
    requests=48,
    tokens=48,
    chats=24,
    train_minutes=0.3,
    heldout=2,
    heldout_tokens=32,
    devices=2,
    training={"batch_tokens": 512, "micro_tokens": 512, "warmup_steps": 3, "measure_steps": 20},
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
            tenants = harness.recording(system.state, prompts=True)
            recorded = ("--tenants", str(tenants), "--canary", '{"share": 0.001}')
            drafts = ("--artifacts", str(system.artifacts), "--http", "127.0.0.1:0")
            await cluster.start_coordinator(*harness.LOOPBACK, *recorded, *drafts)
            models = ("--model", str(pair.target), "--draft", str(pair.draft), "--engine-args", '{"ngram": false}')
            log = ("--traffic", str(system._traffic))
            for core in sorted(os.sched_getaffinity(0)):
                await cluster.start_verifier(*models, *log, cores=[core])
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
                {
                    "threads": len(harness.CORES),
                    "minutes": self._setting.train_minutes,
                    **self._setting.training,
                    **self._setting.dataset,
                }
            ),
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


async def record(system: System, setting: Setting, questions: Sequence[Sequence[int]]) -> dict[str, int]:
    """Let the tenant ask its questions in turn, half of them greedily, and others chat.

    What the others say is what the target itself writes where a user would speak (Magpie, arXiv 2406.08464). Returns
    the tokens of the answers by class.
    """
    pair, address = system.pair, system.cluster.address

    async def ask(client: AsyncClient, question: Sequence[int], number: int, sampled: bool) -> int:
        sampling = SAMPLED | {"seed": number} if sampled else GREEDY
        return len((await client.generate(question, max_tokens=setting.tokens, **sampling)).token_ids)

    async def tenant(client: AsyncClient, number: int) -> int:
        turn, which = divmod(number, len(questions))
        return await ask(client, questions[which], number, bool(turn or which % 2))

    async def other(client: AsyncClient, number: int) -> int:
        options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 120, "seed": number}
        said = (await client.generate(pair.user_prefix, **options)).text.strip()
        return await ask(client, pair.encode(said), number, bool(number % 2)) if said else 0

    tokens = {}
    for name, request, count in (
        (TENANT, tenant, setting.requests),
        (OTHER, other, setting.chats if pair.user_prefix else 0),
    ):
        async with AsyncClient(coordinator=address, draft=None, timeout=None, traffic_class=name) as client:
            tokens[name] = sum(await asyncio.gather(*(request(client, number) for number in range(count))))
    await asyncio.sleep(2 * FLUSH_S)
    return tokens


async def distilled(system: System, **settings: Any) -> Distilled:
    """Run the loop once."""
    await system.distill("once", allowed=(0, REFUSED), **settings)
    return await asyncio.to_thread(Distilled.read, Path(settings.get("state_dir", system.state)))


# --- what is measured


@dataclass(frozen=True)
class Domains:
    """Hold the tenant's prompts, as the target's tokens, and what drafts are measured on."""

    questions: list[list[int]]
    heldout: Mapping[str, list[PromptInput]]
    """`same_domain` and `other_domain`, each with a prompt more, to warm up with."""

    @classmethod
    def of(cls, options: argparse.Namespace, pair: Pair, setting: Setting) -> Domains:
        """Read the files. Raises BadRequest if a held-out question is one of the tenant's, too."""
        asked = _questions(options, pair, options.traffic, "traffic")
        if options.heldout:
            heldout = _questions(options, pair, options.heldout, "heldout")
        else:
            half = len(asked) // 2
            asked, heldout = asked[half:], asked[:half]
        if known := {tuple(one) for one in asked} & {tuple(one) for one in heldout}:
            raise BadRequest(f"{len(known)} held-out questions are in the tenant's traffic, too", field="heldout")
        chats = [list(prompt.turns) for prompt in read_prompts(harness.PROMPTS) if prompt.category == OTHER]
        most = 1 + setting.heldout
        return cls(asked, {"same_domain": [*heldout[:most]], "other_domain": [*chats[:most]]})


def _questions(options: argparse.Namespace, pair: Pair, file: Path | None, name: str) -> list[list[int]]:
    """Return the questions of a file, or those of reasoning among the prompts without one."""
    source = argparse.Namespace(**vars(options) | {"prompts": file or options.prompts, "measured": {}})
    found = harness.prompts(source, pair, category="" if file else TENANT)
    options.measured[name] = source.measured["prompts"]
    return list(found.values())


class Measured:
    """Measures drafts on the same held-out prompts."""

    def __init__(self, system: System, setting: Setting, heldout: Mapping[str, list[PromptInput]]) -> None:
        self._system, self._setting, self._heldout = system, setting, heldout
        self.rows: list[dict[str, Any]] = []
        self._runs: dict[tuple[str, str, str], Run] = {}
        """By draft, sampling and domain."""
        self._drafts: dict[str, Path] = {}

    async def add(self, name: str, draft: Path) -> None:
        """Measure a draft."""
        self._drafts[name] = draft
        for sampling, options in SAMPLINGS.items():
            row: dict[str, Any] = {"draft": name, "sampling": sampling, "degenerate": 0}
            for domain, prompts in self._heldout.items():
                users = Users(
                    {"coordinator": self._system.cluster.address},
                    prompts,
                    draft=str(draft),
                    options=options | {"max_tokens": self._setting.heldout_tokens},
                )
                run = self._runs[name, sampling, domain] = await run_users(users, sorted(os.sched_getaffinity(0))[-1:])
                row |= {domain: rounded(run.acceptance_length), "degenerate": row["degenerate"] + run.degenerate}
            self.rows.append(row)
            say(row)

    def gains(self, name: str, base: str) -> list[dict[str, Any]]:
        """Return what a draft gains over another by sampling and domain."""
        return [self._gain(name, base, sampling, domain) for sampling in SAMPLINGS for domain in self._heldout]

    def _gain(self, name: str, base: str, sampling: str, domain: str) -> dict[str, Any]:
        old, new = self._runs[base, sampling, domain], self._runs[name, sampling, domain]
        texts = [self._text(domain, text) for text in old.texts if text.turn == 0]
        alone = compare(self._drafts[name], self._drafts[base], texts, len(harness.CORES))
        positions, count = int(alone.positions.sum()), len(alone.positions)
        before, after = alone.incumbent[:, 2], alone.candidate[:, 2]  # steps with the tree
        drawn = np.random.default_rng(0).integers(count, size=(1_000, count))
        low, high = np.quantile(before[drawn].sum(1) / after[drawn].sum(1) - 1, (0.025, 0.975))
        return {
            "sampling": sampling,
            "domain": domain,
            "live": rounded(new.acceptance_length / old.acceptance_length - 1, 3),
            "before": rounded(positions / int(before.sum())),
            "after": rounded(positions / int(after.sum())),
            "gain": rounded(int(before.sum()) / int(after.sum()) - 1, 3),
            "from": rounded(float(low), 3),
            "to": rounded(float(high), 3),
            "texts": count,
            "differing": differing(new.texts, old.texts),
        }

    def _text(self, domain: str, text: Text) -> Recorded:
        """Return a first turn with its prompt, as the loop's evaluation reads it."""
        prompt = self._heldout[domain][text.prompt]
        first = prompt[0]
        asked = (
            self._system.pair.encode(first)
            if isinstance(first, str)
            else [one for one in prompt if isinstance(one, int)]
        )
        tokens = np.array([*asked, *text.tokens], np.int32)
        none = np.zeros((len(tokens), 0), np.float32)  # no distribution of the target is needed
        return Recorded(domain, tokens, none.astype(np.int32), none, none, len(asked), text.prompt)


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
        say(f"tokens recorded: {recorded}")
        drafts = {"before": pair.draft}
        for loss in LOSSES if options.losses else ():
            # No draft gains so much: it is evaluated, and not published.
            apart = {"state_dir": system.state / loss, "training_options_loss": loss, "gate_gain": 100.0}
            drafts[f"after, {loss}"] = (await distilled(system, **apart)).file
        run = await distilled(system)
        drafts["after"] = run.file
        measured = Measured(system, setting, domains.heldout)
        for name, draft in drafts.items():  # after all training: the answers to held-out prompts are recorded, too
            await measured.add(name, draft)
        if not run.verdict["passed"]:
            await system.distill("publish", str(run.file))
        gains = await asyncio.to_thread(measured.gains, "after", "before")
        swap_ms = await swaps(system, run.file, setting, domains.questions)
    harness.finish(
        options,
        f"{recorded[TENANT]} recorded tokens of {min(setting.requests, len(domains.questions))} questions and"
        f" {recorded[OTHER]} of other chats, {setting.train_minutes:g} minutes of training on"
        f" {len(harness.CORES)} cores, up to {setting.heldout} prompts a domain, {setting.heldout_tokens} tokens each.",
        measured.rows,
        gains=gains,
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
    parser.add_argument(
        "--heldout",
        type=Path,
        metavar="FILE",
        help="other questions of its kind, to measure on (default: half of them)",
    )
    parser.add_argument("--losses", action="store_true", help="train with each loss alone, too")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
