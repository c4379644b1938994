"""Define the settings of `outrider-distill`, built once where the process starts.

Flags override OUTRIDER_DISTILL_* in the environment, which overrides the table [distill] of a file
(`outrider.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.telemetry.logs import LogFormat

INSTALL = "distillation needs: pip install 'outrider[distill]'"


@dataclass(frozen=True)
class GateRule:
    """The settings of `DistillConfig` that say what a candidate must show to be published."""

    gain: float = 0.02
    loss: float = 0.05
    slower: float = 1.25
    confidence: float = 0.95
    sessions: int = 8
    # With 500 positions the bound is so loose that an unchanged class is refused once in four times.
    positions: int = 2_000
    resamples: int = 2_000
    """Number of bootstrap samples behind each bound."""


Quantization = Literal["F32", "F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"]
Embeddings = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "F16"]


class DistillConfig(BaseSettings):
    """Holds the settings of distillation. The text below each field is in `--help` and docs/configuration.md.

    The settings of stages are written beside each run when it begins, so a changed one takes effect with the next run.
    """

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_DISTILL_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    traffic: str
    """Directory or fsspec URL of the traffic log that verifiers write."""
    target: Path
    """Directory of the target, as verifiers serve it, or its id on the Hugging Face hub."""
    student: Literal["draft", "heads"] = "draft"
    """draft: a draft for devices is trained and released. heads: heads on the target, for the verifiers alone."""
    draft: Path
    """GGUF file, or its id on the Hugging Face hub, of the draft to train first, which stands in as long as no release
    is stable. For heads, a file of heads, or the target's folder for new ones."""
    artifacts: Path
    """Folder from which the coordinator, or a web server, serves drafts. For heads, the folder that verifiers take them
    from (their setting `heads`)."""
    key: Path = Path("~/.outrider/distill/publisher-key.pem")
    """File of the publisher's key, which `outrider-distill key` makes."""
    state_dir: Path = Path("~/.outrider/distill")
    """Folder of the runs and of the loop's state, from which a killed loop goes on."""

    coordinator: str = "127.0.0.1:7700"
    """HOST:PORT of the coordinator that releases are published to."""
    admin_token: SecretStr = SecretStr("")
    """Token that the coordinator requires of its operators, if any; that of `outrider up` on this machine is found."""
    tls: bool = False
    """Connect to the coordinator with TLS, trusting the public authorities."""
    coordinator_ca: Path | None = None
    """Connect to the coordinator with TLS, trusting this PEM authority."""
    coordinator_cert: Path | None = None
    """PEM certificate chain to show to a coordinator that asks for one."""
    coordinator_key: Path | None = None
    """PEM private key of `coordinator_cert`."""
    insecure: bool = False
    """Allow plain text to other machines."""

    poll_s: float = Field(10.0, gt=0)
    """Seconds between two readings of the traffic log, or of the canary's state."""
    fresh_tokens: int = Field(200_000, ge=1)
    """Recorded tokens after which a new draft is trained in any case."""
    alarm_tokens: int = Field(20_000, ge=1)
    """Latest recorded tokens of a class over which its acceptance is judged."""
    alarm_fall: float = Field(0.1, gt=0, lt=1)
    """Fall of a class's acceptance below its usual value, from 0 to 1, that is a reason to train."""
    run_tokens: int = Field(60_000, ge=0)
    """Recorded tokens of the fallen class without which no run begins before `fresh_tokens`: from less a draft learns
    less."""
    housekeeping_s: float = Field(3_600.0, gt=0)
    """Seconds between two clean-ups of the traffic log, which delete what has expired."""

    threads: int = Field(1, ge=1, le=1024)
    """CPU threads of each stage."""
    nice: int = Field(10, ge=0, le=19)
    """Niceness added to each stage, so that verifiers on the same machine come first."""
    train_minutes: float = Field(30.0, gt=0)
    """Minutes of one training."""
    stage_minutes: float = Field(30.0, gt=0)
    """Minutes after which any other stage is ended. Training has as many beyond `train_minutes`."""
    daily_minutes: float = Field(1_440.0, gt=0)
    """Minutes of all stages within 24 hours, beyond which no run begins."""

    loss: Literal["kl", "tv", "hybrid"] = "hybrid"
    """Training loss: Kullback-Leibler divergence, total variation, or a mean of both."""
    seed: int = 0
    """Seed of all random choices in a run."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the dataset's plan (`DatasetPlan`), as JSON."""
    training_options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the training plan (`TrainingPlan`), as JSON: rates, batches, steps instead of minutes."""
    quantization: Quantization = "Q8_0"
    """Storage type of the published draft's weights."""
    embeddings: Embeddings | None = None
    """Storage type of its embeddings and output layer; if none is given, the wide one that llama.cpp chooses."""

    gate_gain: float = Field(GateRule.gain, ge=0)
    """Least gain in tokens per step on the fresh classes, as a share from 0 to 1."""
    gate_loss: float = Field(GateRule.loss, gt=0, lt=1)
    """Largest loss in tokens per step on any class, as a share from 0 to 1."""
    gate_slower: float = Field(GateRule.slower, gt=0)
    """Largest time in which the new draft decodes a token, as a multiple of the present draft's."""
    gate_confidence: float = Field(GateRule.confidence, ge=0.5, lt=1)
    """One-sided confidence of each bound, from 0.5 to 1."""
    gate_sessions: int = Field(GateRule.sessions, ge=1)
    """Least number of held-out sessions of the fresh classes, and of a class that is judged by itself."""
    gate_positions: int = Field(GateRule.positions, ge=1)
    """Least number of held-out tokens of a class that is judged by itself."""

    retry_s: float = Field(30.0, gt=0)
    """Seconds until a failed stage is tried again; they double with each further failure."""
    retry_max_s: float = Field(3_600.0, gt=0)
    """Largest number of seconds until a failed stage is tried again."""
    attempts: int = Field(5, ge=1)
    """Attempts of one stage, after which the run is given up, and its traffic with it."""
    keep_runs: int = Field(3, ge=1)
    """Folders of past runs that are kept."""
    metrics: str = ""
    """HOST:PORT, or a port of this machine's loopback, where `run` serves /metrics and /healthz over plain HTTP;
    nowhere if empty."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that is logged."""
    log_format: LogFormat = "text"
    """text: lines for people. json: one object a line. A stage's own log, in its run's folder, is always text."""

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.retry_s > self.retry_max_s:
            raise ValueError(f"retry_s is {self.retry_s}, must be at most retry_max_s ({self.retry_max_s})")
        return self

    @property
    def suffix(self) -> str:
        """Return the suffix of the files that are published."""
        return ".safetensors" if self.student == "heads" else ".gguf"

    @property
    def training_s(self) -> float:
        """Return the longest time of a training, with loading and saving."""
        return 60 * (self.train_minutes + self.stage_minutes)

    @property
    def dataset_lasts_s(self) -> float:
        """Return how long a dataset must last: for the stages that need it, those between, and one wait for a retry."""
        return self.training_s + 4 * 60 * self.stage_minutes + self.retry_s

    @property
    def gate_rule(self) -> GateRule:
        names = ("gain", "loss", "slower", "confidence", "sessions", "positions")
        return GateRule(**{name: getattr(self, f"gate_{name}") for name in names})

    @property
    def state(self) -> Path:
        """Return `state_dir` with the home directory in place of `~`."""
        return self.state_dir.expanduser()

    @property
    def runs(self) -> Path:
        """Return the folder of the runs' folders."""
        return self.state / "runs"
