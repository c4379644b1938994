"""Sign and verify tickets: the coordinator's promises to a device, which a verifier can check alone.

A ticket is a JSON Web Token, signed with EdDSA (Ed25519), whose audience is one verifier. PyJWT and `cryptography` are
imported only when a key is used, so that a device, which carries tickets without reading them, does not need them.
"""

from __future__ import annotations

import hashlib
import importlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.bounds import text
from outrider.wire.checks import MAX_TICKET_BYTES
from outrider.wire.v1 import session_pb2

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "EdDSA"
TICKET_KEY = "outrider-ticket-bin"
"""Metadata of a call to a verifier: the ticket, so that nothing else of the call is read before it is checked."""
MAX_KEY_ID = 64
MAX_TARGET_TEXT = 160
"""Characters in a target's name, in each hash, and in each word about how it is computed."""

MAX_EPOCH = 2**53
MAX_LIMIT = 65_536
"""Each of a session's limits."""
_Text = Annotated[str, Field(max_length=MAX_TARGET_TEXT)]
_Epoch = Annotated[int, Field(ge=0, le=MAX_EPOCH)]
_Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


def _bounded(limits: SessionLimits) -> SessionLimits:
    """Return limits. Raises ValueError if one is out of bounds."""
    if not all(0 <= value <= MAX_LIMIT for value in vars(limits).values()):
        raise ValueError(f"limits must be between 0 and {MAX_LIMIT}")
    return limits


@dataclass(frozen=True)
class Target:
    """The target that a verifier serves. Equal `weights` mean equal text."""

    name: _Text
    weights_hash: _Text
    tokenizer_hash: _Text
    dtype: _Text = ""
    backend: _Text = ""
    hardware: _Text = ""

    @property
    def weights(self) -> tuple[str, str]:
        """Return the hashes of weights and token table, which stay the same for the whole of a session."""
        return self.weights_hash, self.tokenizer_hash


@dataclass(frozen=True)
class Claims:
    """The claims of a ticket whose signature was verified."""

    session_id: _Text
    tenant: _Text
    audience: _Text
    """Id of the one verifier that may accept it."""
    epoch_first: _Epoch
    epoch_last: _Epoch
    expires_unix: _Seconds
    """Seconds. It is checked when a stream opens; an open stream goes on."""
    limits: Annotated[SessionLimits, AfterValidator(_bounded)]
    target: Target
    draft_release: _Text = ""
    """The draft release of the device, as it said when it opened the session; empty if it has none."""
    traffic_class: _Text = ""
    keep_s: _Seconds = 0.0
    """Seconds that the traffic log may keep generated tokens; 0 if it may not."""
    keep_prompts: bool = False
    """Whether the traffic log may keep the prompt as long; never if it may keep nothing else."""
    api_key_id: _Text = ""
    """Id of the API key that opened or resumed the session; empty if none was needed."""
    max_streams: Annotated[int, Field(ge=0)] = 0
    """The most streams that its tenant may have at the verifier; 0: any number."""
    place_until_unix: _Seconds = 0.0
    """Seconds by the clock of the coordinators' store, until which a place at the verifier is kept for the device to
    attach; 0: none is, as at a standby."""

    def owns(self, epoch: int) -> bool:
        """Return whether the device may attach with this epoch."""
        return self.epoch_first <= epoch <= self.epoch_last


