"""Make the verifier's sources of nodes by their names in the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.ngram import NgramSource, no_store
from cloud_verifier.engine.server_draft.recycling import RecyclingSource
from cloud_verifier.engine.server_draft.tenant_stores import TenantStores


def sources_of(names: Sequence[str], stores: TenantStores | None = None) -> list[ServerSource]:
    """Return a source for each name of `ngram` and `recycling`, in the order of what they cost.

    stores: of tenants, for `ngram`.
    """
    made: dict[str, Callable[[], ServerSource]] = {
        "ngram": lambda: NgramSource(stores.of if stores is not None else no_store),
        "recycling": RecyclingSource,
    }
    return [make() for name, make in made.items() if name in names]
