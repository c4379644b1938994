"""Manifests of draft releases: what a publisher says of a draft, signed so that a device needs nobody else's word.

A release is its file: it is named by the file's hash. Verification touches nothing but the manifest's bytes; whoever
fetches the file compares its hash before anything parses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from outrider.artifacts.hashing import PREFIX, digest_of
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire.ticket import MAX_KEY_ID, MAX_LABEL, Signer, public_key
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_BYTES = 16_384
"""Of a signed manifest."""
MAX_FILE = 64 << 30
"""Bytes of a draft."""
MAX_URLS = 8
MAX_URL = 1_024
MAX_METRICS = 64
MAX_METRIC = 128
"""Letters of a metric's name: what is measured, and of which traffic class."""
LATEST_UNIX = 253_402_300_799.0
"""The end of the year 9999: what is later is no date."""
DOMAIN = b"outrider draft release v1\0"
"""What the signed bytes begin with: a signature of something else never passes for a release's."""
_QUANTIZATION = re.compile(r"[A-Z0-9_]{1,16}")


@dataclass(frozen=True)
class Manifest:
    """One release of a draft."""

    version: int
    """Of this target's drafts, from 1 on: a device that found one healthy takes no older one."""
    weights_hash: str
    """Of the target that it drafts for, as is the next."""
    tokenizer_hash: str
    artifact: str
    """"sha256:<hex>" of the GGUF file; the release's name."""
    size: int
    """Bytes of the file."""
    quantization: str
    parent: str = ""
    """Release that it was trained from; empty for a first one."""
    urls: tuple[str, ...] = ()
    """Where the file is; those without a scheme are relative to what the coordinator serves."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the gate measured."""
    created_unix: float = 0.0
    """Seconds."""

    @property
    def digest(self) -> str:
        """Hex digits of the file's hash."""
        return self.artifact.removeprefix(PREFIX)


def sign(manifest: Manifest, signer: Signer) -> bytes:
    """A SignedManifest, serialised. Raises BadRequest for a manifest that nobody would take."""
    _check(manifest)
    body = _to_proto(manifest).SerializeToString(deterministic=True)
    signed = pb.SignedManifest(manifest=body, signature=signer.signature(DOMAIN + body), key_id=signer.key_id)
    raw = signed.SerializeToString()
    if len(raw) > MAX_BYTES:
        raise BadRequest.bound("manifest", f"{len(raw)} bytes", f"at most {MAX_BYTES}")
    return raw


def verify(raw: bytes, public_keys: Mapping[str, bytes]) -> Manifest:
    """What a genuine manifest says. public_keys: key id -> raw key of publishers that are believed.

    Raises ModelRefused for one that is not signed by any of them or was altered, BadRequest for one out of bounds.
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
    """What a manifest says, whoever wrote it: for those who only show or pass it on."""
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
    manifest = Manifest(
        version=proto.version,
        weights_hash=proto.weights_hash,
        tokenizer_hash=proto.tokenizer_hash,
        artifact=proto.artifact,
        size=proto.size,
        quantization=proto.quantization,
        parent=proto.parent,
        urls=tuple(proto.urls),
        metrics=dict(proto.metrics),
        created_unix=proto.created_unix,
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raises BadRequest for the first thing that is out of bounds."""
    if manifest.version < 1:
        raise BadRequest.bound("manifest.version", manifest.version, "at least 1")
    if not 0 < manifest.size <= MAX_FILE:
        raise BadRequest.bound("manifest.size", manifest.size, f"between 1 and {MAX_FILE} bytes")
    for name, value in (("artifact", manifest.artifact), ("parent", manifest.parent)):
        if value or name == "artifact":
            digest_of(value, f"manifest.{name}")
    for name, value in (("weights_hash", manifest.weights_hash), ("tokenizer_hash", manifest.tokenizer_hash)):
        if not 0 < len(value) <= MAX_LABEL or not value.isprintable():
            raise BadRequest.bound(f"manifest.{name}", repr(value)[:100], f"1 to {MAX_LABEL} printable letters")
    if not _QUANTIZATION.fullmatch(manifest.quantization):
        raise BadRequest.bound("manifest.quantization", repr(manifest.quantization)[:100], 'like "Q8_0"')
    if len(manifest.urls) > MAX_URLS or any(len(url) > MAX_URL or not url.isprintable() for url in manifest.urls):
        raise BadRequest.bound("manifest.urls", len(manifest.urls), f"at most {MAX_URLS}, of {MAX_URL} letters each")
    if len(manifest.metrics) > MAX_METRICS or not all(map(math.isfinite, manifest.metrics.values())):
        raise BadRequest.bound("manifest.metrics", len(manifest.metrics), f"at most {MAX_METRICS} finite numbers")
    for name in manifest.metrics:
        if not 0 < len(name) <= MAX_METRIC or not name.isprintable():
            raise BadRequest.bound("manifest.metrics: a name", repr(name)[:100], f"1 to {MAX_METRIC} printable letters")
    if not 0.0 <= manifest.created_unix <= LATEST_UNIX:
        raise BadRequest.bound("manifest.created_unix", manifest.created_unix, f"between 0 and {LATEST_UNIX:.0f}")


def _to_proto(manifest: Manifest) -> pb.Manifest:
    return pb.Manifest(
        version=manifest.version,
        parent=manifest.parent,
        weights_hash=manifest.weights_hash,
        tokenizer_hash=manifest.tokenizer_hash,
        artifact=manifest.artifact,
        size=manifest.size,
        quantization=manifest.quantization,
        urls=manifest.urls,
        metrics=dict(manifest.metrics),
        created_unix=manifest.created_unix,
    )
