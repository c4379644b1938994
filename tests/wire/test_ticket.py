"""Test that only whole, fresh tickets, signed by a known key, for this verifier, are accepted."""

import dataclasses

import jwt
import pytest

from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import SessionLimits
from outrider.wire import ticket
from outrider.wire.ticket import Claims, Signer, Target

NOW = 1_800_000_000.0
CLAIMS = Claims(
    session_id="s-1",
    tenant="acme",
    audience="v-1",
    epoch_first=1_000,
    epoch_last=1_255,
    expires_unix=NOW + 60,
    limits=SessionLimits(nodes=10, depth=9, in_flight=8, run_ahead=7),
    target=Target("demo", "sha256:aa", "sha256:bb", "float32", "sdpa", "cpu"),
    draft_release="ab" * 32,
    traffic_class="code",
    keep_s=86_400.0,
    keep_prompts=True,
)


@pytest.fixture(scope="module")
def signer():
    return Signer.generate()


@pytest.fixture
def keys(signer):
    return {signer.key_id: signer.public_key}


def test_a_ticket_says_what_was_signed(signer, keys):
    assert ticket.verify(signer.sign(CLAIMS), keys, audience="v-1", now=NOW) == CLAIMS


def test_a_change_anywhere_is_noticed(signer, keys):
    genuine = signer.sign(CLAIMS)
    for at in range(len(genuine)):
        altered = genuine[:at] + (b"B" if genuine[at : at + 1] == b"A" else b"A") + genuine[at + 1 :]
        if at < len(genuine) - 1:  # the last letter has bits that mean nothing
            with pytest.raises(Unauthenticated):
                ticket.verify(altered, keys, audience="v-1", now=NOW)


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_no_other_algorithm_is_taken(signer, keys, algorithm):
    secret = signer.public_key if algorithm == "HS256" else None
    forged = jwt.encode({"aud": "v-1", "exp": NOW + 60}, secret, algorithm, {"kid": signer.key_id})
    with pytest.raises(Unauthenticated):
        ticket.verify(forged.encode(), keys, audience="v-1", now=NOW)


@pytest.mark.parametrize(
    "changed",
    [
        {"expires_unix": float("nan")},
        {"keep_s": -1.0},
        {"epoch_last": 2**60},
        {"max_streams": -1},
        {"tenant": "t" * 161},
        {"limits": SessionLimits(nodes=70_000)},
        {"limits": SessionLimits(depth=-1)},
        {"target": None},
    ],
)
def test_claims_out_of_bounds_are_refused_though_they_are_signed(signer, keys, changed):
    with pytest.raises(Unauthenticated, match="claims cannot be read"):
        ticket.verify(signer.sign(dataclasses.replace(CLAIMS, **changed)), keys, audience="v-1", now=NOW)


def test_a_ticket_without_audience_or_expiry_is_refused(signer, keys):
    whole = jwt.decode(signer.sign(CLAIMS), options={"verify_signature": False})
    for name in ("aud", "exp", "session_id"):
        payload = {key: value for key, value in whole.items() if key != name}
        partial = jwt.encode(payload, signer._private, "EdDSA", {"kid": signer.key_id})
        with pytest.raises(Unauthenticated):
            ticket.verify(partial.encode(), keys, audience=None, now=NOW)


def test_a_ticket_signed_with_an_unknown_key_is_refused_and_its_key_named(keys):
    unknown = Signer.generate()
    with pytest.raises(Unauthenticated, match=unknown.key_id):
        ticket.verify(unknown.sign(CLAIMS), keys, audience="v-1", now=NOW)


def test_an_unknown_key_under_a_known_key_id_is_refused(signer, keys):
    other = Signer.generate()
    other.key_id = signer.key_id
    with pytest.raises(Unauthenticated, match="altered or forged"):
        ticket.verify(other.sign(CLAIMS), keys, audience="v-1", now=NOW)


def test_a_ticket_for_another_verifier_is_refused(signer, keys):
    with pytest.raises(PermissionDenied, match="for another verifier, this is 'v-2'"):
        ticket.verify(signer.sign(CLAIMS), keys, audience="v-2", now=NOW)


def test_an_expired_ticket_is_refused_and_says_how_to_mend_it(signer, keys):
    with pytest.raises(Unauthenticated, match="expired 5 s ago; resume"):
        ticket.verify(signer.sign(CLAIMS), keys, audience="v-1", now=NOW + 65)


def test_grace_forgives_an_expiry_and_ends(signer, keys):
    late = signer.sign(CLAIMS)
    assert ticket.verify(late, keys, audience="v-1", now=NOW + 65, grace_s=10) == CLAIMS
    with pytest.raises(Unauthenticated, match="expired"):
        ticket.verify(late, keys, audience="v-1", now=NOW + 75, grace_s=10)


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, b"a.b.c", b"x" * (ticket.MAX_TICKET_BYTES + 1)])
def test_what_is_no_ticket_is_refused_in_words(keys, junk):
    with pytest.raises(Unauthenticated, match="ticket"):
        ticket.verify(junk, keys, audience="v-1", now=NOW)


def test_a_key_that_is_no_ed25519_key_is_refused():
    with pytest.raises(BadRequest, match="no unencrypted PEM"):
        Signer.from_pem(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
