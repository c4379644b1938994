"""Define how much each size of the distillation benchmark does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

HANG_S = 1_800.0
"""Time after which what has not come never will, such as the end of a training. No figure depends on it."""


@dataclass(frozen=True)
class DistillSize:
    """Set the sizes and times of one run."""

    alarm_fall: float = 0.05
    """Fall of a class's acceptance that begins a run. From code to sums the narrow draft falls by 0.1 to 0.3."""
    alarm_tokens: int = 40_000
    """Tokens of a class after which the loop judges its acceptance."""
    run_tokens: int = 110_000
    """Tokens of sums with which a run begins, and from which the draft learns."""
    steps: int = 420
    """Steps of the training."""
    threads: int = 2
    """Threads of each stage of the loop."""
    dataset: dict[str, Any] = field(default_factory=lambda: {"copies": 100, "heldout_share": 0.15})
    training: dict[str, Any] = field(
        default_factory=lambda: {"learning_rate": 3e-3, "batch_tokens": 2_048, "save_seconds": 10.0, "report_steps": 2}
    )
    gate: dict[str, Any] = field(default_factory=dict)
    """Settings of the loop's gate that are not the default."""
    flush_s: float = 4.0
    """Longest time whose traffic a killed verifier loses."""
    request_tokens: int = 128
    pause_s: float = 30.0
    """Pause of a device between two requests while a draft is trained, since two cores serve both."""
    canary_s: float = 240.0
    """Length of a trial's window."""
    canary_bound: float = 0.05
    canary_alpha: float = 0.01
    session_samples: int = 4
    heldout: int = 60
    """Held-out prompts of each kind."""
    heldout_tokens: int = 128
    compared: int = 150
    """Requests that are generated again by plain streaming, beside every one during which the draft changed."""
    noise: float = 0.28
    """Noise of the worse draft, in standard deviations of each matrix. With much of it devices go back by themselves,
    each after a few hundred draft tokens, and the canary has few samples; with little of it the canary must find
    out."""
    minutes: float = 25.0
    """Time that the whole run should take on two cores; a slower machine fails nothing."""
    learns: bool = True
    """Whether a draft is trained at all, put on trial, and followed by a worse one."""
    promised: bool = True
    """Whether the expected gain can be asked of this run, since learning takes traffic and steps."""


FULL = DistillSize()
QUICK = DistillSize(
    alarm_fall=0.08,  # a smaller fall cannot be told from chance with so few tokens
    alarm_tokens=2_000,
    run_tokens=8_000,  # with less of it than of code, what it loses in code outweighs what it learns
    steps=24,
    threads=1,
    dataset={"copies": 100, "heldout_share": 0.25, "validation_share": 0.15},
    training={
        "learning_rate": 1e-3,
        "batch_tokens": 512,
        "micro_tokens": 512,
        "save_seconds": 0.5,
        "report_steps": 1,
        "measure_steps": 12,
        "measure_tokens": 2_048,
        "warmup_steps": 3,
    },
    gate={"gate_gain": 0.0, "gate_loss": 0.4, "gate_sessions": 6},
    flush_s=2.0,
    request_tokens=96,
    pause_s=10.0,
    canary_s=90.0,
    canary_bound=0.1,
    canary_alpha=0.1,
    session_samples=8,
    noise=0.6,
    heldout=6,
    heldout_tokens=64,
    compared=12,
    minutes=5.0,
    promised=False,
)
SMOKE = replace(QUICK, request_tokens=24, compared=4, learns=False)
