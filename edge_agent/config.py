"""A device's settings, built once and passed in. Arguments override OUTRIDER_EDGE_* in the environment, which overrides
the table [edge] of a file (`outrider.settings`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.settings.layers import Flag, Repeated
from outrider.telemetry.logs import LogFormat


def default_cache() -> Path:
    """Where XDG wants caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


class EdgeSettings(BaseSettings):
    """Every field says its unit; what stands below it is its text in help and docs."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_EDGE_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ("coordinator", "verifier")
    """An address stands for itself: the other one, of a lower source, would contradict it."""

    coordinator: str = ""
    """HOST:PORT of the coordinator, which names the verifier."""
    verifier: str = ""
    """HOST:PORT of one verifier, instead of a coordinator."""
    target: str = ""
    """Name of the target; empty where the cluster serves just one."""
    draft: str = "auto"
    """auto takes the draft that the verifier offers, lookup guesses from the text alone, none is plain cloud streaming;
    anything else is the path of a GGUF file."""
    api_key: SecretStr | None = None
    """What the coordinator asks of its tenants, where it does."""
    tls_ca: Path | None = None
    """PEM file of the authorities to trust; set it to speak TLS to `verifier` and `coordinator`."""
    tls: bool = False
    """Speak TLS with the authorities that gRPC ships with."""
    insecure: bool = False
    """Allow plain text beyond loopback."""
    cache_dir: Path = Field(default_factory=default_cache)
    """Folder where what was fetched is kept: tokenizers, templates, drafts. $XDG_CACHE_HOME moves the default."""

    draft_workers: int = Field(default=2, ge=1, le=64)
    """Sessions that may draft at once; further ones run without a draft rather than wait."""
    draft_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of a decode; below the number of cores, since the threads spin."""
    cpu_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of one core's time, from 0 to 1, that drafting may take; 1 is no cap. What the verifier waits for goes
    first."""
    draft_context: int = Field(default=4096, ge=64)
    """Tokens that a draft's context holds, never more than the draft was trained for."""
    prompt_lookup: bool = True
    """Guess from what the text has said before, beside the draft."""
    siblings: int = Field(default=3, ge=1, le=8)
    """Children that the tree has per node at most."""

    release_keys: str = ""
    """Publishers whose draft releases are taken, with commas between: 64 hex digits of an Ed25519 public key, or a file
    of them. Without any the draft is the verifier's own, and nothing is updated."""
    release_max_bytes: int = Field(default=4 << 30, ge=1)
    """Largest file of a release that is fetched, in bytes."""
    release_stall_s: float = Field(default=20.0, gt=0.0)
    """Seconds for which a server of releases may bring nothing to speak of."""
    release_spread_s: float = Field(default=2.0, ge=0.0)
    """Devices that hear of a release at once ask for it at a random moment within so many
    seconds."""

    log_format: LogFormat = "text"
    """text: lines for people. json: an object a line, for machines."""
    serve_listen: Annotated[str, Flag("--listen")] = "127.0.0.1:8080"
    """HOST:PORT where `outrider-edge serve` listens; beyond loopback it needs a key."""
    serve_api_key: SecretStr | None = None
    """What clients of `outrider-edge serve` must send; without one it serves this machine alone."""
    serve_without_key: bool = False
    """Without a key, let `outrider-edge serve` serve whoever can connect, from any machine and by any host name."""
    serve_cors_origins: Annotated[str, Repeated("--cors-origin")] = ""
    """Origins whose pages may ask `outrider-edge serve`, with commas between; * is any."""
    serve_stop_s: Annotated[float, Flag("--stop-s")] = Field(default=20.0, ge=0.0, le=3600.0)
    """Seconds that requests under way have to end in, once `outrider-edge serve` is told to stop."""
    serve_timeout_s: Annotated[float | None, Flag("--timeout")] = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Seconds that a request to `outrider-edge serve` may take; without any 600, and 120 to the first token."""
    serve_retries: Annotated[int, Flag("--retries")] = Field(default=2, ge=0, le=100)
    """How often a request to `outrider-edge serve` may begin again before its first token."""
    serve_offline: Annotated[Literal["raise", "draft_only"], Flag("--offline")] = "raise"
    """draft_only: where no verifier can be reached the draft writes alone, unverified; raise: the request fails."""
    serve_log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Flag("--log-level")] = "INFO"
    """What is less than this `outrider-edge serve` does not log; its requests are INFO."""

    max_sessions: int = Field(default=64, ge=1)
    """Requests served at once; further ones wait."""
    silence_s: float = Field(default=1.5, gt=0.0)
    """A verifier that says nothing for so many seconds is dead: three heartbeats, which come every 0.5 s whatever its
    engine does. A false alarm costs a prompt read again on another verifier, never a token."""
    offline_after_s: float = Field(default=5.0, ge=0.0)
    """Where `offline` is draft_only: seconds that a session without progress looks for a verifier, before the draft
    goes on alone."""
    resume_budget_s: float = Field(default=30.0, ge=0.0)
    """Seconds that a session without progress looks for a verifier, or for room in the cluster, before it gives up."""
