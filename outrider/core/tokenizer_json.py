"""Read the token table of a Hugging Face tokenizer.json as data, without a tokenizer library."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from outrider.core.errors import ModelRefused

MAX_IDS = 4_000_000
"""Many times the largest vocabulary in use; no larger table is built."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_table(tokenizer_json: bytes | str) -> list[bytes]:
    """Return the raw bytes of every id, in order; an added token is its text, an unused id is empty.

    Raises ModelRefused for a file that is no tokenizer.json or of an unknown kind, whatever it holds instead.
    """
    try:
        return _table(json.loads(tokenizer_json))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise ModelRefused(f"this is no tokenizer.json: {type(error).__name__}: {error}") from error


def _table(data: dict[str, Any]) -> list[bytes]:
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    # Unigram lists (piece, score) in order; BPE and WordPiece map piece to id.
    ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    table = [b""] * (1 + max((_checked(i) for i in (*ids.values(), *(token["id"] for token in added))), default=-1))
    raw = _from_byte_level if _uses(data, "ByteLevel") else _from_sentencepiece
    for piece, i in ids.items():
        table[i] = raw(piece)
    for token in added:
        table[token["id"]] = token["content"].encode()
    return table


def _checked(token_id: object) -> int:
    if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
        raise ValueError(f"a token id is {token_id!r:.40}, must be an integer between 0 and {MAX_IDS - 1}")
    return token_id


def _uses(data: dict[str, Any], kind: str) -> bool:
    """Whether the pre-tokenizer or the decoder has a component of this type."""
    return f'"{kind}"' in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])


def _from_byte_level(piece: str) -> bytes:
    alphabet = _byte_alphabet()
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


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
