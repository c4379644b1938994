"""Test which releases a device accepts: signed by a trusted publisher for this very target, and not older."""

from __future__ import annotations

import pytest

from edge_agent.releases.download import ReleaseRefused
from edge_agent.releases.follower import MAX_BYTES, check, manifest_digest
from outrider.wire.manifest import sign
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.session_pb2 import TargetIdentity

TARGET = TargetIdentity(name="t", weights_hash="sha256:" + "a" * 64, tokenizer_hash="sha256:" + "b" * 64)
FIELDS = {
    "version": 5,
    "weights_hash": TARGET.weights_hash,
    "tokenizer_hash": TARGET.tokenizer_hash,
    "artifact": "sha256:" + "c" * 64,
    "size": 1000,
    "quantization": "Q8_0",
}
MANIFEST = pb.Manifest(**FIELDS)
SIGNER = Signer.generate()
KEYS = {SIGNER.key_id: SIGNER.public_key}


@pytest.mark.parametrize(
    ("changes", "floor", "kind", "said"),
    [
        ({"weights_hash": "sha256:" + "d" * 64}, 0, "target", "publish it for that target"),
        ({"tokenizer_hash": "sha256:" + "d" * 64}, 0, "tokenizer", "target's own tokenizer"),
        ({}, 6, "version", "older than version 6"),
        ({"size": MAX_BYTES + 1}, 0, "size", "quantise it further"),
    ],
    ids=["target", "tokenizer", "version", "size"],
)
def test_what_is_wrong_with_a_release_is_named(changes: dict[str, object], floor: int, kind: str, said: str) -> None:
    signed = sign(pb.Manifest(**{**FIELDS, **changes}), SIGNER)
    with pytest.raises(ReleaseRefused, match=said) as caught:
        check(signed, KEYS, TARGET, floor)
    assert caught.value.kind == kind and "cccccccccccc" in str(caught.value)


def test_an_untrusted_key_and_a_forged_signature_are_refused() -> None:
    with pytest.raises(ReleaseRefused, match="not trusted here") as untrusted:
        check(sign(MANIFEST, Signer.generate()), KEYS, TARGET, 0)
    genuine = sign(MANIFEST, SIGNER)
    at = genuine.index(b"c" * 64)
    with pytest.raises(ReleaseRefused, match="altered or forged") as forged:
        check(genuine[:at] + b"d" + genuine[at + 1 :], KEYS, TARGET, 0)
    assert untrusted.value.kind == forged.value.kind == "signature"


def test_a_release_that_this_device_may_take_is_known_by_what_is_signed_alone() -> None:
    signed = sign(MANIFEST, SIGNER)
    wrapped = signed + b"\xfa\x01\x01x"  # a field that nobody knows: what is signed is the same
    assert check(signed, KEYS, TARGET, 5) == check(wrapped, KEYS, TARGET, 5) == MANIFEST
    assert manifest_digest(signed) == manifest_digest(wrapped)
