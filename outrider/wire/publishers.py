"""Read the keys of the publishers whose draft releases are trusted, as a setting names them."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.core.errors import BadRequest
from outrider.wire.ticket import key_id_of

_MOST = 16
_MAX_FILE = 65_536
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def trusted_keys(text: str) -> dict[str, bytes]:
    """Return key id -> raw Ed25519 public key for a list with commas between.

    Each item is 64 hex digits, or a file with such lines or with a PEM public key. Raises BadRequest for anything else.
    """
    keys: dict[str, bytes] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        for raw in [bytes.fromhex(item)] if _HEX.fullmatch(item) else _of_file(Path(item).expanduser()):
            keys[key_id_of(raw)] = raw
    if len(keys) > _MOST:
        raise BadRequest.bound("release_keys", f"{len(keys)} keys", f"at most {_MOST}")
    return keys


def _of_file(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE)
    except OSError as error:
        raise BadRequest(
            f"release_keys names {str(path)[:200]!r}, which is neither 64 hex digits nor a file that can be read: "
            f"{error.strerror or error}",
            field="release_keys",
        ) from error
    if data.lstrip().startswith(b"-----BEGIN"):
        return [_of_pem(data, path)]
    lines = [line.split("#")[0].strip() for line in data.decode(errors="replace").splitlines()]
    keys = [line for line in lines if line]
    if not keys or not all(map(_HEX.fullmatch, keys)):
        raise BadRequest(
            f"{path} holds no public keys: each line must be 64 hex digits, or all of it one PEM public key",
            field="release_keys",
        )
    return [bytes.fromhex(key) for key in keys]


def _of_pem(data: bytes, path: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(data)
    except ValueError as error:
        raise BadRequest(
            f"{path} is no PEM public key: {error}; the private one stays with its publisher", field="release_keys"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadRequest(f"{path} is a {type(key).__name__}, must be Ed25519", field="release_keys")
    return key.public_bytes_raw()
