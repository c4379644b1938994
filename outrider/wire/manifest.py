"""Sign and verify manifests of releases, and read the keys of the publishers that are trusted.

A device trusts a draft's publisher alone. A release is its file, named by the file's hash. Verification reads nothing
but the manifest's bytes; a caller that fetches the file compares its hash before anything parses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from outrider.artifacts.store import PREFIX, digest_of
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire.bounds import text
from outrider.wire.ticket import MAX_KEY_ID, MAX_TARGET_TEXT, Signer, is_signed, key_id_of
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_BYTES = 16_384
"""Bytes of a signed manifest."""
MAX_FILE = 64 << 30
"""Bytes of a draft."""
MAX_URLS = 8
MAX_URL = 1_024
MAX_METRICS = 64
MAX_METRIC = 128
"""Characters of a metric's name, which says what is measured and of which traffic class."""
LATEST_UNIX = 253_402_300_799.0
"""The end of the year 9999; no date is later."""
DOMAIN = b"outrider draft release v1\0"
"""The beginning of the signed bytes, so that a signature of something else never passes for a release's."""
_MAX_KEYS = 16
_MAX_KEY_FILE = 65_536
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_QUANTIZATION = re.compile(r"[A-Z0-9_]{1,16}")


def name_of(manifest: pb.Manifest) -> str:
    """Return the release's name: the hex digits of its file's hash."""
    return manifest.artifact.removeprefix(PREFIX)


def state_of(release: pb.Release) -> str:
    """Return the name of a release's state, such as rolled_back; "unknown" for one of a newer coordinator."""
    known = release.state in pb.ReleaseState.values()
    return pb.ReleaseState.Name(release.state).removeprefix("RELEASE_STATE_").lower() if known else "unknown"


def sign(manifest: pb.Manifest, signer: Signer) -> bytes:
    """Return a serialised SignedManifest. Raises BadRequest for a manifest that `verify` would refuse."""
    _check(manifest)
    body = manifest.SerializeToString(deterministic=True)
    signed = pb.SignedManifest(manifest=body, signature=signer.signature(DOMAIN + body), key_id=signer.key_id)
    raw = signed.SerializeToString()
    if len(raw) > MAX_BYTES:
        raise BadRequest.bound("manifest", f"{len(raw)} bytes", f"at most {MAX_BYTES}")
    return raw


def verify(raw: bytes, public_keys: Mapping[str, bytes]) -> pb.Manifest:
    """Return a genuine manifest. public_keys: key id -> raw key of the trusted publishers.

    Raises ModelRefused if none of them has signed it or it was altered, BadRequest if it is out of bounds.
    """
    signed = _parse(raw)
    key = public_keys.get(signed.key_id)
    if key is None:
        raise ModelRefused(
            f"the release is signed with key {signed.key_id!r}, which is not trusted here; trusted are "
            f"{', '.join(sorted(public_keys)) or 'none'}: give the publisher's public key, or fetch a release of theirs"
        )
    if not is_signed(DOMAIN + signed.manifest, signed.signature, key):
        raise ModelRefused("the release's signature does not match its manifest; it was altered or forged")
    return _read(signed)


def read_unverified(raw: bytes) -> pb.Manifest:
    """Return a manifest without checking its signature, to show it or pass it on. Raises BadRequest."""
    return _read(_parse(raw))


def trusted_keys(text: str) -> dict[str, bytes]:
    """Return key id -> raw Ed25519 public key for a list with commas between.

    Each item is 64 hex digits, or a file with such lines or with a PEM public key. Raises BadRequest for anything else.
    """
    keys: dict[str, bytes] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        for raw in [bytes.fromhex(item)] if _HEX_KEY.fullmatch(item) else _keys_of_file(Path(item).expanduser()):
            keys[key_id_of(raw)] = raw
    if len(keys) > _MAX_KEYS:
        raise BadRequest.bound("release_keys", f"{len(keys)} keys", f"at most {_MAX_KEYS}")
    return keys


def _keys_of_file(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_KEY_FILE)
    except OSError as error:
        raise BadRequest(
            f"release_keys names {str(path)[:200]!r}, which is neither 64 hex digits nor a file that can be read: "
            f"{error.strerror or error}",
            field="release_keys",
        ) from error
    if data.lstrip().startswith(b"-----BEGIN"):
        return [_key_of_pem(data, path)]
    lines = [line.split("#")[0].strip() for line in data.decode(errors="replace").splitlines()]
    keys = [line for line in lines if line]
    if not keys or not all(map(_HEX_KEY.fullmatch, keys)):
        raise BadRequest(
            f"{path} holds no public keys: each line must be 64 hex digits, or all of it one PEM public key",
            field="release_keys",
        )
    return [bytes.fromhex(key) for key in keys]


def _key_of_pem(data: bytes, path: Path) -> bytes:
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


def _parse(raw: bytes) -> pb.SignedManifest:
    if not 0 < len(raw) <= MAX_BYTES:
        raise BadRequest.bound("manifest", f"{len(raw)} bytes", f"between 1 and {MAX_BYTES}")
    try:
        signed = pb.SignedManifest.FromString(raw)
    except DecodeError as error:
        raise BadRequest("the manifest is no SignedManifest; pass on the publisher's bytes unchanged") from error
    if len(signed.key_id) > MAX_KEY_ID or not signed.key_id.isprintable():
        raise BadRequest.bound("manifest.key_id", repr(signed.key_id)[:100], f"at most {MAX_KEY_ID} printable letters")
    return signed


def _read(signed: pb.SignedManifest) -> pb.Manifest:
    try:
        manifest = pb.Manifest.FromString(signed.manifest)
    except DecodeError as error:
        raise BadRequest("what is signed is no Manifest; is its publisher much newer?") from error
    _check(manifest)
    return manifest


def _check(manifest: pb.Manifest) -> None:
    """Raise BadRequest for the first value that is out of bounds."""
    if manifest.version < 1:
        raise BadRequest.bound("manifest.version", manifest.version, "at least 1")
    if not 0 < manifest.size <= MAX_FILE:
        raise BadRequest.bound("manifest.size", manifest.size, f"between 1 and {MAX_FILE} bytes")
    digest_of(manifest.artifact, "manifest.artifact")
    if manifest.parent:
        digest_of(manifest.parent, "manifest.parent")
    text("manifest.weights_hash", manifest.weights_hash, 1, MAX_TARGET_TEXT)
    text("manifest.tokenizer_hash", manifest.tokenizer_hash, 1, MAX_TARGET_TEXT)
    if not _QUANTIZATION.fullmatch(manifest.quantization):
        raise BadRequest.bound("manifest.quantization", repr(manifest.quantization)[:100], 'like "Q8_0"')
    if len(manifest.urls) > MAX_URLS or any(len(url) > MAX_URL or not url.isprintable() for url in manifest.urls):
        raise BadRequest.bound("manifest.urls", len(manifest.urls), f"at most {MAX_URLS}, of {MAX_URL} letters each")
    if len(manifest.metrics) > MAX_METRICS or not all(map(math.isfinite, manifest.metrics.values())):
        raise BadRequest.bound("manifest.metrics", len(manifest.metrics), f"at most {MAX_METRICS} finite numbers")
    for name in manifest.metrics:
        text("manifest.metrics: a name", name, 1, MAX_METRIC)
    if not 0.0 <= manifest.created_unix <= LATEST_UNIX:
        raise BadRequest.bound("manifest.created_unix", manifest.created_unix, f"between 0 and {LATEST_UNIX:.0f}")
