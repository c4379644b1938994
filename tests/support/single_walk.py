"""Walk down one session's batch alone, by a function that says the target's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.verification import TreeBatch, Verified, Walk


def verify(
    batch: TreeBatch, target_token: Callable[[int, Sequence[int]], int], ends: Callable[[int, int], bool]
) -> Verified:
    """Return what a step commits.

    target_token(row, path): returns the target's token after that row, or the child that a lossy rule accepts there;
    `path` is the tokens accepted in this step. ends: as for Walk.
    """
    walk = Walk(batch, ends)
    while walk.row is not None:
        walk.take(target_token(walk.row, walk.tokens))
    return walk.verified
