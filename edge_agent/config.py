"""A device's settings, built once and passed in. Arguments override OUTRIDER_EDGE_* in the environment."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.telemetry.logs import LogFormat


def default_cache() -> Path:
    """Where XDG wants caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


class EdgeSettings(BaseSettings):
    """Every field says its unit."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_EDGE_", frozen=True, extra="ignore")

    coordinator: str = ""
    """host:port; it names the verifier."""
    verifier: str = ""
    """host:port of one verifier, instead of a coordinator."""
    target: str = ""
    """Name of the target; empty where the cluster serves just one."""
    draft: str = "auto"
    """"auto" takes the draft that the verifier offers, "lookup" guesses from the text alone, "none" is plain cloud
    streaming; anything else is the path of a GGUF file."""
    api_key: SecretStr | None = None
    tls_ca: Path | None = None
    """PEM file of the authorities to trust; set it to speak TLS to `verifier` and `coordinator`."""
    tls: bool = False
    """Speak TLS with the authorities that gRPC ships with."""
    insecure: bool = False
    """Allow plain text beyond loopback."""
    cache_dir: Path = Field(default_factory=default_cache)

    draft_workers: int = Field(default=2, ge=1, le=64)
    """Sessions that may draft at once; further ones run without a draft rather than wait."""
    draft_threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of a decode; below the number of cores, since the threads spin."""
    cpu_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Of one core's time, what drafting may take; 1 is no cap. What the verifier waits for goes first."""
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
    """Of a release's file."""
    release_stall_s: float = Field(default=20.0, gt=0.0)
    """How long a server may bring nothing to speak of."""
    release_spread_s: float = Field(default=2.0, ge=0.0)
    """Devices that hear of a release at once ask for it at a random moment within this time."""

    log_format: LogFormat = "text"
    """json: an object a line, for machines."""
    serve_listen: str = "127.0.0.1:8080"
    """Where `outrider-edge serve` listens."""
    serve_api_key: SecretStr | None = None
    """What its clients must send; without one it serves this machine alone."""
    serve_cors_origins: str = ""
    """Origins whose pages may ask it, with commas between; "*" is any."""

    max_sessions: int = Field(default=64, ge=1)
    """Requests served at once; further ones wait."""
    silence_s: float = Field(default=1.5, gt=0.0)
    """A verifier that says nothing for so long is dead: three heartbeats, which come every 0.5 s whatever its engine
    does. A false alarm costs a prompt read again on another verifier, never a token."""
    offline_after_s: float = Field(default=5.0, ge=0.0)
    """With `offline="draft_only"`: how long a session without progress looks for a verifier, before the draft goes on
    alone."""
    resume_budget_s: float = Field(default=30.0, ge=0.0)
    """How long a session without progress looks for a verifier, or for room in the cluster, before it gives up."""
