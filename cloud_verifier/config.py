"""A verifier's settings, built once at start and passed in. Flags override OUTRIDER_VERIFIER_* in the environment,
which overrides the table [verifier] of a file (`outrider.settings`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.core.protocol.messages import MAX_VERIFIER_ID, Directive, SessionLimits
from outrider.telemetry.logs import LogFormat

if TYPE_CHECKING:
    from outrider.wire.channels import ClientTls, ServerTls

FRONT = "OUTRIDER_FRONT_PID"
"""In the environment of the ranks' processes: who started them, and must not be outlived."""
INSTALL = "the verifier needs: pip install 'outrider[verifier]'"


class VerifierConfig(BaseSettings):
    """Every field says its unit; what stands below it is its text in help and docs."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_VERIFIER_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    model: Path
    """Directory of a Hugging Face causal LM with safetensors weights and tokenizer.json."""
    name: str = ""
    """The target's name in the cluster; the directory's name where empty."""
    draft: Path | None = None
    """GGUF file offered to devices as the draft for this target."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one."""
    advertise: str = ""
    """HOST:PORT under which devices reach this verifier; what `listen` came to where empty."""
    verifier_id: str = Field(default="", max_length=MAX_VERIFIER_ID)
    """Stable over restarts if given; random where empty."""
    coordinator: str = ""
    """HOST:PORT of the coordinator; without one every device on this machine is served without a ticket."""
    open_to_all: bool = False
    """Without a coordinator, serve every device beyond this machine too, without a ticket."""
    join_token: SecretStr = SecretStr("")
    """Shared with the coordinator; proves that this verifier belongs to the cluster."""
    tls_cert: Path | None = None
    """PEM chain; with `tls_key` it turns TLS on."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    coordinator_ca: Path | None = None
    """PEM authority of a coordinator that speaks TLS."""
    insecure: bool = False
    """Allow plain text beyond loopback."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA; float32 on a CPU, where one-token and batched steps then agree to about 1e-5."""
    device: str = "cpu"
    """What computes: cpu, cuda, or one GPU of several, as cuda:1."""
    attention: Literal["auto", "sdpa", "exact", "triton"] = "auto"
    """auto: triton on CUDA, with graphs, and sdpa elsewhere. exact: a token's logits have the same bits in every batch,
    tree and chunk, at some cost in time. For one thread, not for a mixture of experts; shown on a CPU with AMX, and
    there with AVX-512 alone. Refused where the self-test finds another bit in steps of up to token_budget rows."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the forward pass, in each rank."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks, each a process with its share of every layer: one per GPU, or on a CPU several beside one another."""
    kv_slots: int = Field(default=32_768, ge=256)
    """Tokens whose keys and values are held, over all sessions."""
    max_sessions: int = Field(default=64, ge=1, le=100_000)
    """Sessions served at once; the coordinator places no more here."""
    token_budget: int = Field(default=512, ge=16)
    """Rows of one forward pass, over prefill chunks, trees and plain steps."""
    first_token_s: float = Field(default=30.0, ge=1.0)
    """A session whose first token others' prompts would delay by more seconds, by the cost model, is told to come
    later."""
    standing_s: float = Field(default=60.0, ge=1.0)
    """A device that confirms nothing for so many seconds, while tokens wait for it, loses its place; it may come back
    for them. Where others find no room it does after some seconds."""
    server_draft: Path | None = None
    """GGUF draft with which the verifier itself drafts for devices that draft nothing; it runs in llama.cpp."""
    server_draft_depth: int = Field(default=4, ge=1, le=32)
    """Tokens that it drafts ahead, one decode of all such sessions for each."""
    server_draft_siblings: int = Field(default=1, ge=0, le=8)
    """Further guesses beside each of them; they cost no decode."""
    server_draft_pauses: bool = True
    """Whether it stops where it does not pay; otherwise it drafts in every step, for measurements."""
    server_draft_sessions: int = Field(default=64, ge=1, le=256)
    """Sessions that it drafts for at once; each takes a cache of the draft's whole context."""
    prefix_cache: bool = True
    """Keep what was computed in slots that are free otherwise: a chat's next turn then prefills only what is new, and a
    device that comes back nothing. Shared within a tenant, never between tenants; sessions without a ticket share with
    nobody where strangers are served (`open_to_all`), since how fast a prompt is read tells whether it was seen."""

    nodes: int = Field(default=64, ge=0, le=4096)
    """W: nodes that a device may hold."""
    depth: int = Field(default=32, ge=0, le=4096)
    """D: tokens that a device may draft beyond the last committed one."""
    in_flight: int = Field(default=128, ge=1, le=65_536)
    """F: ids sent and not yet seen; above W, so that dead nodes do not stall a distant device."""
    run_ahead: int = Field(default=64, ge=1, le=65_536)
    """C: positions committed beyond what the device is known to have received."""

    window_nodes: int = Field(default=48, ge=0)
    """Of `nodes`, those that a device is told to hold."""
    window_depth: int = Field(default=24, ge=0)
    """Of `depth`, what a device is told to draft."""
    nodes_per_step: int = Field(default=10, ge=0, le=4096)
    """k: nodes that one step takes from one session."""
    min_acceptance: float = Field(default=0.1, ge=0.0, le=1.0)
    """Least survival that a node must have to be worth sending; devices are told more while the verifier is busy."""
    draft_wait_ms: int = Field(default=8, ge=0, le=60_000)
    """Milliseconds that a step waits for a device's nodes before it goes on without them."""

    traffic: str = ""
    """Directory or fsspec URL of the traffic log (docs/traffic.md); where it is empty nothing is recorded, and never of
    a session whose ticket does not allow it."""
    traffic_flush_s: float = Field(default=10.0, ge=0.1, le=3600.0)
    """Seconds after which what is recorded is written at the latest: what a kill loses."""
    traffic_flush_tokens: int = Field(default=16_384, ge=1, le=1 << 24)
    """Recorded tokens after which it is written sooner."""
    traffic_top: int = Field(default=32, ge=1, le=256)
    """K: likeliest ids that are recorded of each position."""
    traffic_prompt_tokens: int = Field(default=2_048, ge=0, le=1 << 20)
    """Of a prompt whose tenant lets prompts be kept, the last so many are recorded with the output's beginning."""
    traffic_redact: str = Field(default="", pattern=r"^([\w.]+:\w+)?$")
    """`module:function` that says which tokens are kept out: (tokens, traffic_class, tenant) -> mask, true there."""
    traffic_max_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Bytes of the log above which its oldest segments are deleted."""

    metrics: str = ""
    """HOST:PORT, or a port of this machine's loopback, where /metrics and /healthz are served over plain HTTP; nowhere
    where empty. They tell of load and speeds, of no session and no tenant."""
    log_format: LogFormat = "text"
    """text: lines for people. json: an object a line, for machines."""

    open_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a stream whose first message has not come is ended."""
    stream_messages_per_s: float = Field(default=1_000.0, gt=0)
    """Messages a second that are read from one stream; the rest wait at the device. An honest one sends one in 2 ms,
    and answers."""
    stream_burst: int = Field(default=200, ge=1)
    """Messages that one stream may send at once beyond that."""
    fetch_timeout_s: float = Field(default=600.0, gt=0)
    """A download whose reader still reads ends after so many seconds; a device fetches the rest with another call."""
    max_downloads: int = Field(default=64, ge=1)
    """Downloads at once. A reader that does not read holds one until its connection ends, and never a session's
    place."""
    ping_interval_s: float = Field(default=0.5, gt=0)
    """Seconds between two pings to a device, by which it knows that we live."""
    silence_timeout_s: float = Field(default=20.0, gt=0)
    """A device that answers no ping and sends no Append for so many seconds is gone; its slots are freed."""
    engine_silence_s: float = Field(default=30.0, gt=0)
    """An engine process that says nothing for so many seconds hangs, and is killed. It must exceed the longest step, a
    full `token_budget` of prefill; a healthy engine speaks every 0.25 s between steps."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that SIGTERM lets live sessions go on; those that have not finished then are handed over."""

    @model_validator(mode="after")
    def _consistent(self) -> VerifierConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if not self.verifier_id.isprintable():
            raise ValueError("verifier_id holds what cannot be printed; give letters, digits and dashes")
        for low, high in (("nodes", "in_flight"), ("window_nodes", "nodes"), ("window_depth", "depth")):
            below, above = getattr(self, low), getattr(self, high)
            if below > above:
                raise ValueError(f"{low} is {below}, must be at most {high}, which is {above}")
        return self

    @property
    def tls(self) -> ServerTls | None:
        """The certificate and key to serve with; None for plain text."""
        from outrider.wire.channels import ServerTls  # gRPC, which the help does not wait for

        return ServerTls(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None

    @property
    def coordinator_tls(self) -> ClientTls | None:
        """What to verify the coordinator's certificate with; None for plain text."""
        from outrider.wire.channels import ClientTls

        return ClientTls(self.coordinator_ca) if self.coordinator_ca else None

    @property
    def limits(self) -> SessionLimits:
        return SessionLimits(self.nodes, self.depth, self.in_flight, self.run_ahead)

    @property
    def directive(self) -> Directive:
        if self.nodes_per_step == 0:
            return Directive(0, 0, 0, self.min_acceptance, 0)  # nothing to draft for
        return Directive(
            self.window_nodes, self.window_depth, self.nodes_per_step, self.min_acceptance, self.draft_wait_ms
        )

    @property
    def target_name(self) -> str:
        return self.name or self.model.resolve().name
