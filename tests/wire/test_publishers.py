"""Test that publishers are named by their keys, in the setting itself or in files."""

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from outrider.core.errors import BadRequest
from outrider.wire.manifest import trusted_keys
from outrider.wire.ticket import Signer

ONE, OTHER = Signer.generate(), Signer.generate()


def test_keys_are_given_as_hex_as_lines_of_a_file_or_as_a_pem(tmp_path) -> None:
    lines, pem = tmp_path / "lines", tmp_path / "pem"
    lines.write_text(f"# ours\n{ONE.public_key.hex()}  # of the year\n\n")
    public = serialization.load_pem_private_key(OTHER.pem(), None).public_key()
    kinds = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pem.write_bytes(public.public_bytes(*kinds))
    both = {ONE.key_id: ONE.public_key, OTHER.key_id: OTHER.public_key}
    assert trusted_keys("") == {}
    assert trusted_keys(f"{ONE.public_key.hex()}, {OTHER.public_key.hex()}") == both
    assert trusted_keys(f"{lines},{pem}") == both


def test_what_is_no_public_key_is_refused_by_name(tmp_path) -> None:
    private, junk, curve, empty = (tmp_path / name for name in ("private", "junk", "curve", "empty"))
    empty.write_text("")
    private.write_bytes(ONE.pem())
    junk.write_text("abc\n")
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    kinds = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    curve.write_bytes(key.public_bytes(*kinds))
    for text, complaint in (
        ("abcd", "neither 64 hex digits nor a file"),
        (str(private), "the private one stays with its publisher"),
        (str(junk), "each line must be 64 hex digits"),
        (str(empty), "holds no public keys"),
        (str(curve), "must be Ed25519"),
    ):
        with pytest.raises(BadRequest, match=complaint):
            trusted_keys(text)
