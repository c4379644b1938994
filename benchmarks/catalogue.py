"""List all benchmarks, the most valuable first: what each shows, what code it measures and how long it takes.

A published result whose code has changed since is marked in docs/benchmarks.md, and `python -m benchmarks all` runs the
benchmark again. So `areas` names what of the product decides the figures, not all that is imported. The benchmark's own
program counts as well, and what it imports of other benchmarks and of benchmarks/support, but for what all of them
share.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM_PYTHON, SUITE, PREVIOUS = "--vllm-python", "--suite", "--previous"
"""Options of `python -m benchmarks` for what a benchmark may need or use that a checkout does not have."""

WRITES = "outrider/wire/writes.py"
"""Writes of downloads and of watched healths. No message of a session goes through them, so `core` leaves them out."""
_WIRE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "outrider" / "wire").glob("[!_]*"))
AREAS = {
    "core": ("outrider/core", *(path for path in _WIRE if path != WRITES)),
    "writes": (WRITES,),
    "engine": ("cloud_verifier/engine", "cloud_verifier/config.py", "constraints.txt"),
    "front": (
        *("cloud_verifier/engine_process", "cloud_verifier/front"),
        *("cloud_verifier/app.py", "cloud_verifier/verifier.py", "outrider/processes.py"),
    ),
    "llama": ("outrider/llama", "constraints.txt"),
    "device": (
        *("edge_agent/config.py", "edge_agent/drafting", "edge_agent/sdk", "edge_agent/session", "edge_agent/target"),
        *("outrider/llama", "constraints.txt"),
    ),
    "http": ("edge_agent/http",),
    "coordinator": (
        *("coordinator/api", "coordinator/placement.py", "coordinator/records.py", "coordinator/config.py"),
        *("coordinator/store", "coordinator/window", "coordinator/app.py", "coordinator/cluster.py"),
    ),
    "windows": ("coordinator/window",),
    "metrics": ("outrider/telemetry", "cloud_verifier/front", "coordinator/store"),
    "traffic": ("cloud_verifier/traffic",),
    "distill": ("cloud_verifier/distill", "cloud_verifier/traffic"),
    "releases": ("coordinator/releases", "edge_agent/releases", "outrider/artifacts"),
    "prompts": ("benchmarks/prompts",),
    "models": ("models",),
}
"""Files and folders, by what they are called in the list of benchmarks."""

CLUSTER = ("core", "engine", "front", "device", "coordinator")
SPEED = (*CLUSTER, "prompts", "models")
SERVING = ("core", "engine", "front", "device", "prompts", "models")
"""What a device and one verifier without a coordinator run."""
SHARED = ("harness", "engine_options", "plotting", "proc", "capacity_plot", "catalogue", "results")
"""Modules of benchmarks that start, print, draw and keep results."""


@dataclass(frozen=True)
class Benchmark:
    """Describe one benchmark as it is run for publication."""

    name: str
    """Names its result file. Runs of one program with other arguments append `-` and what is different."""
    shows: str
    areas: tuple[str, ...]
    quick_s: int
    """Seconds that its quick run takes on two cores of a server, beside another one."""
    full_s: int
    """Seconds of the full run there."""
    arguments: tuple[str, ...] = ()
    needs: str | None = None
    """The option without which it is left out."""
    uses: str | None = None
    """An option that it is given as well where there is one."""

    @property
    def program(self) -> str:
        """Return the name of its module in this folder, and of its section in docs/benchmarks.md."""
        return self.name.partition("-")[0]

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the files and folders whose changes make its figures old, its own program among them."""
        folder = ROOT / "benchmarks" / self.program
        programs = tuple(sorted(folder.glob("*.py"))) if folder.is_dir() else (folder.with_suffix(".py"),)
        own = f"benchmarks/{self.program}{'' if folder.is_dir() else '.py'}"
        imported = sorted(str(path.relative_to(ROOT)) for path in _imported(programs) if path not in programs)
        return (own, *imported, *(path for area in self.areas for path in AREAS[area]))


@functools.cache
def _imported(programs: tuple[Path, ...]) -> set[Path]:
    """Return the modules of benchmarks that these import or start, and those that these import in turn."""
    found: set[Path] = set()
    left = [*programs]
    while left:
        for path in _named(left.pop()):
            if path not in found and path.stem not in SHARED:
                found.add(path)
                left.append(path)
    return found


