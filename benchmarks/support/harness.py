"""Provide what every benchmark needs: its options, the models under test, prompts, a cluster, and its result.

A benchmark is a program `benchmarks.NAME`. The first line of its docstring says what it measures, the paragraph that
begins with `Caveat:` what its figures do not show; `python -m benchmarks` and docs/benchmarks.md quote both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from benchmarks.support import throttled_verifier
from cloud_verifier import smollm2
from cloud_verifier.front.artifacts import chat_template, special_tokens
from coordinator.cli.local import DRAFT
from coordinator.cluster import Cluster, OnLog, stand_apart
from edge_agent.prompts import mixed, read_prompts
from edge_agent.target.chat_template import ChatTemplate
from outrider.artifacts.hub import fetch_target
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts.jsonl"
SHIPPED_DRAFT = ROOT / "models" / DRAFT
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 2_048, 256
"""Most tokens of a prompt."""
LOOPBACK = ("--listen", "127.0.0.1:0")
"""Options of a coordinator that listens on a free port of this machine."""
PACKAGES = ("torch", "transformers", "llama-cpp-python", "grpcio")
"""Packages whose versions decide figures."""
CORES = tuple(sorted(os.sched_getaffinity(0)))
"""CPUs that this process had when it began, before it is kept on one."""
REFUSED = 2
"""Exit status of a benchmark that cannot run with these options or on this machine."""


@dataclass(frozen=True)
class Pair:
    """Hold the models under test: the folder of a target, and a draft."""

    target: Path
    draft: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> Pair:
        """Return the models that the options name, and note them for the result.

        Raises BadRequest for what is missing, ModelRefused and Unavailable for what cannot be fetched.
        """
        pair = cls._given(options)
        for needed in (pair.target / "config.json", pair.target / "tokenizer.json", pair.draft):
            if not needed.is_file():
                raise BadRequest(f"{needed} is missing; --models names a target and --draft its draft", field="models")
        options.measured["models"] = {"target": pair.target.name, "draft": pair.draft.name}
        return pair

    @classmethod
    def _given(cls, options: argparse.Namespace) -> Pair:
        if options.models is None:
            return cls(smollm2.fetch(), options.draft or SHIPPED_DRAFT)
        folder = fetch_target(options.models, "--models", tell=say)
        if (folder / "target").is_dir():
            return cls(folder / "target", options.draft or folder / "draft.gguf")
        if options.draft is None:
            raise BadRequest(f"--models {options.models} has no draft.gguf beside a target/: give --draft FILE")
        return cls(folder, options.draft)

    @property
    def own_speculation(self) -> tuple[str, ...]:
        """Return the options of a verifier that drafts by itself, with n-grams and the draft."""
        return ("--engine-args", '{"prefix_cache": false}', "--server-draft", str(self.draft))

    def encode(self, text: str) -> list[int]:
        """Return the target's token ids of what a user says first, or of the text alone if it has no chat template."""
        if self._template:
            text = ChatTemplate(self._template, variables=special_tokens(self.target)).render(
                [{"role": "user", "content": text}]
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def user_prefix(self) -> list[int]:
        """Return the token ids after which the target expects what a user says; none if it has no chat template."""
        if not self._template:
            return []
        template = ChatTemplate(self._template, variables=special_tokens(self.target))
        before = template.render([{"role": "user", "content": "\0"}]).partition("\0")[0]
        ids: list[int] = self._tokenizer.encode(before, add_special_tokens=False).ids
        return ids

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.target / "tokenizer.json"))

    @functools.cached_property
    def _template(self) -> str:
        return chat_template(self.target)


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(benchmark=name, measured={})
    parser.add_argument("--quick", action="store_true", help="at most two minutes, for a first impression")
    parser.add_argument(
        "--models",
        metavar="DIR_OR_ID",
        help="target: a folder, or an id on the hub; or a folder with target/ and draft.gguf (default: SmolLM2)",
    )
    parser.add_argument("--draft", type=Path, metavar="FILE", help="GGUF draft (default: the one for SmolLM2)")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=PROMPTS,
        metavar="FILE",
        help="prompts in our format, or Spec-Bench's, MT-bench's, HumanEval's, GSM8K's or ShareGPT's (default: ours)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to this file, too")
    return parser


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where and in which number format the target computes."""
    parser.add_argument("--device", default="cpu", help="of the target: cpu, cuda or cuda:N (default: cpu)")
    formats = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", choices=formats, default="auto", help="of the target (default: float32 on a CPU, else bfloat16)"
    )


def add_vllm_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names an interpreter with vLLM."""

    def interpreter(text: str) -> Path:
        path = Path(text).absolute()  # a symbolic link stays one: it tells Python its environment
        if not os.access(path, os.X_OK):
            raise argparse.ArgumentTypeError(
                f"{text} is no program; `python -m cloud_verifier.vllm_environment` makes one"
            )
        return path

    parser.add_argument(
        "--vllm-python",
        type=interpreter,
        metavar="PATH",
        help="interpreter of an environment with vLLM, to compare with",
    )


