"""Make every gRPC channel and server: liveness, bounds and TLS are decided here and nowhere else.

The numbers were measured (grpcio 1.85, aio): a peer that hangs without closing is noticed only after 60 s unless
`http2.ping_timeout_ms` is set, whatever `keepalive_timeout_ms` says; a server with default settings drops a client
that pings an idle stream every 2 s; a reader that stalls leaves thousands of small messages in flight unless BDP
probing is off and the look-ahead small.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, Unavailable

if TYPE_CHECKING:  # settings name addresses and certificates, and a command's --help should not wait for gRPC
    import grpc

    from outrider.wire.admission import Admit

PING_EVERY_MS = 2_000
"""A client pings a silent server this often."""
PING_TIMEOUT_MS = 2_000
"""A server that does not answer a ping for so long is dead; failover waits for at most the sum of both."""
FAR_PING_TIMEOUT_MS = 12_000
"""The same from a device, which may be seconds away. That a verifier is silent shows in its sessions before."""
SERVER_PING_EVERY_MS = 10_000
"""A server pings less often: a device that has vanished costs it only memory."""
SERVER_PING_TIMEOUT_MS = 12_000
"""It is longer, since phones pause their radios, and may be far away."""
MIN_PING_INTERVAL_MS = 1_000
"""Pings more frequent than this are abuse; below PING_EVERY_MS with room for jitter."""
LOOKAHEAD_BYTES = 16_384
"""Bytes that a stream may hold for a server that does not read, of strangers' calls too. A longer message, such as a
prompt of 6,000 tokens, takes one round trip more."""
DEVICE_LOOKAHEAD_BYTES = 16_384
"""Bytes that a stream may hold for a client that does not read. It is below the 65,535 with which HTTP/2 begins a
connection, so that a client sends no window updates for the connection (13 bytes with every message) before it has
received the difference, the Commits of some 1,600 tokens. A longer message gets the room that it needs."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""A full prompt with a full resumed sequence is 1.3 MB; nothing else comes near."""
MAX_METADATA_BYTES = 16 * 1024
RESOLVE_EVERY_MS = 2_000
"""Least time between two look-ups of a name whose addresses have failed; gRPC's own 30 s outlast a failover."""
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 500
CONNECT_TIMEOUT_MS = 20_000
"""The time of one attempt to connect: TCP and TLS take three to four round trips, of some seconds by satellite."""
MAX_CONCURRENT_RPCS = 4_096
"""Further calls are refused with RESOURCE_EXHAUSTED before they cost anything."""
MAX_STREAMS = 512
"""Calls at once over one connection; more wait at the client. A gateway with many sessions needs a few hundred."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""Time in which a connection must have become one of HTTP/2, with TLS if that is on."""
MAX_IDLE_MS = 300_000
"""Time after which a connection without calls is closed, which a stranger may hold; its client opens another one."""
MAX_CONNECTIONS = 8_192
"""Connections of a server; further ones are closed at once."""
PENDING = 512
"""Calls that have come and that no code of ours has seen. Beyond these gRPC cancels some, and all beyond twice as many,
at a fraction of what refusing them costs; honest callers try again. Each holds some 15 KB, and LOOKAHEAD_BYTES."""
OPEN_FILES = 65_536
"""Files and connections that a server's process may have open, where the system lets it raise its limit so far."""

_Options = tuple[tuple[str, int | str], ...]

_DEVICE: _Options = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", DEVICE_LOOKAHEAD_BYTES),
)
_FAR: _Options = (
    ("grpc.keepalive_timeout_ms", FAR_PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", FAR_PING_TIMEOUT_MS),
)
_BOUNDS: _Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
)
_CLIENT: _Options = (
    *_BOUNDS,
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # despite its name, it only bounds each attempt from below
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
    ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_EVERY_MS),
    ("grpc.use_local_subchannel_pool", 1),  # one caller's back-off must not delay another's failover
)
_SERVER: _Options = (
    *_BOUNDS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.keepalive_time_ms", SERVER_PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", SERVER_PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.so_reuseport", 0),  # a second process on the port must fail, not share it in silence
    ("grpc.server.max_pending_requests", PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING),
)


@dataclass(frozen=True)
class ServerTls:
    """PEM files that hold the certificate chain and its private key."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """The authorities by which every client must have a certificate; None lets clients come without one."""

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files. Raises BadRequest if one is missing or unreadable."""
        import grpc

        pair = (_read(self.key, "TLS key"), _read(self.cert, "TLS certificate"))
        clients = _read(self.client_ca, "TLS authority of clients") if self.client_ca else None
        return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


@dataclass(frozen=True)
class ClientTls:
    """PEM files of the authorities to trust, None for those that gRPC ships with, and of a certificate to show.

    cert, key: the client's own, for servers that ask for one.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises BadRequest if one is missing or unreadable, or the certificate has no key."""
        import grpc

        if (self.cert is None) != (self.key is None):
            raise BadRequest("a client's TLS certificate and its key go together: give both or neither", field="tls")
        return grpc.ssl_channel_credentials(
            _read(self.ca, "TLS authority") if self.ca else None,
            _read(self.key, "client's TLS key") if self.key else None,
            _read(self.cert, "client's TLS certificate") if self.cert else None,
        )


