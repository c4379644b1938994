"""Compare token tables: do draft and target mean the same text by the same ids?

A token table is the raw bytes of every id, in order; a control or added token is its text, an unused id is empty.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from outrider.core.errors import VocabularyMismatch

_SHOWN = 3


def compare_token_tables(draft: Sequence[bytes], target: Sequence[bytes]) -> int:
    """Check that two tables agree on the ids that both have, and return their number.

    Widths may differ, since models pad their tables: ids at or beyond the number returned must never be drafted.
    Raises VocabularyMismatch, naming the first ids that differ and how many do.
    """
    shared = min(len(draft), len(target))
    if shared == 0:
        raise VocabularyMismatch(_counts(draft, target) + "; neither may be empty", field="token_table")
    differing = [i for i in range(shared) if draft[i] != target[i]]
    if not differing:
        return shared
    shown = ", ".join(f"id {i}: {draft[i]!r} and {target[i]!r}" for i in differing[:_SHOWN])
    raise VocabularyMismatch(
        f"draft and target differ in {len(differing)} of the {shared} ids that both have ({shown}); "
        f"{_counts(draft, target)}; use a draft made for this target's tokenizer",
        field="token_table",
    )


def vocabulary_hash(table: Sequence[bytes]) -> bytes:
    """Return the SHA-256 of all pieces, each after its length (4 bytes, little-endian): equal only for equal tables."""
    digest = hashlib.sha256()
    for piece in table:
        digest.update(struct.pack("<I", len(piece)))
        digest.update(piece)
    return digest.digest()


def _counts(draft: Sequence[bytes], target: Sequence[bytes]) -> str:
    return f"the draft has {len(draft)} ids, the target {len(target)}"
