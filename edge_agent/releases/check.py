"""What must hold of a release before a byte of its file is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from edge_agent.releases.state import ReleaseState
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest
from outrider.wire.ticket import Target
from outrider.wire.v1 import coordinator_pb2 as pb

Kind = Literal[
    "signature", "manifest", "target", "tokenizer", "version", "size", "remembered",  # by its manifest
    "unreachable", "truncated", "too long", "altered", "no room",  # by its file
    "unusable", "vocabulary", "crashed", "failed", "worse",  # by what it did
]  # fmt: skip
"""What a release was refused for."""

PASSING: frozenset[Kind] = frozenset({"unreachable", "truncated", "too long", "altered", "no room"})
"""What may be otherwise at the next try."""


class ReleaseRefused(ModelRefused):
    """A release that this device does not use; the session goes on with the draft that it has."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ReleasePolicy:
    """What this device takes."""

    keys: Mapping[str, bytes]
    """Key id -> raw public key of the publishers that are believed."""
    max_bytes: int
    """Of a draft's file."""


def name_of(signed: bytes) -> str:
    """What a manifest is remembered by: the hash of the bytes that are signed. Anybody can change those around them."""
    return hashlib.sha256(_parsed(signed).manifest or signed).hexdigest()


def key_of(signed: bytes) -> str:
    """Id of the key that a genuine manifest is signed with."""
    return _parsed(signed).key_id


def _parsed(signed: bytes) -> pb.SignedManifest:
    """Empty for what is none."""
    try:
        return pb.SignedManifest.FromString(signed)
    except DecodeError:
        return pb.SignedManifest()


def check(signed: bytes, terms: ReleasePolicy, target: Target, state: ReleaseState) -> Manifest:
    """What the manifest says, where the release may be fetched. Raises ReleaseRefused."""
    try:
        manifest = manifests.verify(signed, terms.keys)
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
            f"{release} is older than version {state.floor}, which this device has found healthy as stable; "
            "to go back to an old draft publish its file as a new version",
        )
    if manifest.size > terms.max_bytes:
        raise ReleaseRefused(
            "size",
            f"{release} has {manifest.size} bytes, this device takes at most {terms.max_bytes}; "
            "quantise it further, or raise OUTRIDER_EDGE_RELEASE_MAX_BYTES",
        )
    known = state.refusal(name_of(signed))
    if known is not None:
        raise ReleaseRefused(
            "remembered",
            f"{release} was refused here before: {known.reason}; `outrider-edge releases forget` gives it another try",
        )
    return manifest
