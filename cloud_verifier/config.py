"""Define a verifier's settings, which are built once at start and passed in.

Flags override OUTRIDER_VERIFIER_* in the environment, which overrides the table [verifier] of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.core.protocol.messages import MAX_VERIFIER_ID, Directive, SessionLimits
from outrider.settings import Address, Token

if TYPE_CHECKING:
    from outrider.wire.channels import ClientTls, ServerTls

INSTALL = "the verifier needs: pip install 'outrider[verifier]'"
INSTALL_VLLM = (
    "make an environment with `python -m cloud_verifier.vllm_environment FOLDER`, and give its interpreter as"
    " --engine-python FOLDER/bin/python"
)


LIMITS = SessionLimits(nodes=64, depth=32, in_flight=128, run_ahead=64)
"""What a session may use. More ids may be in flight than nodes are held, so that dead ones do not stall a distant
device."""
WINDOW = Directive(window_nodes=48, window_depth=24)
"""What a device drafts until the coordinator decides, beside what `engine_args` says."""


class EngineArgs(BaseModel, frozen=True, extra="allow"):
    """Holds what is rarely changed of an engine; further fields are arguments of vLLM's own."""

    token_budget: int = Field(default=512, ge=16)
    """Rows of one forward pass, over prefill chunks, trees and plain steps."""
    prefix_cache: bool = True
    """Keep computed tokens in KV slots that are free otherwise, for other sessions of the same tenant."""
    ngram: bool = True
    """Whether the verifier proposes what followed the same tokens in the session's own text, as long as that pays."""
    allow_lossy_rules: bool = False
    """Whether requests may ask for an acceptance rule that lets draft tokens change the output, as `typical`. All
    verifiers of a target should have the same, or a session cannot move to one that refuses its rule."""
    nodes_per_step: int = Field(default=10, ge=0, le=LIMITS.nodes)
    draft_wait_ms: int = Field(default=8, ge=0, le=60_000)

    @property
    def of_vllm(self) -> dict[str, Any]:
        """Return the fields that are arguments of vLLM's own."""
        return dict(self.model_extra or {})


