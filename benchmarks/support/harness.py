"""Provide what every benchmark needs: its options, the models under test, prompts, a cluster, and its result.

A benchmark is a program `benchmarks.NAME`. The first line of its docstring says what it measures, the paragraph that
begins with `Caveat:` what its figures do not show; `python -m benchmarks` and docs/benchmarks.md quote both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from benchmarks.support import throttled_verifier
from coordinator.cluster import Cluster, stand_apart
from edge_agent.target.chat_template import ChatTemplate
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts"
LOOPBACK = ("--listen", "127.0.0.1:0")
"""Options of a coordinator that listens on a free port of this machine."""
PACKAGES = ("torch", "transformers", "llama-cpp-python", "grpcio")
"""Packages whose versions decide figures."""
CORES = len(os.sched_getaffinity(0))
"""CPUs that this process had when it began, before it is kept on one."""
REFUSED = 2
"""Exit status of a benchmark that cannot run with these options or on this machine."""


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
    """Hold the models under test: the folder of a target, and a draft."""

    target: Path
    draft: Path
    narrow: Path | None = None
    """A draft that knows less, if there is one."""
    heads: Path | None = None
    """Heads on the target, if there are any."""

    @classmethod
    def in_folder(cls, folder: Path) -> Pair:
        """Return the pair in `folder`. Raises BadRequest for what is missing there."""
        target, draft = folder / "target", folder / "draft.gguf"
        for needed in (target / "config.json", target / "tokenizer.json", draft):
            if not needed.is_file():
                raise BadRequest(f"--models {folder} needs {needed.relative_to(folder)}, and has none", field="models")
        narrow, heads = folder / "draft-narrow.gguf", folder / "heads.safetensors"
        return cls(target, draft, narrow if narrow.is_file() else None, heads if heads.is_file() else None)

    @property
    def own_speculation(self) -> tuple[str, ...]:
        """Return the options of a verifier that drafts by itself: n-grams, and heads or else the draft."""
        model = ("--heads", str(self.heads)) if self.heads else ("--server-draft", str(self.draft))
        return ("--server-sources", "ngram", *model)

    def encode(self, prompts: Iterable[Prompt]) -> dict[str, list[int]]:
        """Return the target's token ids of each prompt, by its id. A target without a template reads chats as text."""
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        template = self.target / "chat_template.jinja"
        chat = ChatTemplate(template.read_text()) if template.is_file() else None

        def text_of(prompt: Prompt) -> str:
            if not prompt.messages:
                return prompt.text
            if chat is not None:
                return chat.render(prompt.messages)
            return "\n\n".join(message["content"] for message in prompt.messages)

        return {prompt.id: tokenizer.encode(text_of(prompt), add_special_tokens=False).ids for prompt in prompts}


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(benchmark=name)
    parser.add_argument("--quick", action="store_true", help="at most three minutes, for a first impression")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models", help="folder with target/ and draft.gguf (default: models)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result to this file, too")
    return parser


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
        "cores": CORES,
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


def prompts(split: str, count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts of a split, all without it; the kinds alternate.

    split: `tuning`, `heldout`, or `quoting`: held-out ones whose answers quote their prompt.
    """
    by_kind: dict[str, list[Prompt]] = {}
    for row in map(json.loads, (PROMPTS / f"{split}.jsonl").read_text().splitlines()):
        text, messages = row.get("prompt", ""), tuple(row.get("messages", ()))
        if row["kind"] == "chat":
            messages = ({"role": "user", "content": text},)
        by_kind.setdefault(row["kind"], []).append(Prompt(row["id"], row["kind"], text, messages))
    longest = max(map(len, by_kind.values()))
    return [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)][:count]


def source_code(pair: Pair, count: int) -> list[int]:
    """Return so many of the target's tokens of Python's standard library. Raises BadRequest if it has fewer."""
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids += tokenizer.encode(path.read_text(errors="replace"), add_special_tokens=False).ids
        if len(ids) >= count:
            return ids[:count]
    raise BadRequest.bound("tokens of source code", count, f"at most {len(ids)}")


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
            async with Cluster(logs=Path(scratch) / "logs", environment=throttle) as running:
                if throttle:
                    running.verifier_module = throttled_verifier.MODULE
                yield running
        except Exception as error:
            if not isinstance(error, BadRequest):  # which says what was wrong with an option or a file
                print_log_ends(Path(scratch, "logs"))
            raise


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


async def status(coordinator: str) -> coordinator_pb2.StatusResponse:
    """Return what the coordinator at this address reports about its cluster."""
    async with channel(coordinator) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        answer: coordinator_pb2.StatusResponse = await admin.Status(coordinator_pb2.StatusRequest(), timeout=120.0)
    return answer


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


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the measured value that `share` (0 to 1) of all values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return the value rounded, None for None."""
    return None if value is None else round(value, digits)
