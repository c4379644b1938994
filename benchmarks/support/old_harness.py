"""Provide what every benchmark needs: sizes, the pair under test, prompts, clusters, statistics and the last line."""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from coordinator.cluster import Cluster, stand_apart
from edge_agent.target.chat_template import ChatTemplate
from outrider.core.errors import BadRequest
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")
NOT_MET = ", NOT MET"

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts"
TEXTS = ("heldout", "quoting")
LOOPBACK = ("--listen", "127.0.0.1:0")
"""Options of a coordinator that listens on a free port of this machine."""
MACHINE_PACKAGES = ("outrider", "torch", "transformers", "llama-cpp-python", "grpcio", "numpy")


class Size(enum.IntEnum):
    """Choose how much a run measures.

    SMOKE takes seconds: it executes every configuration and every check, and its figures mean nothing. QUICK takes
    minutes and gives a first impression. FULL is what docs/benchmarks.md reports.
    """

    SMOKE = 0
    QUICK = 1
    FULL = 2

    def pick(self, *, smoke: T, quick: T, full: T) -> T:
        """Return the value for this size."""
        return (smoke, quick, full)[self]


@dataclass(frozen=True)
class Criterion:
    """State a condition that a run should meet, beside the value that was found.

    A run fails if it does not meet a criterion and its size is at least `enforced_from`; with None it never does, and
    the criterion is only printed. That is the one place which decides what a short run enforces: correctness, which
    holds however little is measured, and no figure that needs samples or a quiet machine.
    """

    name: str
    wanted: str
    found: str
    met: bool
    enforced_from: Size | None = Size.SMOKE

    @classmethod
    def bound(
        cls,
        name: str,
        found: float | None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        strict: bool = False,
        enforced_from: Size | None = Size.FULL,
    ) -> Criterion:
        """Compare a figure with one bound or two. found: None if nothing was measured, which meets no bound.

        strict: a bound itself does not meet the criterion.
        """
        met, wanted = found is not None, []
        if at_least is not None:
            met = met and found is not None and (found > at_least if strict else found >= at_least)
            wanted.append(f"{'above' if strict else 'at least'} {at_least:g}")
        if at_most is not None:
            met = met and found is not None and (found < at_most if strict else found <= at_most)
            wanted.append(f"{'below' if strict else 'at most'} {at_most:g}")
        return cls(name, " and ".join(wanted), "nothing" if found is None else f"{found:.4g}", met, enforced_from)

    @classmethod
    def none(cls, name: str, count: int) -> Criterion:
        """Require that something did not happen, at any size."""
        return cls(name, "0", str(count), count == 0)

    def fails(self, size: Size) -> bool:
        """Return whether a run of this size fails because of it."""
        return not self.met and self.enforced_from is not None and size >= self.enforced_from

    def __str__(self) -> str:
        return f"{self.name}: {self.found}, wanted {self.wanted}{'' if self.met else NOT_MET}"


@dataclass(frozen=True)
class Prompt:
    """Hold a prompt that ships with the benchmarks. kind: `code`, `arithmetic`, `chat` or `quoting`."""

    id: str
    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    """A chat's messages, which the target's own template renders. `text` is then the only one's, or empty."""


@dataclass(frozen=True)
class Pair:
    """Hold the models under test: a target, its draft, a draft that knows less, and heads on the target, if any."""

    target: Path
    draft: Path
    narrow: Path
    heads: Path | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> Pair:
        """Return the pair in `folder`. Raises BadRequest if it has no target."""
        heads = folder / "heads.safetensors"
        found = heads if heads.is_file() else None
        pair = cls(folder / "target", folder / "draft.gguf", folder / "draft-narrow.gguf", found)
        if not (pair.target / "config.json").is_file():
            raise BadRequest(f"{folder} holds no target/config.json; give --models DIR", field="models")
        return pair

    @property
    def server_sources(self) -> list[str]:
        """Return the options of a verifier with all sources that need no draft; without them it has none."""
        return ["--server-sources", "ngram", *(["--heads", str(self.heads)] if self.heads else [])]

    def encode(self, prompts: Iterable[Prompt]) -> dict[str, list[int]]:
        """Return the target's token ids of each prompt, by its id. Raises OSError for a chat and no chat template."""
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))

        def text_of(prompt: Prompt) -> str:
            if not prompt.messages:
                return prompt.text
            return ChatTemplate((self.target / "chat_template.jinja").read_text()).render(prompt.messages)

        return {prompt.id: tokenizer.encode(text_of(prompt), add_special_tokens=False).ids for prompt in prompts}


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have; `size` is a Size, `models` a folder."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    sizes = parser.add_mutually_exclusive_group()
    for size, meaning in (
        (Size.QUICK, "a few minutes, for a first impression"),
        (Size.SMOKE, "a few seconds: run every check on as little as possible"),
    ):
        flag = f"--{size.name.lower()}"
        sizes.add_argument(flag, dest="size", action="store_const", const=size, default=Size.FULL, help=meaning)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the pair under test")
    return parser


