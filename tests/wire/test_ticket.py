"""Test that only whole, fresh tickets, signed by a known key, for this verifier, are accepted."""

import dataclasses

import pytest

from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import SessionLimits
from outrider.wire import ticket
from outrider.wire.ticket import Claims, Signer, Target
from outrider.wire.v1 import coordinator_pb2

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


@pytest.mark.parametrize("keep_s", [0.0, -1.0, float("nan")])
def test_what_does_not_say_how_long_it_may_be_kept_may_not_be_recorded(signer, keys, keep_s):
    silent = dataclasses.replace(CLAIMS, keep_s=keep_s)
    believed = ticket.verify(signer.sign(silent), keys, audience="v-1", now=NOW)
    assert (believed.keep_s, believed.keep_prompts) == (0.0, False)


def test_what_does_not_say_that_prompts_may_be_kept_does_not_let_them_be(signer, keys):
    silent = dataclasses.replace(CLAIMS, keep_prompts=False)
    assert ticket.verify(signer.sign(silent), keys, audience="v-1", now=NOW) == silent


def test_a_flipped_bit_anywhere_is_noticed(signer, keys):
    genuine = signer.sign(CLAIMS)
    for at in range(len(genuine)):
        altered = genuine[:at] + bytes([genuine[at] ^ 1]) + genuine[at + 1 :]
        with pytest.raises(Unauthenticated):
            ticket.verify(altered, keys, audience="v-1", now=NOW)


def test_claims_under_another_tickets_signature_are_refused(signer, keys):
    mine = coordinator_pb2.SignedTicket.FromString(signer.sign(CLAIMS))
    richer = coordinator_pb2.SignedTicket.FromString(signer.sign(dataclasses.replace(CLAIMS, tenant="other")))
    mine.claims = richer.claims
    with pytest.raises(Unauthenticated, match="altered or forged"):
        ticket.verify(mine.SerializeToString(), keys, audience="v-1", now=NOW)


def test_a_ticket_signed_with_an_unknown_key_is_refused_and_its_key_named(keys):
    unknown = Signer.generate()
    with pytest.raises(Unauthenticated, match=unknown.key_id):
        ticket.verify(unknown.sign(CLAIMS), keys, audience="v-1", now=NOW)


def test_an_unknown_key_under_a_known_key_id_is_refused(signer, keys):
    forged = coordinator_pb2.SignedTicket.FromString(Signer.generate().sign(CLAIMS))
    forged.key_id = signer.key_id
    with pytest.raises(Unauthenticated, match="altered or forged"):
        ticket.verify(forged.SerializeToString(), keys, audience="v-1", now=NOW)


def test_a_ticket_for_another_verifier_is_refused_and_says_for_which(signer, keys):
    with pytest.raises(PermissionDenied, match=r"'v-1'.*'v-2'"):
        ticket.verify(signer.sign(CLAIMS), keys, audience="v-2", now=NOW)


def test_whoever_issued_a_ticket_reads_it_whatever_its_audience(signer, keys):
    assert ticket.verify(signer.sign(CLAIMS), keys, audience=None, now=NOW).audience == "v-1"


def test_an_expired_ticket_is_refused_and_says_how_to_mend_it(signer, keys):
    with pytest.raises(Unauthenticated, match="expired 5 s ago; resume"):
        ticket.verify(signer.sign(CLAIMS), keys, audience="v-1", now=NOW + 65)


def test_grace_forgives_an_expiry_and_ends(signer, keys):
    late = signer.sign(CLAIMS)
    assert ticket.verify(late, keys, audience="v-1", now=NOW + 65, grace_s=10) == CLAIMS
    with pytest.raises(Unauthenticated, match="expired"):
        ticket.verify(late, keys, audience="v-1", now=NOW + 75, grace_s=10)


def test_a_ticket_that_never_says_when_it_ends_is_expired(signer, keys):
    for expires in (0.0, float("nan")):
        endless = signer.sign(dataclasses.replace(CLAIMS, expires_unix=expires))
        with pytest.raises(Unauthenticated, match="expired"):
            ticket.verify(endless, keys, audience="v-1", now=NOW)


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, b"\x0a\xff", b"x" * (ticket.MAX_TICKET_BYTES + 1)])
def test_what_is_no_ticket_is_refused_in_words(keys, junk):
    with pytest.raises(Unauthenticated, match="ticket"):
        ticket.verify(junk, keys, audience="v-1", now=NOW)


def test_an_oversize_ticket_is_not_signed(signer):
    with pytest.raises(BadRequest, match="at most 4096"):
        signer.sign(dataclasses.replace(CLAIMS, session_id="s" * 5_000))


def test_a_key_survives_its_file(signer):
    again = Signer.from_pem(signer.pem())
    assert (again.key_id, again.public_key) == (signer.key_id, signer.public_key)


def test_a_key_that_is_no_ed25519_key_is_refused():
    with pytest.raises(BadRequest, match="no unencrypted PEM"):
        Signer.from_pem(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")


def test_an_epoch_is_owned_inside_the_range_alone():
    assert [CLAIMS.owns(epoch) for epoch in (999, 1_000, 1_255, 1_256)] == [False, True, True, False]