class VerifierConfig(BaseSettings):
    """The settings of `outrider-verifier`. The text below each field is in `--help` and docs/reference/settings.md."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_VERIFIER_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    model: Path
    """Directory of the target: a Hugging Face causal LM with safetensors weights and tokenizer.json; or its id on the
    Hugging Face hub, as org/name or org/name@revision."""
    name: str = ""
    """The target's name in the cluster; if empty, org/name of its id on the hub, or the directory's name."""
    draft: Path | None = None
    """GGUF file that devices are offered as the draft for this target, or its id on the hub, as
    org/name@revision:file.gguf."""
    listen: Address = "127.0.0.1:0"
    """HOST:PORT to serve devices at; port 0 takes a free one."""
    advertise: Address = ""
    """HOST:PORT at which devices reach this verifier; if empty, the address that it listens at."""
    verifier_id: str = Field(default="", max_length=MAX_VERIFIER_ID)
    """This verifier's name in the cluster, which restarts keep; if empty, a random one."""
    coordinator: Address = ""
    """HOST:PORT of the coordinator. Without one, every device on this machine is served without a ticket."""
    open_to_all: bool = False
    """Without a coordinator, serve devices on other machines too, without a ticket."""
    join_token: Token = SecretStr("")
    """Secret shared with the coordinator, which proves that this verifier belongs to the cluster. If empty, that of
    `outrider up` on this machine, where the same user runs it."""
    tls_cert: Path | None = None
    """PEM certificate chain; with `tls_key` it turns TLS on."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`. Both are shown to a coordinator that asks for a certificate, too."""
    tls_client_ca: Path | None = None
    """PEM authorities that must have signed the certificate of every device. Without them devices need none."""
    coordinator_ca: Path | None = None
    """PEM certificate of the authority that signed the coordinator's certificate; turns TLS to the coordinator on."""
    insecure: bool = False
    """Allow connections in plain text to and from other machines."""

    engine: Literal["torch", "vllm"] = "torch"
    """What runs the target. torch: our own engine, which evaluates token trees, on one machine. vllm: vLLM, for
    quantised weights, mixtures of experts and many more architectures; it evaluates chains of tokens."""
    engine_python: Path | None = None
    """Python interpreter of the engine process, in an environment that `python -m cloud_verifier.vllm_environment` has
    made, for engine vllm; if not set, this one. Outrider's own code is always that of this installation."""
    engine_args: EngineArgs = EngineArgs()
    """JSON object of what is rarely changed. Of the engine: `token_budget` (rows of one forward pass), `prefix_cache`,
    `ngram`, and `allow_lossy_rules`, whether requests may ask for an acceptance rule by which draft tokens change the
    output (the same for all verifiers of a target); of a session until its coordinator decides: `nodes_per_step` (0 for
    no speculation) and `draft_wait_ms`. With engine vllm all others are arguments of vLLM's EngineArgs, as
    {"quantization": "fp8", "tensor_parallel_size": 2}."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache. auto: bfloat16 on CUDA; float32 on a CPU, where the tokens with drafts are
    those without. In 16 bits they have the same distribution. float16 is for GPUs without bfloat16; models trained in
    bfloat16 may overflow in it."""
    device: str = "cpu"
    """Device of the target: cpu, cuda, or one GPU of several, as cuda:1."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the forward pass."""
    kv_slots: int = Field(default=32_768, ge=256)
    """KV slots: tokens whose keys and values are held, over all sessions. Engine vllm on a GPU takes what its memory
    leaves instead."""
    max_sessions: int = Field(default=64, ge=1, le=100_000)
    """The most sessions served at once; the coordinator places no more here."""
    heads: Path | None = None
    """File of heads on the target (EAGLE or Medusa) that propose draft tokens where that pays, as outrider-distill
    writes it. Heads of another target are refused. Engine torch."""
    server_draft: Path | None = None
    """GGUF file, or its id on the hub, of a draft that the verifier itself runs, in llama.cpp, for every session where
    that pays. Engine torch."""
    traffic: str = ""
    """Directory or fsspec URL of the traffic log (docs/traffic.md); if empty nothing is recorded. Only sessions whose
    tickets allow it are recorded."""
    traffic_redact: str = Field(default="", pattern=r"^([\w.]+:\w+)?$")
    """`module:function` that hides tokens from the log: (tokens, traffic_class, tenant) -> mask, true where hidden."""

    metrics: str = ""
    """HOST:PORT, or a port on loopback, to serve /metrics and /healthz at over plain HTTP; if empty neither is served.
    No label is a session or a tenant."""

    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that live sessions may go on after SIGTERM; sessions that have not finished then are handed over."""

    @model_validator(mode="after")
    def _consistent(self) -> VerifierConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: devices show certificates over TLS alone")
        if not self.verifier_id.isprintable():
            raise ValueError("verifier_id holds what cannot be printed; give letters, digits and dashes")
        self._check_engine()
        return self

    def _check_engine(self) -> None:
        """Raise ValueError for settings that the engine does not have."""
        if self.engine == "torch" and self.engine_python:
            raise ValueError("engine_python is for vLLM: give engine vllm, or leave it out")
        if self.engine == "torch" and self.engine_args.of_vllm:
            names = ", ".join(self.engine_args.of_vllm)
            raise ValueError(f"engine_args has {names}, which engine torch does not have; give engine vllm")
        if self.engine == "vllm":
            for name in ("heads", "server_draft"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is {getattr(self, name)}, which engine vllm does not have; leave it out")

    @property
    def tls(self) -> ServerTls | None:
        """Return the certificate and key to serve with; None for plain text."""
        from outrider.wire.channels import ServerTls  # gRPC, which the help does not wait for

        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert and self.tls_key else None

    @property
    def coordinator_tls(self) -> ClientTls | None:
        """Return what to verify the coordinator's certificate with, and our own for it; None for plain text."""
        from outrider.wire.channels import ClientTls

        return None if self.coordinator_ca is None else ClientTls(self.coordinator_ca, self.tls_cert, self.tls_key)

    @property
    def directive(self) -> Directive:
        """Return what a session drafts until the coordinator decides."""
        directive, given = Directive(), self.engine_args
        if given.nodes_per_step:
            directive.CopyFrom(WINDOW)
            directive.nodes_per_step, directive.draft_wait_ms = given.nodes_per_step, given.draft_wait_ms
        return directive

    @property
    def target_name(self) -> str:
        return self.name or self.model.resolve().name
