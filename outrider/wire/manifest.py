"""Sign and verify manifests of draft releases, which let a device trust a draft's publisher alone.

A release is its file and is named by the file's hash. Verification reads nothing but the manifest's bytes; a caller
that fetches the file compares its hash before anything parses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from google.protobuf.message import DecodeError

from outrider.artifacts.hashing import PREFIX, digest_of
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire.bounds import text
from outrider.wire.ticket import MAX_KEY_ID, MAX_LABEL, Signer, public_key
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
_QUANTIZATION = re.compile(r"[A-Z0-9_]{1,16}")


@dataclass(frozen=True)
class Manifest:
    """A release of a draft, as its publisher describes it."""

    version: int
    """From 1 on, for each target: a device that found a version healthy takes no older one."""
    weights_hash: str
    """Hash of the weights of the target that the release drafts for."""
    tokenizer_hash: str
    """Hash of that target's token table."""
    artifact: str
    """"sha256:<hex>" of the GGUF file; the release's name."""
    size: int
    """Bytes of the file."""
    quantization: str
    parent: str = ""
    """The release that it was trained from; empty for a first one."""
    urls: tuple[str, ...] = ()
    """Addresses of the file; those without a scheme are relative to the coordinator's."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the gate."""
    created_unix: float = 0.0
    """Seconds."""

    @property
    def digest(self) -> str:
        """The hex digits of `artifact`, which name the file."""
        return self.artifact.removeprefix(PREFIX)


def sign(manifest: Manifest, signer: Signer) -> bytes:
    """Return a serialised SignedManifest. Raises BadRequest for a manifest that `verify` would refuse."""
    _check(manifest)
    body = pb.Manifest(**vars(manifest)).SerializeToString(deterministic=True)
    signed = pb.SignedManifest(manifest=body, signature=signer.signature(DOMAIN + body), key_id=signer.key_id)
    raw = signed.SerializeToString()
    if len(raw) > MAX_BYTES:
        raise BadRequest.bound("manifest", f"{len(raw)} bytes", f"at most {MAX_BYTES}")
    return raw


def verify(raw: bytes, public_keys: Mapping[str, bytes]) -> Manifest:
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
    from cryptography.exceptions import InvalidSignature

    try:
        public_key(key).verify(signed.signature, DOMAIN + signed.manifest)
    except InvalidSignature as error:
        raise ModelRefused("the release's signature does not match its manifest; it was altered or forged") from error
    return _read(signed)


def read_unverified(raw: bytes) -> Manifest:
    """Return a manifest without checking its signature, to show it or pass it on. Raises BadRequest."""
    return _read(_parse(raw))


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


def _read(signed: pb.SignedManifest) -> Manifest:
    try:
        proto = pb.Manifest.FromString(signed.manifest)
    except DecodeError as error:
        raise BadRequest("what is signed is no Manifest; is its publisher much newer?") from error
    same = {field.name: getattr(proto, field.name) for field in fields(Manifest)}
    manifest = Manifest(**(same | {"urls": tuple(proto.urls), "metrics": dict(proto.metrics)}))
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise BadRequest for the first value that is out of bounds."""
    if manifest.version < 1:
        raise BadRequest.bound("manifest.version", manifest.version, "at least 1")
    if not 0 < manifest.size <= MAX_FILE:
        raise BadRequest.bound("manifest.size", manifest.size, f"between 1 and {MAX_FILE} bytes")
    for name, value in (("artifact", manifest.artifact), ("parent", manifest.parent)):
        if value or name == "artifact":
            digest_of(value, f"manifest.{name}")
    for name, value in (("weights_hash", manifest.weights_hash), ("tokenizer_hash", manifest.tokenizer_hash)):
        text(f"manifest.{name}", value, 1, MAX_LABEL)
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