def channel(
    address: str, *, tls: ClientTls | None = None, insecure: bool = False, bulk: bool = False, far: bool = False
) -> grpc.aio.Channel:
    """Return a channel to `host:port`.

    bulk: for downloads, reads ahead as far as the link allows. far: for a device, whose round trip may be seconds.
    Raises BadRequest for a plain connection to another machine, unless `insecure`.
    """
    import grpc

    split_address(address)
    check_bind(address, tls, insecure)
    # A dictionary, since gRPC takes the first of two values of one option.
    by_name = dict((*_CLIENT, *(() if bulk else _DEVICE), *(_FAR if far else ())))
    if is_loopback(address):
        by_name["grpc.enable_http_proxy"] = 0
    options = tuple(by_name.items())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def server(*, max_rpcs: int = MAX_CONCURRENT_RPCS, admit: Admit | None = None) -> grpc.aio.Server:
    """Return a server without an address; `bind` gives it one.

    admit: decides about calls with one request before the request is read (wire.admission). Of max_rpcs calls at once
    tenants may have as many each as are free.
    """
    import grpc

    from outrider.wire.admission import AdmitBeforeReading  # needs gRPC, as above

    interceptors = [AdmitBeforeReading(admit, max_rpcs)] if admit is not None else []
    _raise_open_files()
    return grpc.aio.server(options=_SERVER, maximum_concurrent_rpcs=max_rpcs, interceptors=interceptors)


def _raise_open_files() -> None:
    """Let this process have more connections than the usual 1,024, with which a single stranger keeps others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(
    to: grpc.aio.Server,
    address: str,
    *,
    tls: ServerTls | None = None,
    insecure: bool = False,
) -> int:
    """Listen on `host:port` (port 0: any free one) and return the port. Raises BadRequest or
    Unavailable."""
    split_address(address)
    check_bind(address, tls, insecure)
    check_free(address)
    try:
        if tls is None:
            return to.add_insecure_port(address)
        return to.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        doubt = "has another program just taken it?" if tls is None else "do certificate and key belong together?"
        raise Unavailable(f"cannot listen on {address}; {doubt}") from error


async def start(server: grpc.aio.Server) -> None:
    """Start serving. If the caller is cancelled, gRPC completes its start all the same: otherwise `stop` would raise an
    InvalidStateError."""
    await asyncio.shield(server.start())


def check_free(address: str) -> None:
    """Raise Unavailable if `host:port` cannot be listened on: gRPC would say so on stderr first, in a line of C++."""
    try:
        for probe in listening(address):
            probe.close()
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {address} (--listen): {error.strerror}; end the program that does, or give another"
            " --listen HOST:PORT of this machine"
        ) from error


def listening(address: str) -> list[socket.socket]:
    """Return sockets that listen at all addresses of `host:port`, of both families: localhost has one of each.

    Raises OSError if one of them is taken, or if this machine has none.
    """
    host, port = split_address(address)
    names = ("127.0.0.1", "::1") if host.lower() == "localhost" else (host,)
    found = [socket.getaddrinfo(one, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE) for one in names]
    listeners: list[socket.socket] = []
    absent = OSError()
    for family, where in dict.fromkeys((kind, where) for one in found for kind, _, _, _, where in one):
        both = where[0] == "::" and socket.has_dualstack_ipv6()
        taken = listeners[0].getsockname()[1] if listeners else port  # one port for all, also where any may be taken
        try:
            listener = socket.create_server((where[0], taken, *where[2:]), family=family, dualstack_ipv6=both)
        except OSError as error:
            absent = OSError(error.errno, os.strerror(error.errno or 0))  # socket's own message is a long one
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a machine without IPv6, or without IPv4
                continue
            for one in listeners:
                one.close()
            if listeners and not port:
                return listening(address)  # another port may be free in both families
            raise absent from error
        listeners.append(listener)
    if not listeners:
        raise absent
    return listeners


def check_bind(address: str, tls: object | None, insecure: bool) -> None:
    """Refuse plain text beyond this machine: tickets and prompts would be readable on the way. Raises BadRequest."""
    if tls is None and not insecure and not is_loopback(address):
        raise BadRequest(
            f"{address} is not a loopback address and has no TLS; give a certificate (--tls-cert and --tls-key on a"
            " server; --tls or an authority's file on a client), or pass --insecure to allow plain text here",
            field="address",
        )


def is_loopback(address: str) -> bool:
    """Return whether connections to `host:port` never leave this machine; names but localhost are taken to."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_of(address: str) -> str:
    """Return through which proxy of the environment gRPC reaches `host:port`, as advice; "" if through none."""
    host, _ = split_address(address)
    name = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), "")
    exempt = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112 - as gRPC reads them
    if not name or is_loopback(address) or any(host.endswith(end) for end in re.split(r"[,\s]+", exempt) if end):
        return ""
    proxy = os.environ[name]
    return f"calls go through the proxy {proxy} ({name}); if it does not reach {host}, name that in no_proxy"


def _read(path: Path, what: str) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{what} {path} cannot be read: {error.strerror}; give a PEM file", field="tls") from error
    if b"-----BEGIN " not in pem:
        raise BadRequest(f"{what} {path} is no PEM; convert it (openssl x509 or openssl pkey)", field="tls")
    return pem
