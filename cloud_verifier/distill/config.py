"""Define the settings of `outrider-distill`, built once where the process starts.

Flags override OUTRIDER_DISTILL_* in the environment, which overrides the table [distill] of a file
(`outrider.settings`). A setting that is a table, such as `gate`, may be given whole as JSON, or each of its parts by a
variable of its own, such as OUTRIDER_DISTILL_GATE_GAIN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.telemetry.logs import LogFormat

INSTALL = "distillation needs: pip install 'outrider[distill]'"
TRAIN_MINUTES = 30.0
"""Minutes of one training, unless `training_options` says otherwise."""
STAGE_MINUTES = 30.0
"""Minutes after which any other stage is ended. Training has as many beyond its own."""
PUBLIC = "public"
"""The name of the public authorities, in the setting `tls`."""

Quantization = Literal["F32", "F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"]
Embeddings = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "F16"]


@dataclass(frozen=True, config={"extra": "forbid"})
class GateRule:
    """Sets what a candidate must show to be published."""

    gain: Annotated[float, Field(ge=0)] = 0.02
    """Least gain in tokens per step on the fresh classes, as a share from 0 to 1."""
    loss: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Largest loss in tokens per step on any class, as a share from 0 to 1."""
    slower: Annotated[float, Field(gt=0)] = 1.25
    """Largest time in which the new draft decodes a token, as a multiple of the present draft's."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """One-sided confidence of each bound, from 0.5 to 1."""
    sessions: Annotated[int, Field(ge=1)] = 8
    """Least number of held-out sessions of the fresh classes, and of a class that is judged by itself."""
    # With 500 positions the bound is so loose that an unchanged class is refused once in four times.
    positions: Annotated[int, Field(ge=1)] = 2_000
    """Least number of held-out tokens of a class that is judged by itself."""
    resamples: Annotated[int, Field(ge=1)] = 2_000
    """Number of bootstrap samples behind each bound."""


class DistillConfig(BaseSettings):
    """Holds the settings of distillation. The text below each field is in `--help` and docs/configuration.md.

    What concerns a run's stages is written beside the run when it begins, so a change takes effect with the next run.
    """

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_DISTILL_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    traffic: str
    """Directory or fsspec URL of the traffic log that verifiers write."""
    target: Path
    """Directory of the target, as verifiers serve it, or its id on the Hugging Face hub."""
    draft: Path
    """GGUF file, or its id on the Hugging Face hub, of the draft to train first, which stands in as long as no release
    is stable. To train heads on the target instead, for the verifiers alone: a .safetensors file of heads, or the
    target's folder for new ones."""
    artifacts: Path
    """Folder from which the coordinator, or a web server, serves drafts. For heads, the folder that verifiers take them
    from (their setting `heads`)."""
    key: Path = Path("~/.outrider/distill/publisher-key.pem")
    """File of the publisher's key, which `outrider-distill key` makes."""
    state_dir: Path = Path("~/.outrider/distill")
    """Folder of the runs, from whose files a killed loop goes on."""

    coordinator: str = "127.0.0.1:7700"
    """HOST:PORT of the coordinator that releases are published to."""
    admin_token: SecretStr = SecretStr("")
    """Token that the coordinator requires of its operators, if any; that of `outrider up` on this machine is found."""
    tls: dict[Literal["ca", "cert", "key"], str] = Field(default_factory=dict)
    """Connect to the coordinator with TLS, if not empty, as JSON: `ca`, the PEM file of its authority, or "public" for
    the public ones; `cert` and `key`, the PEM files to show to a coordinator that asks for a certificate."""
    insecure: bool = False
    """Allow plain text to other machines."""

    fresh_tokens: int = Field(200_000, ge=1)
    """Recorded tokens after which a new draft is trained in any case."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the dataset's plan (`DatasetPlan`), as JSON."""
    training_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the training plan (`TrainingPlan`), as JSON: minutes or steps, threads, loss, rates, batches."""
    gate: dict[str, Any] = Field(default_factory=dict)
    """Fields of what a draft must show to be published (`GateRule`), as JSON: gain, loss, slower, confidence, sessions,
    positions."""
    metrics: str = ""
    """HOST:PORT, or a port of this machine's loopback, where `run` serves /metrics and /healthz over plain HTTP;
    nowhere if empty."""
    log_format: LogFormat = "text"
    """text: lines for people. json: one object a line. A stage's own log, in its run's folder, is always text."""

    @model_validator(mode="after")
    def _valid_gate(self) -> DistillConfig:
        try:
            GateRule(**self.gate)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ValueError(f"gate: {said}") from error
        return self

    @property
    def heads(self) -> bool:
        """Return whether heads on the target are trained, and no draft."""
        return self.draft.suffix == ".safetensors" or self.draft.expanduser().resolve() == self.target.resolve()

    @property
    def suffix(self) -> str:
        """Return the suffix of the files that are published."""
        return ".safetensors" if self.heads else ".gguf"

    @property
    def gate_rule(self) -> GateRule:
        return GateRule(**self.gate)

    @property
    def training_s(self) -> float:
        """Return the longest time of a training, with loading and saving."""
        return 60 * (float(self.training_options.get("minutes", TRAIN_MINUTES)) + STAGE_MINUTES)

    @property
    def state(self) -> Path:
        """Return `state_dir` with the home directory in place of `~`."""
        return self.state_dir.expanduser()

    @property
    def runs(self) -> Path:
        """Return the folder of the runs' folders."""
        return self.state / "runs"
