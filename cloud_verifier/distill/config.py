"""What `outrider-distill` can be told, built once where the process starts. Flags override OUTRIDER_DISTILL_* in the
environment, which overrides the table [distill] of a file (`outrider.settings`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cloud_verifier.distill.data.retrain_trigger import WatchRule
from cloud_verifier.distill.publishing.gate import Rule
from outrider.telemetry.logs import LogFormat
from outrider.wire.channels import ClientTls

INSTALL = "distillation needs: pip install 'outrider[distill]'"


class DistillConfig(BaseSettings):
    """Every field says its unit; what stands below it is its text in help and docs. What a stage needs is written
    beside its run, so that a changed setting takes effect with the next run."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_DISTILL_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    traffic: str
    """Directory or fsspec URL of the traffic log that verifiers write."""
    target: Path
    """Directory of the target, as verifiers serve it."""
    draft: Path
    """GGUF draft to begin with, as long as no release is stable."""
    artifacts: Path
    """Folder that the coordinator, or a web server, serves drafts from."""
    key: Path = Path("~/.outrider/distill/publisher-key.pem")
    """File of the publisher's key; `outrider-distill key` makes one."""
    state_dir: Path = Path("~/.outrider/distill")
    """Folder of the runs, and of where the loop is: a killed one goes on from here."""

    coordinator: str = "127.0.0.1:7700"
    """HOST:PORT of the coordinator, which is told of releases."""
    admin_token: SecretStr = SecretStr("")
    """What the coordinator asks of its operators, where it does."""
    tls: bool = False
    """Speak TLS with the coordinator, trusting the public authorities."""
    coordinator_ca: Path | None = None
    """Speak TLS, trusting this PEM authority."""
    insecure: bool = False
    """Allow plain text beyond loopback."""

    poll_s: float = Field(10.0, gt=0)
    """Seconds between two looks at the traffic, or at the canary."""
    fresh_tokens: int = Field(200_000, ge=1)
    """Recorded tokens after which a new draft is trained in any case."""
    alarm_tokens: int = Field(20_000, ge=1)
    """Recorded tokens of one class after which its acceptance is judged."""
    alarm_fall: float = Field(0.1, gt=0, lt=1)
    """Acceptance, from 0 to 1, that is so much below what was usual is reason to train."""
    run_tokens: int = Field(60_000, ge=0)
    """Recorded tokens of the class that has fallen; with less no run begins before `fresh_tokens`: from less a draft
    learns less."""
    housekeeping_s: float = Field(3_600.0, gt=0)
    """Seconds after which the traffic log is compacted and what has expired is deleted, again and again."""

    threads: int = Field(1, ge=1, le=1024)
    """CPU threads of each stage."""
    nice: int = Field(10, ge=0, le=19)
    """Added niceness of each stage: verifiers on the same machine come first."""
    ranks: int = Field(1, ge=1, le=64)
    """Processes that train together, each on its GPU; more than one run under torchrun."""
    train_minutes: float = Field(30.0, gt=0)
    """Minutes of one training."""
    stage_minutes: float = Field(30.0, gt=0)
    """Minutes of each other stage; one that takes longer hangs, and is ended. Training gets as much beyond
    `train_minutes`."""
    daily_minutes: float = Field(1_440.0, gt=0)
    """Minutes of all stages within 24 hours; no run is begun beyond it."""

    loss: Literal["kl", "tv", "hybrid"] = "hybrid"
    """What training lessens: Kullback-Leibler divergence, total variation, or both."""
    lora_rank: int = Field(0, ge=0, le=1024)
    """Rank of the LoRA adapters that are trained; 0 trains all weights."""
    seed: int = 0
    """Of what is random in a run."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the dataset's plan (`dataset.DatasetPlan`), as JSON."""
    training_options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the training plan (`plan.TrainingPlan`), as JSON: rates, batches, steps instead of minutes."""
    quantization: Literal["Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "F16"] = "Q8_0"
    """How the published file stores the draft's weights."""
    widened: tuple[str, ...] = ()
    """Patterns of tensors that may be stored wider, since their rows do not fit the quantisation's blocks."""

    gate_gain: float = Field(Rule.gain, ge=0)
    """Share, from 0 to 1, by which tokens per step must be more on the fresh classes (`gate.Rule`)."""
    gate_loss: float = Field(Rule.loss, gt=0, lt=1)
    """Share, from 0 to 1, by which they may be fewer on any class."""
    gate_slower: float = Field(Rule.slower, gt=0)
    """Times the present draft's time for a token that the new one may take."""
    gate_confidence: float = Field(Rule.confidence, ge=0.5, lt=1)
    """One-sided confidence, from 0.5 to 1, of each bound."""
    gate_texts: int = Field(Rule.sessions, ge=1)
    """Fewest sessions of what is judged. Sessions, however many texts each is cut into."""
    gate_positions: int = Field(Rule.positions, ge=1)
    """Fewest positions of a class that is judged by itself."""

    retry_s: float = Field(30.0, gt=0)
    """Seconds that a failed stage waits; twice as long after each further failure."""
    retry_max_s: float = Field(3_600.0, gt=0)
    """Seconds that it waits at most."""
    attempts: int = Field(5, ge=1)
    """Attempts of one stage; then the run is given up, and its traffic with it."""
    keep_runs: int = Field(3, ge=1)
    """Folders of past runs that are kept."""
    metrics: str = ""
    """HOST:PORT, or a port of this machine's loopback, where `run` serves /metrics and /healthz over plain HTTP;
    nowhere where empty."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What is less than this is not logged."""
    log_format: LogFormat = "text"
    """text: lines for people. json: an object a line, for machines. A stage's own log, in its run's folder, is for
    people."""

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.retry_s > self.retry_max_s:
            raise ValueError(f"retry_s is {self.retry_s}, must be at most retry_max_s ({self.retry_max_s})")
        return self

    @property
    def training_s(self) -> float:
        """The longest that a training may take, loading and saving included."""
        return 60 * (self.train_minutes + self.stage_minutes)

    @property
    def lasts_s(self) -> float:
        """How long a dataset must last: for the stages that read it or lie between, and one wait after a failure."""
        return self.training_s + 4 * 60 * self.stage_minutes + self.retry_s

    @property
    def rule(self) -> Rule:
        return Rule(
            self.gate_gain,
            self.gate_loss,
            self.gate_slower,
            self.gate_confidence,
            self.gate_texts,
            self.gate_positions,
        )

    @property
    def watch_rule(self) -> WatchRule:
        return WatchRule(self.fresh_tokens, self.alarm_tokens, self.alarm_fall, self.run_tokens)

    @property
    def client_tls(self) -> ClientTls | None:
        return ClientTls(self.coordinator_ca) if self.tls or self.coordinator_ca else None

    @property
    def state(self) -> Path:
        """`state_dir`, with the home directory in it."""
        return self.state_dir.expanduser()
