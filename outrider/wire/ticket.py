"""Sign and verify tickets: the coordinator's promises to a device, which a verifier can check alone.

Ed25519 over the claims exactly as sent (no re-serialising before the check). `cryptography` is imported only when a
key is used, so that a device, which carries tickets without reading them, does not need it.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.bounds import text
from outrider.wire.codecs import MAX_TICKET_BYTES, built, limits_from_proto, limits_to_proto
from outrider.wire.v1 import coordinator_pb2, session_pb2

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TICKET_KEY = "outrider-ticket-bin"
"""Metadata of a call to a verifier: the ticket, so that nothing else of the call is read before it is checked."""
MAX_KEY_ID = 64
MAX_TARGET_TEXT = 160
"""Characters in a target's name, in each hash, and in each word about how it is computed."""


@dataclass(frozen=True)
class Target:
    """The target that a verifier serves. Equal `weights` mean equal text."""

    name: str
    weights_hash: str
    tokenizer_hash: str
    dtype: str = ""
    backend: str = ""
    hardware: str = ""

    @property
    def weights(self) -> tuple[str, str]:
        """Return the hashes of weights and token table, which stay the same for the whole of a session."""
        return self.weights_hash, self.tokenizer_hash


@dataclass(frozen=True)
class Claims:
    """The claims of a ticket whose signature was verified."""

    session_id: str
    tenant: str
    audience: str
    """Id of the one verifier that may accept it."""
    epoch_first: int
    epoch_last: int
    expires_unix: float
    """Seconds. It is checked when a stream opens; an open stream goes on."""
    limits: SessionLimits
    target: Target
    draft_release: str = ""
    """The draft release of the device, as it said when it opened the session; empty if it has none."""
    traffic_class: str = ""
    keep_s: float = 0.0
    """Seconds that the traffic log may keep generated tokens; 0 if it may not."""
    keep_prompts: bool = False
    """Whether the traffic log may keep the prompt as long; never if it may keep nothing else."""
    api_key_id: str = ""
    """Id of the API key that opened or resumed the session; empty if none was needed."""
    max_streams: int = 0
    """The most streams that its tenant may have at the verifier; 0: any number."""
    place_until_unix: float = 0.0
    """Seconds by the clock of the coordinators' store, until which a place at the verifier is kept for the device to
    attach; 0: none is, as at a standby."""
    key_id: str = field(default="", compare=False)
    """Id of the key that signed the ticket, which `verify` fills in."""

    def owns(self, epoch: int) -> bool:
        """Return whether the device may attach with this epoch."""
        return self.epoch_first <= epoch <= self.epoch_last


