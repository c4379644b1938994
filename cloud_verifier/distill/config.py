"""Define the settings of `outrider-distill`, built once where the process starts.

Flags override OUTRIDER_DISTILL_* in the environment, which overrides the table [distill] of a file
(`outrider.settings`). A setting that is a table, such as `gate`, may be given whole as JSON, or each of its parts by a
variable of its own, such as OUTRIDER_DISTILL_GATE_GAIN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.settings import Token

INSTALL = "distillation needs: pip install 'outrider[distill]'"
TRAIN_MINUTES = 30.0
"""Minutes of one training, unless `training_options` says otherwise."""
PUBLIC = "public"
"""The name of the public authorities, in the setting `tls`."""

Quantization = Literal["F32", "F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"]
Embeddings = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "F16"]


class GateRule(BaseModel, frozen=True, extra="forbid"):
    """Sets what a candidate must show to be published."""

    gain: float = Field(default=0.02, ge=0)
    """Least gain in tokens per step on the fresh classes, as a share from 0 to 1."""
    loss: float = Field(default=0.05, gt=0, lt=1)
    """Largest loss in tokens per step on any class, as a share from 0 to 1."""
    slower: float = Field(default=1.25, gt=0)
    """Largest time in which the new draft decodes a token, as a multiple of the present draft's."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """One-sided confidence of each bound, from 0.5 to 1."""
    sessions: int = Field(default=8, ge=1)
    """Least number of held-out sessions of the fresh classes, and of a class that is judged by itself."""
    # With 500 positions the bound is so loose that an unchanged class is refused once in four times.
    positions: int = Field(default=2_000, ge=1)
    """Least number of held-out tokens of a class that is judged by itself."""


class DistillConfig(BaseSettings):
    """Holds the settings of distillation. The text below each field is in `--help` and docs/reference/settings.md.

    A run keeps the draft and the plan of its training with which it began; all else takes effect with the next stage.
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
    admin_token: Token = SecretStr("")
    """Token that the coordinator requires of its operators, if any; that of `outrider up` on this machine is found."""
    tls: dict[Literal["ca", "cert", "key"], str] = Field(default_factory=dict)
    """Connect to the coordinator with TLS, if not empty, as JSON: `ca`, the PEM file of its authority, or "public" for
    the public ones; `cert` and `key`, the PEM files to show to a coordinator that asks for a certificate."""
    insecure: bool = False
    """Allow plain text to other machines."""

    fresh_tokens: int = Field(200_000, ge=1)
    """Recorded tokens after which a new draft is trained in any case."""
    training_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the training's plan (`TrainingPlan`: minutes or steps, threads, loss, rates, batches) and of the
    dataset's (`DatasetPlan`: tokens, shares, window), as JSON."""
    gate: GateRule = GateRule()
    """What a draft must show to be published, as JSON: gain, loss, slower, confidence, sessions, positions."""
    metrics: str = ""
    """HOST:PORT, or a port of this machine's loopback, where `run` serves /metrics and /healthz over plain HTTP;
    nowhere if empty."""

    @property
    def heads(self) -> bool:
        """Return whether heads on the target are trained, and no draft."""
        return self.draft.suffix == ".safetensors" or self.draft.expanduser().resolve() == self.target.resolve()

    @property
    def threads(self) -> int:
        """Return the CPU threads of each stage."""
        return int(self.training_options.get("threads", 1))

    @property
    def state(self) -> Path:
        """Return `state_dir` with the home directory in place of `~`."""
        return self.state_dir.expanduser()

    @property
    def runs(self) -> Path:
        return self.state / "runs"
