"""Test that only manifests that a trusted publisher signed for releases are accepted, and only within bounds."""

import pytest

from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire import manifest as manifests
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

FIELDS = {
    "version": 3,
    "weights_hash": "sha256:" + "a" * 64,
    "tokenizer_hash": "sha256:" + "b" * 64,
    "artifact": "sha256:" + "c" * 64,
    "size": 2_012_128,
    "quantization": "Q8_0",
    "parent": "sha256:" + "d" * 64,
    "urls": ("drafts/c.gguf", "https://example.org/c.gguf"),
    "metrics": {"tokens_per_step.code": 4.5, "draft_ms": 0.9},
    "created_unix": 1_800_000_000.0,
}
MANIFEST = pb.Manifest(**FIELDS)


@pytest.fixture(scope="module")
def signer():
    return Signer.generate()


@pytest.fixture
def keys(signer):
    return {signer.key_id: signer.public_key}


def test_a_manifest_says_what_was_signed(signer, keys):
    assert manifests.verify(manifests.sign(MANIFEST, signer), keys) == MANIFEST


def test_a_flipped_bit_anywhere_is_noticed(signer, keys):
    genuine = manifests.sign(MANIFEST, signer)
    for at in range(len(genuine)):
        altered = genuine[:at] + bytes([genuine[at] ^ 1]) + genuine[at + 1 :]
        with pytest.raises((ModelRefused, BadRequest)):
            manifests.verify(altered, keys)


def test_an_untrusted_release_is_refused_and_the_trusted_key_named(keys):
    untrusted = Signer.generate()
    with pytest.raises(ModelRefused, match=f"{untrusted.key_id}.*{next(iter(keys))}"):
        manifests.verify(manifests.sign(MANIFEST, untrusted), keys)


def test_a_signature_over_the_same_bytes_for_another_purpose_is_no_release(signer, keys):
    signed = pb.SignedManifest.FromString(manifests.sign(MANIFEST, signer))
    signed.signature = signer.signature(signed.manifest)
    with pytest.raises(ModelRefused, match="altered or forged"):
        manifests.verify(signed.SerializeToString(), keys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 0),
        ("size", 0),
        ("size", manifests.MAX_FILE + 1),
        ("artifact", "sha256:../../etc/passwd"),
        ("artifact", ""),
        ("parent", "sha256:zz"),
        ("weights_hash", ""),
        ("tokenizer_hash", "x" * 200),
        ("quantization", "q8 0"),
        ("urls", ("u",) * 9),
        ("urls", ("x" * 1025,)),
        ("metrics", {"speed": float("nan")}),
        ("metrics", {str(i): 0.0 for i in range(65)}),
        ("metrics", {"\x1b[31m": 1.0}),
        ("metrics", {"": 1.0}),
        ("metrics", {"m" * 129: 1.0}),
        ("created_unix", float("inf")),
        ("created_unix", float("nan")),
        ("created_unix", -1.0),
        ("created_unix", 1e12),
    ],
)
def test_what_is_out_of_bounds_is_not_signed_and_the_field_is_named(signer, field, value):
    with pytest.raises(BadRequest, match=f"manifest.{field}"):
        manifests.sign(pb.Manifest(**{**FIELDS, field: value}), signer)


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, b"x" * (manifests.MAX_BYTES + 1)], ids=["empty", "noise", "huge"])
def test_what_is_no_manifest_is_refused_in_words(keys, junk):
    with pytest.raises(BadRequest, match="manifest"):
        manifests.verify(junk, keys)
