"""Check a release's signed manifest before a byte of its file is requested."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from google.protobuf.message import DecodeError

from edge_agent.releases.state import ReleaseState
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest
from outrider.wire.ticket import Target
from outrider.wire.v1 import coordinator_pb2 as pb

RefusalKind = Literal[
    "signature", "manifest", "target", "tokenizer", "version", "size", "remembered",  # by its manifest
    "unreachable", "truncated", "too long", "altered", "no room",  # by its file
    "unusable", "vocabulary", "crashed",  # by what it did
]  # fmt: skip
"""Why a release was refused."""

MAX_BYTES = 4 << 30
"""Bytes of the largest file that is fetched."""
TRANSIENT: frozenset[RefusalKind] = frozenset({"unreachable", "truncated", "too long", "altered", "no room"})
"""Reasons that may be gone at the next try."""


class ReleaseRefused(ModelRefused):
    """This device does not use a release; sessions go on with the draft that they have."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def manifest_digest(signed: bytes) -> str:
    """Return the SHA-256 of a manifest's signed part, by which it is remembered: anyone can change the rest."""
    return hashlib.sha256(_parsed(signed).manifest or signed).hexdigest()


def signing_key_id(signed: bytes) -> str:
    """Return the id of the key that a genuine manifest is signed with."""
    return _parsed(signed).key_id


def _parsed(signed: bytes) -> pb.SignedManifest:
    """Return the parsed manifest; an empty one where it cannot be parsed."""
    try:
        return pb.SignedManifest.FromString(signed)
    except DecodeError:
        return pb.SignedManifest()


def check(
    signed: bytes,
    keys: Mapping[str, bytes],
    target: Target,
    state: ReleaseState,
) -> Manifest:
    """Return the manifest of a release that may be fetched. Raises ReleaseRefused.

    keys: id -> raw public key of the trusted publishers.
    """
    try:
        manifest = manifests.verify(signed, keys)
    except ModelRefused as error:
        raise ReleaseRefused("signature", str(error)) from error
    except BadRequest as error:
        raise ReleaseRefused("manifest", str(error)) from error
    release = f"release {manifest.digest[:12]} (version {manifest.version})"
    if manifest.weights_hash != target.weights_hash:
        raise ReleaseRefused(
            "target",
            f"{release} drafts for a target with the weights {manifest.weights_hash[:24]}, this one's are "
            f"{target.weights_hash[:24]}; publish it for that target, or train one for this",
        )
    if manifest.tokenizer_hash != target.tokenizer_hash:
        raise ReleaseRefused(
            "tokenizer",
            f"{release} was made for the tokenizer {manifest.tokenizer_hash[:24]}, the target's is "
            f"{target.tokenizer_hash[:24]}; export it with the target's own tokenizer",
        )
    if manifest.version < state.floor:
        raise ReleaseRefused(
            "version",
            f"{release} is older than version {state.floor}, which this device has loaded as stable; "
            "to go back to an old draft publish its file as a new version",
        )
    if manifest.size > MAX_BYTES:
        raise ReleaseRefused(
            "size",
            f"{release} has {manifest.size} bytes, this device takes at most {MAX_BYTES}; quantise it further",
        )
    known = state.refusal(manifest_digest(signed))
    if known is not None:
        raise ReleaseRefused(
            "remembered",
            f"{release} was refused here before: {known.reason}; `outrider-edge releases forget` gives it another try",
        )
    return manifest