def main(measure: Callable[[], Awaitable[None] | None]) -> None:
    """Run a benchmark; what it cannot do here ends it with one sentence on stderr and status 2."""
    try:
        found = measure()
        if inspect.isawaitable(found):
            asyncio.run(_awaited(found))
    except (OutriderError, NotImplementedError, ImportError, OSError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        sys.exit(REFUSED)


async def _awaited(found: Awaitable[None]) -> None:
    await found


def say(text: object) -> None:
    """Report progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def finish(options: argparse.Namespace, setting: str, table: Sequence[Mapping[str, Any]], **figures: Any) -> None:
    """Print the result as one line of JSON, the last of the output, and write it to `--out`.

    setting: what was measured, in a sentence, with its sizes. table: the rows that docs/benchmarks.md shows; their keys
    are the columns. figures: all others, which stand beside the table in the result.
    """
    result = {
        "benchmark": options.benchmark,
        "quick": options.quick,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        **options.measured,
        "setting": setting,
        "table": list(table),
        **figures,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def machine() -> dict[str, Any]:
    """Describe this machine and the versions that decide figures."""
    cpu, flags = platform.processor(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                cpu = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
    # A CPU's name stands for hosts with and without these, and they decide how fast matrices are multiplied.
    extensions = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": ", ".join([cpu, *(shown for flag, shown in extensions.items() if flag in flags)][:2]),
        "cores": len(CORES),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "versions": versions,
    }


def commit() -> str | None:
    """Return the commit of this checkout, with a `+` if files differ from it; None outside a checkout."""
    described = subprocess.run(
        ("git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"),
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def prompts(
    options: argparse.Namespace, pair: Pair, count: int | None = None, *, category: str = "", most: int = 0
) -> dict[str, list[int]]:
    """Return the target's tokens of the first `count` prompts, by id: first turns, the categories in turn.

    category: the only one that is wanted. most: tokens of a prompt, fewer with --quick; a longer one is dropped, and
    counted in the result. Raises BadRequest if there are fewer than `count`.
    """
    most = min(most or PROMPT_TOKENS, QUICK_PROMPT_TOKENS if options.quick else PROMPT_TOKENS)
    noted = options.measured.setdefault("prompts", {"file": options.prompts.name, "asked": 0, "too_long": 0})
    found: dict[str, list[int]] = {}
    for prompt in mixed([one for one in read_prompts(options.prompts) if category in ("", one.category)]):
        if len(found) == count:
            break
        if len(ids := pair.encode(prompt.turns[0])) <= most:
            found[prompt.id] = ids
        else:
            noted["too_long"] += 1
    if len(found) < (least := count or 1):
        raise BadRequest(f"{options.prompts} has {len(found)} prompts of at most {most} tokens, must have {least}")
    noted["asked"] += len(found)
    return found


def running_text(options: argparse.Namespace, pair: Pair, count: int) -> list[int]:
    """Return so many of the target's tokens of prompts, one after the other. Raises BadRequest if there are fewer."""
    ids: list[int] = []
    for prompt in mixed(read_prompts(options.prompts)):
        ids += pair.encode("\n\n".join(prompt.turns))
        if len(ids) >= count:
            return ids[:count]
    raise BadRequest.bound(f"tokens in {options.prompts}", len(ids), f"at least {count}")


@contextlib.asynccontextmanager
async def cluster(*, prefix_cache: bool = True, throttle: Mapping[str, str] | None = None) -> AsyncIterator[Cluster]:
    """Run an empty cluster whose logs go to a temporary folder; their ends are printed if something fails.

    Settings of other clusters do not apply, and devices begin with an empty cache. throttle: as made by
    `throttled_verifier.environment`, for verifiers whose steps take longer.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch), prefix_cache=prefix_cache)
        os.environ["OUTRIDER_COORDINATOR_STATE_DIR"] = str(Path(scratch) / "state")
        try:
            async with Cluster(on_log=logs_in(Path(scratch)), environment=throttle) as running:
                if throttle:
                    running.verifier_module = throttled_verifier.MODULE
                yield running
        except Exception as error:
            if not isinstance(error, BadRequest):  # which says what was wrong with an option or a file
                print_log_ends(Path(scratch))
            raise


def recording(folder: Path, *, prompts: bool = False) -> Path:
    """Write a tenants file that lets everything be recorded, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tenants.toml"
    path.write_text(f"[recording.default]\nshare = 1\nkeep_days = 30\nprompts = {str(prompts).lower()}\n")
    return path


def logs_in(folder: Path) -> OnLog:
    """Return what writes each child's lines to a log of its own in `folder`."""

    def write(name: str, line: str) -> None:
        with (folder / f"{name}.log").open("a") as log:
            log.write(f"{line}\n")

    return write


def print_log_ends(folder: Path) -> None:
    """Print the end of each log in `folder`."""
    for log in sorted(folder.glob("*.log")):
        say(f"--- end of {log.name}\n{log.read_text(errors='replace')[-1500:]}")


@contextlib.asynccontextmanager
async def one_verifier(
    pair: Pair,
    *options: str,
    prefix_cache: bool = True,
    throttle: Mapping[str, str] | None = None,
    coordinator: Sequence[str] | None = (),
) -> AsyncIterator[Cluster]:
    """Run a verifier of the pair on one core, with the coordinator and this process on the other.

    options, coordinator: further options of the verifier, and of the coordinator, of which there is none with None.
    prefix_cache, throttle: as for `cluster`.
    """
    verifier_core, device_core = cores()
    async with cluster(prefix_cache=prefix_cache, throttle=throttle) as running:
        if coordinator is not None:
            await running.start_coordinator(*LOOPBACK, *coordinator, cores=[device_core])
        models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
        await running.start_verifier(*models, *options, cores=[verifier_core])
        available = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {device_core})
        try:
            yield running
        finally:
            os.sched_setaffinity(0, available)


async def verifiers(coordinator: str) -> list[coordinator_pb2.VerifierStatus]:
    """Return what the coordinator at this address reports about its verifiers."""
    async with channel(coordinator) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        answer = await admin.ListVerifiers(coordinator_pb2.ListVerifiersRequest(), timeout=120.0)
    return list(answer.verifiers)


def cores() -> tuple[int, int]:
    """Return one core for the verifier and another for the device. Raises BadRequest if there is only one."""
    if len(CORES) < 2:
        raise BadRequest(f"this benchmark needs two cores, got {len(CORES)}", field="cores")
    return CORES[0], CORES[1]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in an order in which another one comes first each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the measured value that `share` (0 to 1) of all values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return the value rounded, None for None."""
    return None if value is None else round(value, digits)
