"""Make the verifier's sources of nodes by their names in the settings."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.ngram import NgramSource
from cloud_verifier.engine.server_draft.recycling import RecyclingSource

SOURCES = {"ngram": NgramSource, "recycling": RecyclingSource}


def sources_of(names: Sequence[str]) -> list[ServerSource]:
    """Return a source for each name of SOURCES, in their order, which is that of what they cost."""
    return [make() for name, make in SOURCES.items() if name in names]
