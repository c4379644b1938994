"""Which releases a device takes: what a publisher that it trusts has signed for this very target, and no old ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edge_agent.releases.check import ReleaseRefused, Terms, check, name_of
from edge_agent.releases.keys import trusted_keys
from edge_agent.releases.slots import Refusal, State
from outrider.core.errors import BadRequest
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
TERMS = Terms({SIGNER.key_id: SIGNER.public_key}, max_bytes=2000)


def test_a_release_that_a_trusted_publisher_signed_for_this_target_is_taken() -> None:
    assert check(sign(MANIFEST, SIGNER), TERMS, TARGET, State(floor=5)) == MANIFEST


@pytest.mark.parametrize(
    ("changes", "state", "kind", "said"),
    [
        ({"weights_hash": "sha256:" + "d" * 64}, State(), "target", "publish it for that target"),
        ({"tokenizer_hash": "sha256:" + "d" * 64}, State(), "tokenizer", "target's own tokenizer"),
        ({}, State(floor=6), "version", "older than version 6"),
        ({"size": 2001}, State(), "size", "OUTRIDER_EDGE_RELEASE_MAX_BYTES"),
    ],
    ids=["target", "tokenizer", "version", "size"],
)
def test_what_is_wrong_with_a_release_is_named(changes: dict[str, object], state: State, kind: str, said: str) -> None:
    signed = sign(dataclasses.replace(MANIFEST, **changes), SIGNER)  # type: ignore[arg-type]
    with pytest.raises(ReleaseRefused, match=said) as caught:
        check(signed, TERMS, TARGET, state)
    assert caught.value.kind == kind and "cccccccccccc" in str(caught.value)


def test_a_stranger_and_a_forger_are_refused() -> None:
    with pytest.raises(ReleaseRefused, match="not trusted here") as stranger:
        check(sign(MANIFEST, Signer.generate()), TERMS, TARGET, State())
    genuine = sign(MANIFEST, SIGNER)
    at = genuine.index(b"c" * 64)
    with pytest.raises(ReleaseRefused, match="altered or forged") as forged:
        check(genuine[:at] + b"d" + genuine[at + 1 :], TERMS, TARGET, State())
    assert stranger.value.kind == forged.value.kind == "signature"


def test_bytes_that_are_no_manifest_are_refused() -> None:
    for raw in (b"\xff" * 10, b"x" * 20_000):
        with pytest.raises(ReleaseRefused) as caught:
            check(raw, TERMS, TARGET, State())
        assert caught.value.kind in ("manifest", "signature")


def test_what_was_given_up_before_is_not_tried_again_and_the_reason_is_told() -> None:
    signed = sign(MANIFEST, SIGNER)
    refusal = Refusal(
        manifest=name_of(signed), digest=MANIFEST.digest, version=5, kind="worse", reason="it was bad", at_unix=1.0
    )
    with pytest.raises(ReleaseRefused, match="it was bad") as caught:
        check(signed, TERMS, TARGET, State(refused=(refusal,)))
    assert caught.value.kind == "remembered"
    resigned = sign(dataclasses.replace(MANIFEST, version=6), SIGNER)  # on purpose: its publisher means it
    assert check(resigned, TERMS, TARGET, State(refused=(refusal,))).version == 6


def test_keys_are_hex_digits_or_files_of_them_or_pem(tmp_path: Path) -> None:
    signers = [Signer.generate() for _ in range(3)]
    listed, pem = tmp_path / "keys", tmp_path / "key.pem"
    listed.write_text(f"# ours\n{signers[1].public_key.hex()}  # the second\n\n")
    key = Ed25519PublicKey.from_public_bytes(signers[2].public_key)
    pem.write_bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    keys = trusted_keys(f" {signers[0].public_key.hex()}, {listed},{pem} ")
    assert keys == {signer.key_id: signer.public_key for signer in signers}
    assert trusted_keys("") == {}


def test_what_is_no_public_key_is_refused_with_how_to_mend_it(tmp_path: Path) -> None:
    private, words, empty = tmp_path / "private.pem", tmp_path / "words", tmp_path / "empty"
    private.write_bytes(Signer.generate().pem())
    words.write_text("secret\n")
    empty.write_text("")
    for wrong, said in (
        ("abc", "64 hex digits"),
        (str(private), "public key"),
        (str(words), "64 hex digits"),
        (str(empty), "64 hex digits"),
    ):
        with pytest.raises(BadRequest, match=said):
            trusted_keys(wrong)
