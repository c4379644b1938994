"""Define the settings of a device, built once where the process starts and passed in.

Arguments override OUTRIDER_EDGE_* in the environment, which overrides the table [edge] of a file (`outrider.settings`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.artifacts.store import cache_folder
from outrider.settings import Address, Flag, Repeated

SYSTEM_CA = Path("system")
"""The value of `tls_ca` that trusts the authorities that gRPC ships with."""


class EdgeSettings(BaseSettings):
    """Configures one client. The text below each field is the one in `--help` and docs/reference/settings.md."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_EDGE_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ("coordinator", "verifier")
    """Settings of which only one counts: an address makes the other one of a lower source void."""

    coordinator: Address = ""
    """HOST:PORT of the coordinator, which places sessions on verifiers. If neither it nor `verifier` is set,
    `outrider-edge` asks 127.0.0.1:7700."""
    verifier: Address = ""
    """HOST:PORT of one verifier, to use without a coordinator."""
    target: str = ""
    """Name of the target; empty if the cluster serves only one."""
    draft: Annotated[str, Repeated("--draft")] = "auto"
    """auto takes the draft that the verifier offers, ngram proposes tokens from the text alone, none drafts
    nothing; anything else is the path of a GGUF file, or for `outrider-edge` its id on the Hugging Face hub, as
    org/name@revision:file.gguf. Several files, separated by commas with the best one first, propose tokens together."""
    api_key: SecretStr | None = None
    """The tenant's API key, for a coordinator that asks for one."""
    tls_ca: Path | None = None
    """PEM file of the authorities to trust, or system for those that gRPC ships with; setting it means TLS to
    `verifier` and `coordinator`."""
    tls_cert: Path | None = None
    """PEM certificate chain to show to a cluster that asks its devices for one; setting it means TLS."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    insecure: bool = False
    """Allow plain text beyond loopback."""
    cache_dir: Path = Field(default_factory=cache_folder)
    """Folder for what was fetched: tokenizers, templates, drafts. $XDG_CACHE_HOME moves the default."""

    max_sessions: int = Field(default=64, ge=1)
    """Requests that run at the same time; further ones wait."""
    draft_workers: int = Field(default=2, ge=1, le=64)
    """Sessions that may draft with the model at the same time; further ones draft by n-grams alone, without waiting."""
    draft_cpus: int = Field(default=1, ge=1, le=256)
    """Threads on which a decode runs; a large draft needs several, half of the cores to begin with. Keep it below the
    number of cores, since the threads spin."""

    release_keys: str = ""
    """Publishers to trust with draft releases, separated by commas: 64 hex digits of an Ed25519
    public key, or a file of them. With them the draft that a verifier offers, which nobody has signed, is not
    loaded: n-grams draft until there is a signed release. Without any, the draft is the verifier's own and is not
    updated."""

    serve_listen: Annotated[Address, Flag("--listen")] = "127.0.0.1:8080"
    """HOST:PORT at which `outrider-edge serve` listens; beyond loopback it needs a key."""
    serve_api_key: SecretStr | None = None
    """Key that clients of `outrider-edge serve` must send, also pages of other origins; without one it serves this
    machine alone."""
    serve_without_key: bool = False
    """Without a key, let `outrider-edge serve` serve whoever can connect, from any machine and by any host name."""
    serve_answer_format: Annotated[
        Literal[
            "auto", "hermes", "qwen3-coder", "glm", "minimax", "gemma", "llama3", "mistral", "deepseek", "harmony",
            "json", "none",
        ],
        Flag("--answer-format"),
    ] = "auto"  # fmt: skip
    """How the target writes tool calls and reasoning. auto tells it from the chat template, none takes all of its text
    as content."""
    serve_offline: Annotated[Literal["raise", "draft_only"], Flag("--offline")] = "raise"
    """While no verifier can be reached: draft_only lets the draft write alone, unverified; raise fails the request."""