def add_texts_option(parser: argparse.ArgumentParser) -> None:
    """Add `--texts`, the split of prompts that a benchmark plays: figures of texts that quote are never mixed in."""
    parser.add_argument(
        "--texts",
        choices=TEXTS,
        default=TEXTS[0],
        help="prompts to play; texts that quote their prompt may repeat themselves, of the others those are left out",
    )


def prompts(split: str, count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts of a split, all without it; the kinds alternate.

    split: `tuning`, `heldout`, or `quoting`: held-out ones whose answers quote their prompt.
    """
    rows = [json.loads(line) for line in (PROMPTS / f"{split}.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[Prompt]] = {}
    for row in rows:
        text, messages = row.get("prompt", ""), tuple(row.get("messages", ()))
        if row["kind"] == "chat":
            messages = ({"role": "user", "content": text},)
        prompt = Prompt(row["id"], row["kind"], text, messages)
        by_kind.setdefault(prompt.kind, []).append(prompt)
    longest = max(map(len, by_kind.values()))
    return [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)][:count]


@contextlib.asynccontextmanager
async def cluster(*, prefix_cache: bool = True) -> AsyncIterator[Cluster]:
    """Run an empty cluster whose logs go to a temporary folder; their ends are printed if something fails.

    Settings of other clusters do not apply, and devices begin with an empty cache.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch), prefix_cache=prefix_cache)
        try:
            async with Cluster(logs=Path(scratch) / "logs") as running:
                yield running
        except BaseException:
            print_log_ends(Path(scratch, "logs"))
            raise


@contextlib.asynccontextmanager
async def one_verifier(
    pair: Pair,
    *options: str,
    prefix_cache: bool = True,
    coordinator: bool = True,
    on: tuple[int, int] | None = None,
) -> AsyncIterator[Cluster]:
    """Run a verifier of the pair on one core, with the coordinator and this process on the other.

    options: further ones of the verifier. coordinator: False if clients connect to the verifier directly. on: the two
    cores, where this process has been pinned already.
    """
    verifier_core, device_core = on or cores()
    async with cluster(prefix_cache=prefix_cache) as running:
        if coordinator:
            await running.start_coordinator(*LOOPBACK, cores=[device_core])
        models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
        await running.start_verifier(*models, *options, cores=[verifier_core])
        pin(device_core)
        yield running


async def status(coordinator: str) -> coordinator_pb2.StatusResponse:
    """Return what the coordinator at this address reports about its cluster."""
    async with channel(coordinator) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        answer: coordinator_pb2.StatusResponse = await admin.Status(coordinator_pb2.StatusRequest(), timeout=120.0)
    return answer


def print_log_ends(folder: Path) -> None:
    """Print the end of each log in `folder` to stderr."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- end of {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)


def pin(core: int) -> None:
    """Keep this process, and the children it starts, on one core."""
    os.sched_setaffinity(0, {core})


def cores() -> tuple[int, int]:
    """Return one core for the verifier and another for the device. Raises BadRequest if there is only one."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise BadRequest(f"this benchmark needs two cores, got {len(available)}", field="cores")
    return available[0], available[1]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in an order in which another one comes first each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def spread(values: Sequence[float]) -> str:
    """Return the median with the range."""
    return f"{statistics.median(values):.2f} [{min(values):.2f} .. {max(values):.2f}]"


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the measured value that `share` (0 to 1) of all values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def rounded(value: float | None, digits: int = 1) -> float | None:
    """Return the value rounded, None for None."""
    return None if value is None else round(value, digits)


def finish(result: dict[str, Any], criteria: Iterable[Criterion] = (), size: Size = Size.FULL) -> None:
    """Print the criteria, versions and machine, and the result as one line of JSON, the last of the output.

    Exits with status 1, and a message on stderr, if the run fails because of a criterion.
    """
    criteria = list(criteria)
    for criterion in criteria:
        print(criterion)
    print("versions:", ", ".join(f"{name} {_version(name)}" for name in MACHINE_PACKAGES))
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, {_cpu()}, Python {platform.python_version()}")
    print(json.dumps(result), flush=True)
    if failed := [str(criterion) for criterion in criteria if criterion.fails(size)]:
        sys.exit("\n".join(failed))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
