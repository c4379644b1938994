"""Publish drafts with `outrider-distill`, as a publisher with a key of its own."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from shared_cluster import Cluster
from small_pair import DRAFT, TARGET


class Publisher:
    """A publisher of drafts for one target, and what its commands need; `public_key` is what devices trust."""

    def __init__(self, cluster: Cluster, folder: Path, target: Path = TARGET, draft: Path = DRAFT) -> None:
        self._cluster = cluster
        self.variables = {
            "OUTRIDER_DISTILL_TRAFFIC": str(cluster.folder / "traffic"),
            "OUTRIDER_DISTILL_TARGET": str(target),
            "OUTRIDER_DISTILL_DRAFT": str(draft),
            "OUTRIDER_DISTILL_ARTIFACTS": str(cluster.folder / "state" / "artifacts"),
            "OUTRIDER_DISTILL_KEY": str(folder / "publisher.pem"),
            "OUTRIDER_DISTILL_STATE_DIR": str(folder / "distill"),
            "OUTRIDER_DISTILL_COORDINATOR": cluster.address,
        }
        self.public_key = self.run("key").strip()

    def run(self, *arguments: object, expected: int = 0, timeout_s: float = 480.0, **variables: str) -> str:
        """Run `outrider-distill`, which must end with this exit code, and return what it printed."""
        code, out, err = self._cluster.run(
            "outrider-distill", *arguments, timeout_s=timeout_s, **self.variables | variables
        )
        assert code == expected, f"{arguments}: {code}, {out}{err}"
        return out

    def publish(self, draft: Path) -> str:
        """Publish a draft as the newest release, and return the hash that names it."""
        self.run("publish", draft)
        return hashlib.sha256(draft.read_bytes()).hexdigest()


def shown(cluster: Cluster, release: str) -> dict[str, Any]:
    """Return what an operator sees of a release."""
    [found] = cluster.asked("releases", "show", release)["releases"]
    return {**found, "state": found["state"].replace("_", " ")}


def copy_of(draft: Path, folder: Path) -> Path:
    """Return a copy of a draft that is a release of its own: bytes behind the last tensor give it another hash."""
    copy = folder / f"{secrets.token_hex(4)}.gguf"
    copy.write_bytes(draft.read_bytes() + secrets.token_bytes(32))
    return copy
