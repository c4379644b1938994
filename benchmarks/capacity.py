"""Measure the users that one verifier serves, by who drafts: nobody, the verifier, the devices, or both.

Users generate in a closed loop, each on a device of its own, at temperature 0.8; those of one row all run at the same
time. A figure is tokens per second of all users together, while all of them run. The verifier computes on one core, the
coordinator and all devices on the others. `verifier` drafts with n-grams and heads on the target, or with the draft
where there are none; the coordinator sets speculation lengths. `users_at_rate` is how many users each get `--rate`
tokens per second, between the rows by linear interpolation; None where even the last row has more. `degenerate` counts
texts that end in a loop.

`--device cuda` runs the target on a GPU. `--vllm-python PATH` adds verifiers that run vLLM in that interpreter.

Caveat: devices share the cores that the verifier leaves. Where `devices_busy` is near 1 they could not draft as fast as
devices of their own do, so on two cores the rows with many users show less than there is.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.users import SAMPLED, Played, Users, play

NOBODY, VERIFIER, DEVICES, BOTH = "nobody", "verifier", "devices", "both"


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    users: tuple[int, ...] = (1, 4, 8, 16, 32)
    rounds: int = 2
    prompts: int = 16
    tokens: int = 96
    seconds: float = 8.0
    """Time for which users run in each cell."""


QUICK = Setting(users=(1, 4), rounds=1, prompts=6, tokens=48, seconds=5.0)
ON_GPU = (1, 8, 32, 64, 128)
"""Numbers of users on a GPU."""

Cells = dict[tuple[str, int], list[Played]]
"""(who drafts, users) -> what was played in each round"""


@dataclass(frozen=True)
class Verifier:
    """Describe a verifier, and who drafts at it without and with drafts of devices."""

    options: tuple[str, ...]
    undrafted: str
    drafted: str


def verifiers(pair: Pair, vllm_python: Path | None) -> list[Verifier]:
    """Return the verifiers that are measured."""
    found = [Verifier((), NOBODY, DEVICES), Verifier(pair.own_speculation, VERIFIER, BOTH)]
    if vllm_python is not None:
        options = ("--engine", "vllm", "--engine-python", str(vllm_python))
        found.append(Verifier(options, f"vLLM, {NOBODY}", f"vLLM, {DEVICES}"))
    return found


class Bench:
    """Measures all cells."""

    def __init__(self, pair: Pair, setting: Setting, options: Sequence[str], prompts: list[list[int]]) -> None:
        self._pair = pair
        self._setting = setting
        self._options = options
        self._prompts = prompts
        self._reference: Played | None = None
        self.cells: Cells = defaultdict(list)
        self.differing = 0
        """Texts that are not those that were generated first, by one user without drafts."""
        self.degenerate = 0
        """Texts that end in a loop."""

    async def measure(self, verifier: Verifier) -> None:
        """Measure the cells of one verifier, once."""
        cores = sorted(os.sched_getaffinity(0))[1:]
        async with harness.one_verifier(self._pair, *self._options, *verifier.options) as cluster:

            async def run(**fields: Any) -> Played:
                options = SAMPLED | {"max_tokens": self._setting.tokens}
                users = Users(cluster.address, cluster.verifiers[0].address, self._prompts, options=options, **fields)
                return await play(users, cores)

            if self._reference is None:
                self._reference = await run(warm=0)
            for users in self._setting.users:
                for who, draft in ((verifier.undrafted, None), (verifier.drafted, "auto")):
                    played = await run(count=users, draft=draft, seconds=self._setting.seconds)
                    self.cells[who, users].append(played)
                    self.degenerate += played.degenerate
                    self.differing += played.differing(self._reference)
                    say(f"{who}, {users} users: {played.tokens_per_s:.1f} tokens/s, {played.busy:.2f} of the cores")


def table(cells: Mapping[tuple[str, int], Sequence[Played]]) -> list[dict[str, Any]]:
    """Return a row for each number of users."""
    who = list(dict.fromkeys(who for who, _ in cells))
    rows = []
    for users in dict.fromkeys(users for _, users in cells):
        figures = {one: statistics.median(played.tokens_per_s for played in cells[one, users]) for one in who}
        busy = max(played.busy for one in who for played in cells[one, users])
        rows.append({"users": users} | {one: rounded(figures[one], 1) for one in who} | {"devices_busy": rounded(busy)})
    return rows


def users_at(rate: float, row: Mapping[int, float]) -> float | None:
    """Return how many users each get `rate` tokens per second; None if the last row's still get more.

    row: users -> tokens per second of all. Between two rows the rate of each user is taken to fall linearly.
    """
    before: tuple[int, float] | None = None
    for users, tokens_per_s in sorted(row.items()):
        each = tokens_per_s / users
        if each < rate:
            if before is None:
                return 0.0
            return before[0] + (users - before[0]) * (before[1] - rate) / (before[1] - each)
        before = users, each
    return None


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    setting = QUICK if options.quick else Setting()
    given = ["--device", options.device]
    if options.device != "cpu":
        setting = setting if options.quick else Setting(users=ON_GPU)
        given += ["--kv-slots", "262144", "--max-sessions", str(max(setting.users))]
    prompts = list(harness.prompts(options, pair, 1 + setting.prompts).values())
    bench = Bench(pair, setting, given, prompts)
    for turn in range(setting.rounds):
        for verifier in harness.rotated(verifiers(pair, options.vllm_python), turn):
            await bench.measure(verifier)
    rows = table(bench.cells)
    who = [name for name in rows[0] if name not in ("users", "devices_busy")]
    length = {
        f"{one}, {users} users": rounded(statistics.median(played.acceptance_length for played in found))
        for (one, users), found in bench.cells.items()
    }
    harness.finish(
        options,
        f"Tokens per second at temperature 0.8, at most {setting.tokens} tokens a text, target on {options.device}.",
        rows,
        rate=options.rate,
        users_at_rate={
            one: rounded(users_at(options.rate, {row["users"]: row[one] for row in rows}), 1) for one in who
        },
        acceptance_length=length,
        degenerate=bench.degenerate,
        texts_unlike_undrafted=bench.differing,
    )


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("capacity", __doc__)
    parser.add_argument("--device", default="cpu", help="device of the target: cpu, cuda or cuda:N")
    harness.add_vllm_option(parser)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second that each user shall get")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