_CLAIMS = TypeAdapter(Claims)
_KEYS = {field.name: field.name for field in fields(Claims)} | {"audience": "aud", "expires_unix": "exp"}
"""Names of the fields in a token: some are those of RFC 7519."""


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
    def load(cls, path: Path) -> Signer:
        """Read a publisher's key in a PEM file. Raises BadRequest if the file cannot be read, is accessible to other
        users, or holds no Ed25519 key."""
        path = path.expanduser()
        try:
            mode, pem = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise BadRequest(
                f"publisher key {path} cannot be read: {error.strerror}; make one with `outrider-distill key`",
                field="key",
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadRequest(f"publisher key {path} is accessible to other users; run: chmod 600 {path}", field="key")
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
        """Return the ticket. Raises BadRequest if it is too long."""
        values = vars(claims).items()  # asdict would copy each
        payload = {_KEYS[name]: vars(value) if is_dataclass(value) else value for name, value in values}
        token: str = _library("jwt").encode(payload, self._private, ALGORITHM, {"kid": self.key_id})
        if len(token) > MAX_TICKET_BYTES:
            raise BadRequest.bound("ticket", f"{len(token)} bytes", f"at most {MAX_TICKET_BYTES}")
        return token.encode()


def verify(
    ticket: bytes, public_keys: Mapping[str, bytes], *, audience: str | None, now: float, grace_s: float = 0.0
) -> Claims:
    """Return the claims of a genuine ticket, within their bounds.

    public_keys: key id -> raw key. audience: the verifier that asks; None accepts any, for the coordinator. now: Unix
    time in seconds. grace_s: seconds after its expiry for which a ticket still counts. The caller still has to compare
    the session and the epoch with what the device asks for.

    Raises Unauthenticated for a ticket that is not genuine or has expired, PermissionDenied for another verifier's.
    """
    key_id, jwt = _key_id(ticket), _library("jwt")
    if key_id not in public_keys:
        raise Unauthenticated(
            f"the ticket is signed with key {key_id!r}, which is unknown here; open a new session, and if this repeats,"
            " give all coordinators the same ticket key"
        )
    key = _ed25519().Ed25519PublicKey.from_public_bytes(public_keys[key_id])
    options = {"require": ["exp", "aud"], "verify_exp": False, "verify_aud": audience is not None}  # exp with grace_s
    try:
        payload = jwt.decode(ticket, key, [ALGORITHM], audience=audience, options=options)
        claims = _CLAIMS.validate_python({name: payload[key] for name, key in _KEYS.items() if key in payload})
    except jwt.InvalidAudienceError as error:
        raise PermissionDenied(
            f"the ticket is for another verifier, this is {audience!r}; present it at the address it came with"
        ) from error
    except jwt.InvalidSignatureError as error:
        raise Unauthenticated("the ticket's signature does not match its claims; it was altered or forged") from error
    except (jwt.InvalidTokenError, ValidationError) as error:
        raise Unauthenticated(f"the ticket's claims cannot be read: {str(error)[:200]}") from error
    late = now - claims.expires_unix - grace_s
    if not late <= 0:
        raise Unauthenticated(
            f"the ticket expired {late:.0f} s ago; resume the session at the coordinator for a new one, and if that is"
            " refused, too, compare the clocks of coordinator and verifier"
        )
    return replace(claims, keep_prompts=claims.keep_prompts and claims.keep_s > 0.0)


def ticket_metadata(ticket: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call with this ticket; none without one."""
    return ((TICKET_KEY, ticket),) if ticket else ()


def ticket_of(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the ticket in a call's metadata, unchecked; empty if there is none."""
    return next((value for name, value in metadata if name == TICKET_KEY and isinstance(value, bytes)), b"")


def key_id_of(public_key: bytes) -> str:
    """Return a key's id, the start of its hash, so that two coordinators never give one id to two keys."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def _key_id(ticket: bytes) -> str:
    """Return the id of the key that a ticket names, without checking anything. Raises Unauthenticated."""
    if not ticket:
        raise Unauthenticated("no ticket; open a session at the coordinator first")
    if len(ticket) > MAX_TICKET_BYTES:
        raise Unauthenticated(f"the ticket is {len(ticket)} bytes, must be at most {MAX_TICKET_BYTES}")
    jwt = _library("jwt")
    try:
        key_id = jwt.get_unverified_header(ticket).get("kid")
    except jwt.InvalidTokenError as error:
        raise Unauthenticated("the ticket is no JSON Web Token; pass on the coordinator's bytes unchanged") from error
    if not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID:
        raise Unauthenticated("the ticket names no key")
    return key_id


def target_from_proto(message: session_pb2.TargetIdentity) -> Target:
    """Decode a target. Raises BadRequest for a name or hash that is empty, too long or not printable."""
    target = Target(**{field.name: getattr(message, field.name) for field in fields(Target)})
    for name, value in vars(target).items():
        text(f"target.{name}", value, 0 if name in ("dtype", "backend", "hardware") else 1, MAX_TARGET_TEXT)
    return target


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


def _library(name: str) -> Any:
    """Return a module that signatures need. Raises ImportError that names what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"tickets need {error.name}: pip install 'outrider[verifier]' or 'outrider[coordinator]'"
        ) from error


def _ed25519() -> Any:
    return _library("cryptography.hazmat.primitives.asymmetric.ed25519")
