"""What every benchmark shares: the pair under test, prompts, pinning, medians with spread, the last line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.cluster import Cluster, stand_apart
from outrider.core.errors import BadRequest
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts"
MACHINE_PACKAGES = ("outrider", "torch", "transformers", "llama-cpp-python", "grpcio", "numpy")


@dataclass(frozen=True)
class Pair:
    """The models under test."""

    target: Path
    draft: Path
    narrow: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Pair:
        pair = cls(folder / "target", folder / "draft.gguf", folder / "draft-narrow.gguf")
        if not (pair.target / "config.json").is_file():
            raise BadRequest(f"{folder} holds no target/config.json; give --models DIR", field="models")
        return pair


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags that all benchmarks know."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="a short version, for a look")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the pair under test")
    return parser


def prompts(split: str) -> list[Prompt]:
    """The prompts of one split, the kinds taken in turn."""
    rows = [json.loads(line) for line in (PROMPTS / f"{split}.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[Prompt]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(Prompt(row["id"], row["kind"], row["prompt"]))
    longest = max(map(len, by_kind.values()))
    return [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)]


@contextlib.asynccontextmanager
async def cluster(*, prefix_cache: bool = True) -> AsyncIterator[Cluster]:
    """A cluster whose logs go to a scratch folder, shown if something fails; devices begin with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch), prefix_cache=prefix_cache)
        try:
            async with Cluster(logs=Path(scratch) / "logs") as running:
                yield running
        except BaseException:
            _show_logs(Path(scratch, "logs"))
            raise


async def status(coordinator: str) -> coordinator_pb2.StatusResponse:
    """What the coordinator at this address says of its cluster."""
    async with channel(coordinator) as link:
        admin = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
        answer: coordinator_pb2.StatusResponse = await admin.Status(coordinator_pb2.StatusRequest(), timeout=10.0)
    return answer


def _show_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        print(f"--- end of {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)


def pin(core: int) -> None:
    """Keep this process, and the children it starts, on one core."""
    os.sched_setaffinity(0, {core})


def cores() -> tuple[int, int]:
    """One core for the verifier and another for the device. Raises BadRequest where there is one only."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise BadRequest(f"this benchmark needs two cores, got {len(available)}", field="cores")
    return available[0], available[1]


def spread(values: Sequence[float]) -> str:
    """Median with the range."""
    return f"{statistics.median(values):.2f} [{min(values):.2f} .. {max(values):.2f}]"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed; None of nothing."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 1) if values else None


def finish(result: dict[str, Any]) -> None:
    """Versions and machine, then the last line."""
    print("versions:", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in MACHINE_PACKAGES))
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, {_cpu()}, Python {platform.python_version()}")
    print(json.dumps(result), flush=True)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
