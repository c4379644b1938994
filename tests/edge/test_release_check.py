"""Test which releases a device accepts: signed by a trusted publisher for this very target, and not older."""

from __future__ import annotations

import dataclasses

import pytest

from edge_agent.releases.download import ReleaseRefused
from edge_agent.releases.follower import MAX_BYTES, check, manifest_digest
from edge_agent.releases.state import InstalledRelease, ReleaseState
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer, Target

TARGET = Target("t", "sha256:" + "a" * 64, "sha256:" + "b" * 64)
MANIFEST = Manifest(
    version=5,
    weights_hash=TARGET.weights_hash,
    tokenizer_hash=TARGET.tokenizer_hash,
    artifact="sha256:" + "c" * 64,
    size=1000,
    quantization="Q8_0",
)
SIGNER = Signer.generate()
KEYS = {SIGNER.key_id: SIGNER.public_key}


@pytest.mark.parametrize(
    ("changes", "state", "kind", "said"),
    [
        ({"weights_hash": "sha256:" + "d" * 64}, ReleaseState(), "target", "publish it for that target"),
        ({"tokenizer_hash": "sha256:" + "d" * 64}, ReleaseState(), "tokenizer", "target's own tokenizer"),
        ({}, ReleaseState(floor=6), "version", "older than version 6"),
        ({"size": MAX_BYTES + 1}, ReleaseState(), "size", "quantise it further"),
    ],
    ids=["target", "tokenizer", "version", "size"],
)
def test_what_is_wrong_with_a_release_is_named(
    changes: dict[str, object], state: ReleaseState, kind: str, said: str
) -> None:
    signed = sign(dataclasses.replace(MANIFEST, **changes), SIGNER)  # type: ignore[arg-type]
    with pytest.raises(ReleaseRefused, match=said) as caught:
        check(signed, KEYS, TARGET, state)
    assert caught.value.kind == kind and "cccccccccccc" in str(caught.value)


def test_an_untrusted_key_and_a_forged_signature_are_refused() -> None:
    with pytest.raises(ReleaseRefused, match="not trusted here") as untrusted:
        check(sign(MANIFEST, Signer.generate()), KEYS, TARGET, ReleaseState())
    genuine = sign(MANIFEST, SIGNER)
    at = genuine.index(b"c" * 64)
    with pytest.raises(ReleaseRefused, match="altered or forged") as forged:
        check(genuine[:at] + b"d" + genuine[at + 1 :], KEYS, TARGET, ReleaseState())
    assert untrusted.value.kind == forged.value.kind == "signature"


def test_what_was_given_up_before_is_not_tried_again_and_the_reason_is_given() -> None:
    signed = sign(MANIFEST, SIGNER)
    release = InstalledRelease(
        digest=MANIFEST.digest, version=5, canary=False, manifest=manifest_digest(signed), key_id=SIGNER.key_id
    )
    refused = ReleaseState().refuse(release, "unusable", "it was bad", 1.0)
    with pytest.raises(ReleaseRefused, match="it was bad") as caught:
        check(signed, KEYS, TARGET, refused)
    assert caught.value.kind == "remembered"
    wrapped = signed + b"\xfa\x01\x01x"  # a field that nobody knows: what is signed is the same
    with pytest.raises(ReleaseRefused, match="it was bad"):
        check(wrapped, KEYS, TARGET, refused)
    resigned = sign(dataclasses.replace(MANIFEST, version=6), SIGNER)  # on purpose: its publisher means it
    assert check(resigned, KEYS, TARGET, refused).version == 6
