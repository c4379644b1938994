"""The publishers whose releases this coordinator passes on. Devices decide for themselves whom they believe."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.core.errors import BadRequest
from outrider.wire.ticket import key_id_of

MAX_FILE = 65_536
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def publishers(text: str) -> dict[str, bytes]:
    """Key id -> raw Ed25519 public key, of a list with commas between.

    Each item is 64 hex digits, or a file with one such line for each key or with a PEM public key. Raises BadRequest.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    raw = [key for item in items for key in ([item] if _HEX.fullmatch(item) else _lines(Path(item).expanduser()))]
    return {key_id_of(key): key for key in map(bytes.fromhex, raw)}


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE)
    except OSError as error:
        raise BadRequest(
            f"release_keys names {str(path)[:200]!r}, which is neither 64 hex digits nor a file that can be read:"
            f" {error.strerror}",
            field="release_keys",
        ) from error
    if data.lstrip().startswith(b"-----BEGIN"):
        return [_of_pem(data, path)]
    lines = [line.partition("#")[0].strip() for line in data.decode(errors="replace").splitlines()]
    keys = [line for line in lines if line]
    if not keys or not all(map(_HEX.fullmatch, keys)):
        raise BadRequest(
            f"{path} holds no public keys: give 64 hex digits on each line, or one PEM public key", field="release_keys"
        )
    return keys


def _of_pem(data: bytes, path: Path) -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(data)
    except ValueError as error:
        raise BadRequest(
            f"{path} is no PEM public key; the private one stays with its publisher", field="release_keys"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadRequest(f"{path} is a {type(key).__name__}, must be Ed25519", field="release_keys")
    return key.public_bytes_raw().hex()
