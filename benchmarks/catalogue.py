"""List all benchmarks, the most valuable first: what each shows, what code it measures and how long it takes.

A published result whose code has changed since is marked in docs/benchmarks.md, and `python -m benchmarks all` runs the
benchmark again. So `areas` names what decides the figures, not all that is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM_PYTHON, SUITE, PREVIOUS = "--vllm-python", "--suite", "--previous"
"""Options of `python -m benchmarks` for what a benchmark may need or use that a checkout does not have."""

AREAS = {
    "core": ("outrider/core", "outrider/wire"),
    "engine": ("cloud_verifier/engine",),
    "front": ("cloud_verifier/engine_process", "cloud_verifier/front"),
    "device": ("edge_agent/drafting", "edge_agent/sdk", "edge_agent/session", "outrider/llama"),
    "http": ("edge_agent/http",),
    "coordinator": ("coordinator/api", "coordinator/placement.py", "coordinator/store", "coordinator/window"),
    "windows": ("coordinator/window",),
    "metrics": ("outrider/telemetry", "cloud_verifier/front", "coordinator/store"),
    "distill": ("cloud_verifier/distill",),
    "prompts": ("benchmarks/prompts",),
    "replay": ("benchmarks/support/draft_replay",),
    "models": ("models",),
}
"""Files and folders, by what they are called in the list of benchmarks."""

CLUSTER = ("core", "engine", "front", "device", "coordinator")
SPEED = (*CLUSTER, "prompts", "models")
REPLAYED = (*SPEED, "replay")


@dataclass(frozen=True)
class Benchmark:
    """Describe one benchmark as it is run for publication."""

    name: str
    """Names its result file. Runs of one program with other arguments append `-` and what is different."""
    shows: str
    areas: tuple[str, ...]
    quick_s: int
    """Seconds that its quick run takes on two cores of a server that do nothing else."""
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
        own = f"benchmarks/{self.program}"
        return (own if (ROOT / own).is_dir() else f"{own}.py", *(path for area in self.areas for path in AREAS[area]))


BENCHMARKS = (
    Benchmark("lossless", "every token against an independent reference", SPEED, 45, 900),
    Benchmark("latency", "one user's speed against streaming and Hugging Face", SPEED, 40, 1_300),
    Benchmark("window", "adaptive windows over streaming, by distance and draft", REPLAYED, 60, 4_800),
    Benchmark("capacity", "tokens per second of one verifier by who drafts", REPLAYED, 85, 1_800),
    Benchmark("long_context", "drafts behind contexts of up to 20,000 tokens", SPEED, 25, 750),
    Benchmark("failover", "verifiers killed in mid-generation", CLUSTER, 40, 240),
    Benchmark("chaos", "faults one after another, under load", CLUSTER, 50, 1_300, uses=PREVIOUS),
    Benchmark("attack", "attacks on a live cluster, beside a neighbour's session", CLUSTER, 60, 960),
    Benchmark("distill", "a draft learns from its own traffic", (*SPEED, "distill"), 240, 1_500),
    Benchmark("engine", "the engine by itself, and beside Hugging Face", ("engine", "core", "models"), 45, 900),
    Benchmark(
        "overload", "five times the work that one verifier can do", ("core", "engine", "front", "replay"), 30, 300
    ),
    Benchmark(
        "sources", "tokens per step of draft sources", ("core", "engine", "device", "prompts", "models"), 45, 1_800
    ),
    Benchmark("rules", "how often each acceptance rule accepts a child", ("core", "prompts", "models"), 20, 300),
    Benchmark("overhead", "what the SDK and the HTTP server cost", ("core", "front", "device", "http"), 15, 540),
    Benchmark("constrained", "outputs that follow a grammar, and what it costs", SPEED, 40, 600),
    Benchmark("exact", "the bits of `--attention exact`, and their cost", ("engine", "models"), 12, 300),
    Benchmark("control_plane", "coordinators and their Redis under 10,000 sessions", ("coordinator",), 20, 520),
    Benchmark("front", "what a verifier's front costs for each session and step", ("core", "front"), 20, 150),
    Benchmark("footprint", "what one session takes of Redis, network and traffic log", ("coordinator",), 25, 120),
    Benchmark("fleet", "the window controller around simulated devices", ("core", "windows"), 5, 75),
    Benchmark("vocabulary", "choosing tokens out of 151,936", ("core", "engine"), 10, 120),
    Benchmark("counters", "what metrics cost", ("metrics",), 5, 30),
    Benchmark("swarm", "whether the light clients behave as live devices", ("core", "device", "replay"), 25, 300),
    Benchmark("distill_losses", "what a draft should learn by", ("distill", "models"), 60, 1_800),
    Benchmark("soak", "an hour of sessions that come, go and die, and one attacker", (*CLUSTER, "replay"), 90, 3_700),
    Benchmark("engine_gpu", "the engine's steps on a GPU; nothing without one", ("engine",), 10, 10),
    Benchmark("capacity_gpu", "what a verifier with a GPU can do; nothing without one", ("engine",), 10, 10),
    Benchmark("json_schema", "grammars against the JSON Schema test suite", ("device",), 60, 300, needs=SUITE),
    Benchmark("lossless-vllm", "the same on vLLM", CLUSTER, 120, 900, ("--only", "engines"), VLLM_PYTHON),
    Benchmark("engine-vllm", "the engine beside vLLM", ("engine", "core", "models"), 300, 1_200, needs=VLLM_PYTHON),
    Benchmark(
        "co_located",
        "speculation on the verifier alone, beside vLLM's own",
        ("engine", "core", "prompts", "models"),
        200,
        1_200,
        needs=VLLM_PYTHON,
    ),
    Benchmark("latency-vllm", "one user, beside vLLM", SPEED, 120, 1_800, ("--engine", "vllm"), VLLM_PYTHON),
    Benchmark(
        "window-vllm", "windows on our engine and on vLLM", REPLAYED, 120, 300, ("--engine", "vllm"), VLLM_PYTHON
    ),
    Benchmark("capacity-vllm", "the same beside vLLM", REPLAYED, 300, 3_600, ("--engine", "vllm"), VLLM_PYTHON),
)
