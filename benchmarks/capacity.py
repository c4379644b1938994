"""Measure the users that one verifier serves, by who drafts: the devices, the verifier, or both, beside nobody.

Users generate at the same time, each on a device of its own, at temperature 0.8, with drafts and without in turn, as by
`outrider bench`. `tokens_per_s` and `nobody` are tokens per second of all users together with drafts and without, while
all of them run. The verifier computes on one core, the coordinator and all devices on the others. `verifier` drafts
with n-grams and the draft; the coordinator sets speculation lengths.
What one user gets is in benchmarks.window. `degenerate` counts texts that end in a loop, which any draft predicts.

`--device cuda` runs the target on a GPU, `--dtype bfloat16` in 16 bits. `--vllm-python PATH` adds a verifier that
runs vLLM in that interpreter, and vLLM alone, on the verifier's core and without a server, on a GPU also with drafts
from its own n-grams: on CPUs vLLM 0.32 accepts next to no draft tokens at this temperature, and its texts are not the
target's then. With `--step-ms N` a step takes at least N milliseconds, so that rows which it computes anyway in less
cost nothing.

Caveat: devices share the cores that the verifier leaves. Where `devices_busy` is near 1 they could not draft as fast as
devices of their own do, so on two cores the rows with many users show less than there is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import harness, vllm_alone
from benchmarks.support.harness import Pair, rounded, say
from benchmarks.support.throttled_verifier import environment
from edge_agent.bench.measure import Configuration, Plan, run_plan
from edge_agent.bench.report import rows
from edge_agent.bench.users import SAMPLED, Run, Users

NOBODY, VERIFIER, DEVICES, BOTH = "nobody", "verifier", "devices", "both"


@dataclass(frozen=True)
class Setting:
    """Set how much is measured."""

    users: tuple[int, ...] = (4, 16)
    prompts: int = 24
    """Prompts of each row, but three of each user at least, since some answers are short."""
    tokens: int = 64


QUICK = Setting(users=(1, 4), prompts=4, tokens=48)
VLLM_NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""How vLLM drafts by itself."""
ON_GPU = (1, 8, 32, 64, 128)
"""Numbers of users on a GPU."""


@dataclass(frozen=True)
class Site:
    """Describe a verifier, and what is measured at it: who drafts -> the draft of the devices."""

    options: tuple[str, ...]
    drafts: Mapping[str, str | None]


def sites(pair: Pair, vllm_python: Path | None) -> list[Site]:
    """Return the verifiers that are measured."""
    alone = ("--engine-args", '{"ngram": false, "prefix_cache": false}')
    found = [Site(alone, {DEVICES: "auto"}), Site(pair.own_speculation, {VERIFIER: None, BOTH: "auto"})]
    if vllm_python is not None:
        engine = ("--engine", "vllm", "--engine-python", str(vllm_python))
        found.append(Site((*engine, *alone), {f"vLLM, {DEVICES}": "auto"}))
    return found


async def measured(
    site: Site, pair: Pair, setting: Setting, options: Sequence[str], prompts: Sequence[Sequence[int]], step_ms: float
) -> list[dict[str, Any]]:
    """Return the rows of one verifier. options: further ones. prompts: are repeated. step_ms: least time of a step."""
    table = []
    throttle = environment(step_ms) if step_ms else None
    async with harness.one_verifier(pair, *options, *site.options, throttle=throttle) as cluster:
        cores = sorted(os.sched_getaffinity(0))
        for users in setting.users:
            for who, draft in site.drafts.items():
                common = Users(
                    {"coordinator": cluster.address},
                    crowd(prompts, setting, users),
                    draft=draft,
                    options=SAMPLED | {"max_tokens": setting.tokens},
                )
                found: list[Configuration] = []
                await run_plan(Plan(common, (users,), (0.0,), cores, pinned=True), found, say)
                table.append(row(who, found[0]))
                say(table[-1])
    return table


def by_vllm(
    python: Path, pair: Pair, options: argparse.Namespace, setting: Setting, prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the rows of vLLM alone, which drafts with n-grams of its own on a GPU."""
    on_cpu = options.device == "cpu"
    dtype = "float32" if on_cpu and options.dtype == "auto" else options.dtype
    asked = {users: crowd(prompts, setting, users)[1:] for users in setting.users}
    os.sched_setaffinity(0, {harness.cores()[0]})  # to the end, since these rows are the last

    def runs(own: Mapping[str, Any] | None) -> list[Run]:
        sampled = {"temperature": SAMPLED["temperature"], "speculative": own}
        return vllm_alone.runs(python, pair.target, dtype, asked, setting.tokens, **sampled)

    plain = runs(None)
    fast = plain if on_cpu else runs(VLLM_NGRAMS)
    return [
        {
            "users": users,
            "drafts": "vLLM alone",
            NOBODY: rounded(without.tokens_per_s),
            "tokens_per_s": rounded(own.tokens_per_s),
            "over_nobody": rounded(own.tokens_per_s / without.tokens_per_s),
            "acceptance_length": rounded(own.acceptance_length),
        }
        for users, without, own in zip(setting.users, plain, fast, strict=True)
    ]


def crowd(prompts: Sequence[Sequence[int]], setting: Setting, users: int) -> list[Sequence[int]]:
    """Return the prompts of so many users, with the one before that does not count; they repeat for many users."""
    count = max(setting.prompts, 3 * users)
    return [prompts[0], *(prompts[1 + i % (len(prompts) - 1)] for i in range(count))]


def row(who: str, configuration: Configuration) -> dict[str, Any]:
    """Return the row of one number of users."""
    plain, fast = rows([configuration])
    ratio = fast["tokens_per_s"] / plain["tokens_per_s"] if plain["tokens_per_s"] and fast["tokens_per_s"] else None
    same = ("first_token_ms", "token_ms", "speed_up", "acceptance_length", "differing", "degenerate", "devices_busy")
    return {
        "users": configuration.users,
        "drafts": who,
        NOBODY: plain["tokens_per_s"],
        "tokens_per_s": fast["tokens_per_s"],
        "over_nobody": rounded(ratio),
        **{name: fast[name] for name in same},
    }


async def measure(options: argparse.Namespace) -> None:
    pair = Pair.of(options)
    setting = QUICK if options.quick else Setting()
    given = ["--device", options.device, "--dtype", options.dtype]
    if options.device != "cpu":
        setting = setting if options.quick else Setting(users=ON_GPU)
        given += ["--kv-slots", "262144", "--max-sessions", str(max(setting.users))]
    prompts = list(harness.prompts(options, pair, 1 + max(setting.prompts, min(64, 3 * max(setting.users)))).values())
    table = [
        row
        for site in sites(pair, options.vllm_python)
        for row in await measured(site, pair, setting, given, prompts, options.step_ms)
    ]
    if options.vllm_python is not None:
        table += by_vllm(options.vllm_python, pair, options, setting, prompts)
    harness.finish(
        options,
        f"Tokens per second at temperature 0.8, at most {setting.tokens} tokens a text, target on {options.device}"
        f" (dtype {options.dtype}), at least {options.step_ms:g} ms a step.",
        table,
    )


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments("capacity", __doc__)
    harness.add_target_options(parser)
    harness.add_vllm_option(parser)
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step of the target (default: 0)")
    options = parser.parse_args(argv)
    harness.main(lambda: measure(options))


if __name__ == "__main__":
    main()