class Signer:
    """A private key that signs tickets and manifests."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private = private_key
        self.public_key = private_key.public_key().public_bytes_raw()
        """The 32 raw bytes."""
        self.key_id = key_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Signer:
        """Make a new key from the system's randomness."""
        return cls(_ed25519().Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Signer:
        """Read the key in a PKCS#8 PEM. Raises BadRequest for anything else."""
        from cryptography.hazmat.primitives import serialization

        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise BadRequest(f"the signing key is no unencrypted PEM private key: {error}", field="key") from error
        if not isinstance(key, _ed25519().Ed25519PrivateKey):
            raise BadRequest(f"the signing key is a {type(key).__name__}, must be Ed25519", field="key")
        return cls(key)

    @classmethod
    def load(
        cls, path: Path, what: str = "publisher key", remedy: str = "make one with `outrider-distill key`"
    ) -> Signer:
        """Read the key in a PEM file. what, remedy: what an error calls the key, and its advice if it cannot be read.

        Raises BadRequest if the file cannot be read, is accessible to other users, or holds no Ed25519 key.
        """
        path = path.expanduser()
        try:
            mode, pem = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise BadRequest(f"{what} {path} cannot be read: {error.strerror}; {remedy}", field="key") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadRequest(f"{what} {path} is accessible to other users; run: chmod 600 {path}", field="key")
        return cls.from_pem(pem)

    def pem(self) -> bytes:
        """Return the key as a PKCS#8 PEM, to be kept in a file that only its owner reads."""
        from cryptography.hazmat.primitives import serialization

        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def signature(self, message: bytes) -> bytes:
        """Sign any bytes; what is no ticket begins with a text of its own, so that neither passes for the other."""
        return self._private.sign(message)

    def sign(self, claims: Claims) -> bytes:
        """Return the ticket, a serialised SignedTicket. Raises BadRequest if it is too long."""
        body = claims_to_bytes(claims)
        signed = coordinator_pb2.SignedTicket(claims=body, signature=self.signature(body), key_id=self.key_id)
        ticket = signed.SerializeToString()
        if len(ticket) > MAX_TICKET_BYTES:
            raise BadRequest.bound("ticket", f"{len(ticket)} bytes", f"at most {MAX_TICKET_BYTES}")
        return ticket


def verify(
    ticket: bytes, public_keys: Mapping[str, bytes], *, audience: str | None, now: float, grace_s: float = 0.0
) -> Claims:
    """Return the claims of a genuine ticket.

    public_keys: key id -> raw key. audience: the verifier that asks; None accepts any, for the coordinator. now: Unix
    time in seconds. grace_s: seconds after its expiry for which a ticket still counts. The caller still has to compare
    the session and the epoch with what the device asks for.

    Raises Unauthenticated for a ticket that is not genuine or has expired, PermissionDenied for another verifier's.
    """
    signed = _parse(ticket)
    _check_signature(signed, public_keys)
    claims = claims_from_bytes(signed.claims, signed.key_id)
    if audience is not None and claims.audience != audience:
        raise PermissionDenied(
            f"the ticket is for verifier {claims.audience!r}, this is {audience!r}; present it at the address it came"
            " with"
        )
    late = now - claims.expires_unix - grace_s
    if not late <= 0:
        raise Unauthenticated(
            f"the ticket expired {late:.0f} s ago; resume the session at the coordinator for a new one"
        )
    return claims


def ticket_metadata(ticket: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call with this ticket; none without one."""
    return ((TICKET_KEY, ticket),) if ticket else ()


def ticket_of(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the ticket in a call's metadata, unchecked; empty if there is none."""
    return next((value for name, value in metadata if name == TICKET_KEY and isinstance(value, bytes)), b"")


def key_id_of(public_key: bytes) -> str:
    """Return a key's id, the start of its hash, so that two coordinators never give one id to two keys."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def ticket_key_id(ticket: bytes) -> str:
    """Return the id of the key that a ticket names, without checking anything. Raises Unauthenticated."""
    return _parse(ticket).key_id


def target_to_proto(target: Target) -> session_pb2.TargetIdentity:
    return session_pb2.TargetIdentity(**vars(target))  # fields have the same names in both


def target_from_proto(message: session_pb2.TargetIdentity) -> Target:
    """Decode a target. Raises BadRequest for a name or hash that is empty, too long or not printable."""
    target = built(Target, message)
    for name, value in vars(target).items():
        text(f"target.{name}", value, 0 if name in ("dtype", "backend", "hardware") else 1, MAX_TARGET_TEXT)
    return target


def _parse(ticket: bytes) -> coordinator_pb2.SignedTicket:
    if not ticket:
        raise Unauthenticated("no ticket; open a session at the coordinator first")
    if len(ticket) > MAX_TICKET_BYTES:
        raise Unauthenticated(f"the ticket is {len(ticket)} bytes, must be at most {MAX_TICKET_BYTES}")
    try:
        signed = coordinator_pb2.SignedTicket.FromString(ticket)
    except DecodeError as error:
        raise Unauthenticated("the ticket is no SignedTicket; pass on the coordinator's bytes unchanged") from error
    if len(signed.key_id) > MAX_KEY_ID:
        raise Unauthenticated(f"the ticket's key_id has {len(signed.key_id)} characters, must be at most {MAX_KEY_ID}")
    return signed


def _check_signature(signed: coordinator_pb2.SignedTicket, public_keys: Mapping[str, bytes]) -> None:
    key = public_keys.get(signed.key_id)
    if key is None:
        raise Unauthenticated(
            f"the ticket is signed with key {signed.key_id!r}, which is unknown here; open a new session"
        )
    if not is_signed(signed.claims, signed.signature, key):
        raise Unauthenticated("the ticket's signature does not match its claims; it was altered or forged")


def claims_to_bytes(claims: Claims) -> bytes:
    """Return claims as a ticket has them, without a signature."""
    recording = coordinator_pb2.Recording(keep_s=claims.keep_s, prompts=claims.keep_prompts) if claims.keep_s else None
    same = {name: value for name, value in vars(claims).items() if name not in ("keep_s", "keep_prompts", "key_id")}
    converted = {"limits": limits_to_proto(claims.limits), "target": target_to_proto(claims.target)}
    return coordinator_pb2.TicketClaims(**(same | converted), recording=recording).SerializeToString()


def claims_from_bytes(raw: bytes, key_id: str) -> Claims:
    """Read claims that are signed, or come from a process that has verified them, so that their values need no check.

    key_id: id of the key that signed them.
    """
    try:
        proto = coordinator_pb2.TicketClaims.FromString(raw)
    except DecodeError as error:
        raise Unauthenticated("the ticket's claims are no TicketClaims; is the coordinator much newer?") from error
    return built(
        Claims,
        proto,
        limits=limits_from_proto(proto.limits),
        target=target_from_proto(proto.target),
        key_id=key_id,
        keep_s=max(0.0, proto.recording.keep_s),
        keep_prompts=proto.recording.keep_s > 0.0 and proto.recording.prompts,
    )


def is_signed(message: bytes, signature: bytes, key: bytes) -> bool:
    """Return whether a signature of these bytes was made with a public key's private half.

    key: 32 raw bytes. Raises ValueError for anything else.
    """
    public_key = _ed25519().Ed25519PublicKey.from_public_bytes(key)
    from cryptography.exceptions import InvalidSignature

    try:
        public_key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ImportError(
            "tickets need cryptography: pip install 'outrider[verifier]' or 'outrider[coordinator]'"
        ) from error
    return ed25519
