"""Define a verifier's settings, which are built once at start and passed in.

Flags override OUTRIDER_VERIFIER_* in the environment, which overrides the table [verifier] of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.core.protocol.messages import MAX_VERIFIER_ID, Directive, SessionLimits
from outrider.settings import Address
from outrider.telemetry.logs import LogFormat

if TYPE_CHECKING:
    from outrider.wire.channels import ClientTls, ServerTls

INSTALL = "the verifier needs: pip install 'outrider[verifier]'"
INSTALL_VLLM = (
    "make an environment with `python -m cloud_verifier.vllm_environment FOLDER`, and give its interpreter as"
    " --engine-python FOLDER/bin/python"
)


class VerifierConfig(BaseSettings):
    """The settings of `outrider-verifier`. The text below each field is in `--help` and docs/configuration.md."""

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
    join_token: SecretStr = SecretStr("")
    """Secret shared with the coordinator, which proves that this verifier belongs to the cluster. If empty, that of
    `outrider up` on this machine, where the same user runs it."""
    tls_cert: Path | None = None
    """PEM certificate chain; with `tls_key` it turns TLS on."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """PEM authorities that must have signed the certificate of every device. Without them devices need none."""
    coordinator_ca: Path | None = None
    """PEM certificate of the authority that signed the coordinator's certificate; turns TLS to the coordinator on."""
    coordinator_cert: Path | None = None
    """PEM certificate chain to show to a coordinator that asks for one, with `coordinator_ca`."""
    coordinator_key: Path | None = None
    """PEM private key of `coordinator_cert`."""
    insecure: bool = False
    """Allow connections in plain text to and from other machines."""

    engine: Literal["torch", "vllm"] = "torch"
    """What runs the target. torch: our own engine, which evaluates token trees, on one machine. vllm: vLLM, for
    quantised weights, mixtures of experts and many more architectures; it evaluates chains of tokens."""
    engine_python: Path | None = None
    """Python interpreter of the engine process, in an environment that `python -m cloud_verifier.vllm_environment` has
    made, for engine vllm; if not set, this one. Outrider's own code is always that of this installation."""
    engine_args: str = ""
    """JSON object of further arguments of vLLM's EngineArgs, as {"quantization": "fp8"}; only with engine vllm."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache. auto: bfloat16 on CUDA; float32 on a CPU, where the tokens with drafts are
    those without. In 16 bits they have the same distribution. float16 is for GPUs without bfloat16; models trained in
    bfloat16 may overflow in it."""
    device: str = "cpu"
    """Device of the target: cpu, cuda, or one GPU of several, as cuda:1."""
    attention: Literal["auto", "sdpa", "triton"] = "auto"
    """Attention backend. auto: triton on CUDA, with graphs, and sdpa elsewhere."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the forward pass."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs, or processes on a CPU, that vLLM divides every layer among; only with engine vllm."""
    kv_slots: int = Field(default=32_768, ge=256)
    """KV slots: tokens whose keys and values are held, over all sessions."""
    max_sessions: int = Field(default=64, ge=1, le=100_000)
    """The most sessions served at once; the coordinator places no more here."""
    token_budget: int = Field(default=512, ge=16)
    """The most rows of one forward pass, over prefill chunks, trees and plain steps."""
    first_token_s: float = Field(default=30.0, ge=1.0)
    """Seconds. A session is refused, and may try again later, if by the cost model the prompts of other sessions would
    delay its first token by more."""
    stall_timeout_s: float = Field(default=60.0, ge=1.0)
    """Seconds after which a device that confirms no token, while tokens wait for it, loses its place; it may attach
    again for them. If other sessions find no room it loses its place after a few seconds."""
    server_sources: Literal["ngram", ""] = "ngram"
    """Sources of draft tokens that need no model, beside a server draft and heads. ngram: what followed the same tokens
    in the session's own text. Empty for none. A source that does not pay pauses."""
    heads: Path | None = None
    """File of heads on the target (EAGLE or Medusa) that propose draft tokens where that pays, as outrider-distill
    writes it. Heads of another target are refused. Engine torch."""
    server_draft: Path | None = None
    """GGUF file, or its id on the hub, of a draft that the verifier itself runs, in llama.cpp, for every session where
    that pays."""
    server_draft_depth: int = Field(default=4, ge=1, le=32)
    """Tokens that the server draft proposes ahead; each costs one decode for all its sessions together."""
    server_draft_sessions: int = Field(default=64, ge=1, le=256)
    """Sessions that the server draft serves at once; each takes a KV cache of the draft's whole context."""
    allow_lossy_rules: bool = False
    """Whether requests may ask for an acceptance rule that lets draft tokens change the output, as `typical`. All
    verifiers of a target should have the same, or a session cannot move to one that refuses its rule."""
    prefix_cache: bool = True
    """Keep computed tokens in KV slots that are free otherwise: a chat's next turn then prefills only what is new, and
    a device that attaches again prefills nothing. Sessions of one tenant share the cache, never those of two tenants.
    Sessions without a ticket share nothing with `open_to_all`, since the time of a prefill tells whether a prompt was
    seen before."""

    nodes: int = Field(default=64, ge=0, le=4096)
    """W: the most nodes that a device may hold."""
    depth: int = Field(default=32, ge=0, le=4096)
    """D: the most tokens that a device may draft beyond the last committed one."""
    in_flight: int = Field(default=128, ge=1, le=65_536)
    """F: the most node ids that are sent and not yet seen; greater than W, so that dead nodes do not stall a distant
    device."""
    run_ahead: int = Field(default=64, ge=1, le=65_536)
    """C: the most positions committed beyond what the device is known to have received."""

    window_nodes: int = Field(default=48, ge=0)
    """Nodes of the speculation window, at most `nodes`, until the coordinator decides."""
    window_depth: int = Field(default=24, ge=0)
    """Depth of the speculation window, at most `depth`, until the coordinator decides."""
    nodes_per_step: int = Field(default=10, ge=0, le=4096)
    """Nodes that one step takes from one session, until the coordinator decides."""
    min_acceptance: float = Field(default=0.1, ge=0.0, le=1.0)
    """Least probability of acceptance at which a device sends a node; it rises while the verifier is busy."""
    draft_wait_ms: int = Field(default=8, ge=0, le=60_000)
    """Milliseconds that a verifier waits for a device's nodes before a plain step."""

    traffic: str = ""
    """Directory or fsspec URL of the traffic log (docs/traffic.md); if empty nothing is recorded. Only sessions whose
    tickets allow it are recorded."""
    traffic_flush_s: float = Field(default=10.0, ge=0.1, le=3600.0)
    """Seconds within which recorded tokens are written; a killed verifier loses that much."""
    traffic_top: int = Field(default=32, ge=1, le=256)
    """K: the likeliest ids that are recorded for each position."""
    traffic_prompt_tokens: int = Field(default=2_048, ge=0, le=1 << 20)
    """The last tokens of a prompt that are recorded with the output's beginning, if the tenant allows prompts."""
    traffic_redact: str = Field(default="", pattern=r"^([\w.]+:\w+)?$")
    """`module:function` that hides tokens from the log: (tokens, traffic_class, tenant) -> mask, true where hidden."""
    traffic_max_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Bytes of the log above which its oldest files are deleted."""

    metrics: str = ""
    """HOST:PORT, or a port on loopback, to serve /metrics and /healthz at over plain HTTP; if empty neither is served.
    No label is a session or a tenant."""
    log_format: LogFormat = "text"
    """text: lines for people. json: one object per line, for machines."""

    engine_silence_s: float = Field(default=30.0, gt=0)
    """Seconds after which an engine process that sends nothing is killed. It must exceed the longest step, a prefill of
    `token_budget` rows; a healthy engine sends every 0.25 s between steps."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that live sessions may go on after SIGTERM; sessions that have not finished then are handed over."""

    @model_validator(mode="after")
    def _consistent(self) -> VerifierConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: devices show certificates over TLS alone")
        if (self.coordinator_cert is None) != (self.coordinator_key is None):
            raise ValueError("coordinator_cert and coordinator_key go together: give both or neither")
        if self.coordinator_cert is not None and self.coordinator_ca is None:
            raise ValueError("coordinator_cert needs coordinator_ca: a certificate is shown over TLS alone")
        if not self.verifier_id.isprintable():
            raise ValueError("verifier_id holds what cannot be printed; give letters, digits and dashes")
        self._check_engine()
        for low, high in (("nodes", "in_flight"), ("window_nodes", "nodes"), ("window_depth", "depth")):
            below, above = getattr(self, low), getattr(self, high)
            if below > above:
                raise ValueError(f"{low} is {below}, must be at most {high}, which is {above}")
        return self

    def _check_engine(self) -> None:
        """Raise ValueError for settings that the engine does not have."""
        for name in ("engine_args", "engine_python"):
            if self.engine == "torch" and getattr(self, name):
                raise ValueError(f"{name} is for vLLM: give engine vllm, or leave it out")
        if self.engine == "torch" and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, and engine torch runs on one GPU: give engine vllm"
            )
        if self.engine == "vllm":
            for name, value in (("attention", "auto"), ("heads", None), ("server_draft", None)):
                if getattr(self, name) != value:
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

        if self.coordinator_ca is None:
            return None
        return ClientTls(self.coordinator_ca, self.coordinator_cert, self.coordinator_key)

    @property
    def limits(self) -> SessionLimits:
        return SessionLimits(self.nodes, self.depth, self.in_flight, self.run_ahead)

    @property
    def directive(self) -> Directive:
        if self.nodes_per_step == 0:
            return Directive(min_acceptance=self.min_acceptance)  # no speculation
        return Directive(
            window_nodes=self.window_nodes,
            window_depth=self.window_depth,
            nodes_per_step=self.nodes_per_step,
            min_acceptance=self.min_acceptance,
            draft_wait_ms=self.draft_wait_ms,
        )

    @property
    def target_name(self) -> str:
        return self.name or self.model.resolve().name
