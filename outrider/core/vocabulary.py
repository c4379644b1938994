"""Read the token table of a tokenizer.json as data, and compare it with another model's.

A token table is the raw bytes of every id, in order, as the tokenizer decodes it; a special token is its text, an
unused id is empty.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import struct
from collections.abc import Collection, Sequence
from typing import Any

from outrider.core.errors import ModelRefused, VocabularyMismatch

log = logging.getLogger(__name__)

MAX_IDS = 4_000_000
"""Many times the largest vocabulary in use; no larger table is built."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHOWN = 3
"""Ids that differ which a message names."""


def token_table(tokenizer_json: bytes | str) -> list[bytes]:
    """Return the raw bytes of every id, in order; a special token is its text, an unused id is empty.

    Raises ModelRefused for a file that is no tokenizer.json or of an unknown kind, whatever it holds instead.
    """
    try:
        return _table(json.loads(tokenizer_json))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise ModelRefused(f"this is no tokenizer.json: {type(error).__name__}: {error}") from error


def special_ids(tokenizer_json: bytes | str) -> frozenset[int]:
    """Return the ids of all added tokens, special or not, in a file that `token_table` has read."""
    return frozenset(token["id"] for token in json.loads(tokenizer_json).get("added_tokens") or ())


def compare_token_tables(
    draft: Sequence[bytes], target: Sequence[bytes], special: Collection[int] = (), name: str = "the draft"
) -> tuple[int, list[int]]:
    """Check that two tables agree on the ids that both have.

    Return their number, and the ids below it that name different special tokens. Neither these nor ids at or beyond the
    number, since models pad their tables, may ever be drafted. special: ids of control and added tokens, of either
    table. name: of the draft, for the log. Raises VocabularyMismatch, naming the first ids that differ and how many do.
    """
    shared = min(len(draft), len(target))
    counts = f"the draft has {len(draft)} ids, the target {len(target)}"
    if shared == 0:
        raise VocabularyMismatch(f"{counts}; neither may be empty", field="token_table")
    unlike = [i for i in range(shared) if draft[i] != target[i]]
    # An unused id is as good as a special token: no text of the one model holds it.
    plain = [i for i in unlike if i not in special and draft[i] and target[i]]
    named = plain or unlike
    shown = ", ".join(f"id {i}: {draft[i]!r} and {target[i]!r}" for i in named[:_SHOWN])
    if plain or len(unlike) == shared:
        raise VocabularyMismatch(
            f"draft and target differ in {len(named)} of the {shared} ids that both have ({shown}), beside special"
            f" tokens; {counts}; use a draft made for this target's tokenizer",
            field="token_table",
        )
    if unlike:
        log.info(
            "%s and the target differ in special tokens, which are never drafted: %d (%s)", name, len(unlike), shown
        )
    return shared, unlike


def vocabulary_hash(table: Sequence[bytes]) -> bytes:
    """Return the SHA-256 of all pieces, each after its length (4 bytes, little-endian): equal only for equal tables."""
    digest = hashlib.sha256()
    for piece in table:
        digest.update(struct.pack("<I", len(piece)))
        digest.update(piece)
    return digest.digest()


def _table(data: dict[str, Any]) -> list[bytes]:
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    # Unigram lists (piece, score) in order; BPE and WordPiece map piece to id.
    ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    table = [b""] * (1 + max((_checked(i) for i in (*ids.values(), *(token["id"] for token in added))), default=-1))
    decoder = json.dumps(data.get("decoder"))
    byte_level = '"ByteLevel"' in decoder or '"ByteLevel"' in json.dumps(data.get("pre_tokenizer"))
    for piece, i in ids.items():
        table[i] = raw_bytes(piece, byte_level=byte_level)
    decoded = byte_level or '"Metaspace"' in decoder or '"Replace"' in decoder
    for token in added:
        text, special = token["content"], token.get("special", False)
        table[token["id"]] = raw_bytes(text, byte_level=byte_level) if decoded and not special else text.encode()
    return table


def raw_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Return the bytes that a piece of a byte-level or a SentencePiece vocabulary stands for in a text."""
    return _from_byte_level(piece) if byte_level else _from_sentencepiece(piece)


def _checked(token_id: object) -> int:
    if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
        raise ValueError(f"a token id is {token_id!r:.40}, must be an integer between 0 and {MAX_IDS - 1}")
    return token_id


def _from_byte_level(piece: str) -> bytes:
    """Read each character as a byte; a piece with one that stands for none is plain text, as `tokenizers` reads it."""
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()


def _from_sentencepiece(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte: printable Latin-1 is itself, the rest follows 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
