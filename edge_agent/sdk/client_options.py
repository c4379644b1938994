"""What a client is made of, worked out of its arguments and settings before anything is asked of anybody."""

from __future__ import annotations

import os
from pathlib import Path

from edge_agent.config import EdgeSettings
from edge_agent.drafting.cpu_budget import CpuBudget
from edge_agent.drafting.pool import DraftOptions
from edge_agent.releases.check import ReleasePolicy
from edge_agent.releases.follower import UpdateOptions
from edge_agent.releases.store import FOLDER
from edge_agent.sdk.timeout import Timeout
from edge_agent.sdk.types import Offline, Options, Request
from edge_agent.target.bundle import AUTO
from edge_agent.validation import refuse, text
from outrider.core.errors import BadRequest
from outrider.wire.channels import ClientTls
from outrider.wire.publishers import trusted_keys


def check_arguments(coordinator: object, verifier: object, target: object, draft: object, cache_dir: object) -> None:
    """Raises BadRequest for one of a wrong type."""
    for field, value in {"coordinator": coordinator, "verifier": verifier, "target": target}.items():
        if value is not None:
            text(field, value)
    for field, value in {"draft": draft, "cache_dir": cache_dir}.items():
        if not isinstance(value, str | os.PathLike | None):
            refuse(field, value, "a text or a path")


def defaults(traffic_class: str, timeout: Timeout | float | None, retries: int, offline: Offline) -> Options:
    """What the client's requests are asked with where they do not say otherwise. Raises BadRequest."""
    options = Options(traffic_class=traffic_class, timeout=timeout, retries=retries, offline=offline)
    Request.of(**options)
    return options


def addresses(settings: EdgeSettings, coordinator: str | None, verifier: str | None) -> tuple[str, str]:
    """(the coordinator's, the verifier's), of which one is empty. Raises BadRequest for none or both."""
    if coordinator is None and verifier is None:
        coordinator, verifier = settings.coordinator, settings.verifier
    # An address given as an argument stands for itself: the environment's other one would contradict it.
    if bool(coordinator) == bool(verifier):
        raise BadRequest("give either coordinator or verifier, as HOST:PORT")
    return coordinator or "", verifier or ""


def checked_key(settings: EdgeSettings, key: object) -> str | None:
    """The API key. Raises BadRequest, without the key, for one that no header can carry."""
    if key is None and settings.api_key is not None:
        key = settings.api_key.get_secret_value()
    if key is None or (isinstance(key, str) and key.isascii() and key.isprintable()):
        return key
    raise BadRequest("api_key must be a text of printable ASCII characters alone", field="api_key")


def draft_options(settings: EdgeSettings) -> DraftOptions:
    """For all drafts of one client."""
    return DraftOptions(
        workers=settings.draft_workers,
        threads=settings.draft_threads,
        cpu_share=settings.cpu_share,
        share=CpuBudget(settings.cpu_share, settings.draft_threads),
        context=settings.draft_context,
        prompt_lookup=settings.prompt_lookup,
    )


def update_plan(
    settings: EdgeSettings, coordinator: str, draft: object, cache: Path, tls: ClientTls | None = None
) -> UpdateOptions | None:
    """None where the draft is not updated: nobody is trusted, nobody would offer any, or it was chosen by hand."""
    keys = trusted_keys(settings.release_keys)
    if not keys or not coordinator or draft != AUTO:
        return None
    return UpdateOptions(
        ReleasePolicy(keys, settings.release_max_bytes),
        cache / FOLDER,
        stall_s=settings.release_stall_s,
        spread_s=settings.release_spread_s,
        ca=tls.ca if tls is not None else None,
    )