@functools.cache
def _named(program: Path) -> frozenset[Path]:
    """Return the modules of benchmarks that a module names, in an import or as one that it starts."""

    def names() -> Iterator[str]:
        text = program.read_text()
        yield from re.findall(r'"(benchmarks\.[a-z_.]+)"', text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

    paths = (ROOT / f"{name.replace('.', '/')}.py" for name in names() if name.startswith("benchmarks."))
    return frozenset(path for path in paths if path.is_file())


BENCHMARKS = (
    Benchmark("lossless", "every token against an independent reference", SPEED, 60, 700),
    Benchmark("latency", "one user's speed against streaming and Hugging Face", SPEED, 40, 1_100),
    Benchmark("window", "adaptive windows over streaming, by distance and draft", SPEED, 80, 5_300),
    Benchmark("capacity", "tokens per second of one verifier by who drafts", SPEED, 120, 2_000),
    Benchmark("long_context", "drafts behind contexts of up to 20,000 tokens", SPEED, 25, 750),
    Benchmark("failover", "verifiers killed in mid-generation", SPEED, 40, 180),
    Benchmark("chaos", "faults one after another, under load", (*CLUSTER, "writes"), 50, 1_000, uses=PREVIOUS),
    Benchmark(
        "attack", "attacks on a live cluster, beside a neighbour's session", (*CLUSTER, "writes", "releases"), 60, 960
    ),
    Benchmark("distill", "a draft learns from its own traffic", (*SPEED, "writes", "distill", "releases"), 240, 1_000),
    Benchmark("engine", "the engine by itself, and beside Hugging Face", ("engine", "core", "models"), 45, 900),
    Benchmark("overload", "five times the work that one verifier can do", SERVING, 30, 700),
    Benchmark(
        "sources", "tokens per step of draft sources", ("core", "engine", "device", "prompts", "models"), 60, 2_250
    ),
    Benchmark(
        "rules", "how often each acceptance rule accepts a child", ("core", "llama", "prompts", "models"), 20, 120
    ),
    Benchmark("overhead", "what the SDK and the HTTP server cost", (*SERVING, "http"), 15, 540),
    Benchmark("constrained", "outputs that follow a grammar, and what it costs", SPEED, 40, 600),
    Benchmark("exact", "the bits of `--attention exact`, and their cost", ("engine", "models"), 12, 150),
    Benchmark("control_plane", "coordinators and their Redis under 10,000 sessions", ("core", "coordinator"), 20, 520),
    Benchmark("front", "what a verifier's front costs for each session and step", ("core", "front"), 20, 150),
    Benchmark(
        "footprint",
        "what one session takes of Redis, network and traffic log",
        (*CLUSTER, "traffic", "prompts", "models"),
        25,
        120,
    ),
    Benchmark("fleet", "the window controller around simulated devices", ("core", "windows"), 5, 30),
    Benchmark("vocabulary", "choosing tokens out of 151,936", ("core", "engine"), 10, 45),
    Benchmark("counters", "what metrics cost", ("metrics",), 5, 30),
    Benchmark("swarm", "whether the light clients behave as live devices", SPEED, 25, 240),
    Benchmark("distill_losses", "what a draft should learn by", ("distill", "llama", "prompts", "models"), 130, 1_000),
    Benchmark("soak", "an hour of sessions that come, go and die, and one attacker", (*SPEED, "writes"), 90, 3_700),
    Benchmark("engine_gpu", "the engine's steps on a GPU; nothing without one", ("core", "engine"), 10, 10),
    Benchmark("capacity_gpu", "what a verifier with a GPU can do; nothing without one", ("core", "engine"), 10, 10),
    Benchmark(
        "json_schema", "grammars against the JSON Schema test suite", ("core", "device", "http"), 5, 10, needs=SUITE
    ),
    Benchmark("lossless-vllm", "the same on vLLM", SPEED, 60, 100, ("--only", "engines"), VLLM_PYTHON),
    Benchmark("engine-vllm", "the engine beside vLLM", ("engine", "core", "models"), 300, 600, needs=VLLM_PYTHON),
    Benchmark(
        "co_located",
        "speculation on the verifier alone, beside vLLM's own",
        ("engine", "core", "device", "prompts", "models"),
        200,
        2_700,
        needs=VLLM_PYTHON,
    ),
    Benchmark("latency-vllm", "one user, beside vLLM", SPEED, 120, 1_500, ("--engine", "vllm"), VLLM_PYTHON),
    Benchmark("window-vllm", "windows on our engine and on vLLM", SPEED, 120, 240, ("--engine", "vllm"), VLLM_PYTHON),
    Benchmark("capacity-vllm", "the same beside vLLM", SPEED, 300, 2_700, ("--engine", "vllm"), VLLM_PYTHON),
)
