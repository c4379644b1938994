"""Bound the connections of peers that have shown no credential, which a server of gRPC cannot: it has one bound for
all.

gRPC tells a connection only by a call's peer, so a server's connections are found among the files that this process has
open, and one beyond a bound is shut down, which gRPC takes for its end. Connections with a call that had a credential
are closed only where a tenant has so many that few are left for others, or has call after call refused over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from outrider.wire.channels import MAX_CONNECTIONS

log = logging.getLogger(__name__)

PER_HOST = 128
"""Connections without a credential that one host may have for longer than GRACE_S."""
GRACE_S = 2.0
"""Seconds in which an honest caller has shown its credential: a few round trips."""
IN_ALL = 256
"""Connections without a credential that all hosts may have together: some 17 KB each, and 75 KB with TLS."""
REFUSALS = 16
"""Calls of one host that may be refused in REFUSALS_S, for their credential or since too many are there that need none.
At each further one its connections without a credential are closed of which a call was refused, or much has come."""
REFUSALS_S = 10.0
CHECKS, CHECKS_S = 500, 10.0
"""Health checks of one host in CHECKS_S; further ones are refused."""
KNOWN_REFUSALS = 10 * REFUSALS
"""Refused calls in REFUSALS_S of a connection that has shown a credential before, which then counts as one without."""
CROWDED = 0.75
"""Share of the server's connections from which on the tenants that have most lose those beyond their share."""
LOOK_S, HURRIED_S = 0.25, 0.05
"""Seconds between two looks at the connections, and between two while calls are refused beyond the rate."""
REFUSED_BYTES = 4_096
"""What a connection may send, without showing a credential, while calls of its host are refused beyond the rate: the
metadata of a call or two. In a flood, few of the calls are seen that would tell which connections make it."""
FLOOD, FLOOD_S = 8, 1.0
"""Such connections of one host at a look from which on all of its connections without a credential are closed, and for
how many seconds: however many calls each makes before, together they would fill the server's queue."""
LOOK_SHARE = 4.0
"""Times the CPU time of a look until the next one, at least."""
CLEAN_S = 5.0
"""Seconds after which ended connections are forgotten."""
WARN_S = 60.0
"""Seconds between two warnings."""
_FILES = Path("/dev/fd")
"""The open files of a process, on Linux and macOS."""
_TCP_INFO_BYTES, _BYTES_RECEIVED = 192, 128
"""The size of what Linux tells of a connection (`struct tcp_info`), and where in it `tcpi_bytes_received` stands."""


def host_of(peer: str) -> str:
    """Return the host of a peer as gRPC names it, such as `ipv4:10.0.0.1:7700`; of a name without a port, all of it.

    Calls of one machine that come over different connections have different ports. Of IPv6 it is the network of 64
    bits, of which one customer usually has all addresses.
    """
    kind, _, address = unquote(peer).partition(":")
    host = address.rpartition(":")[0]
    if kind == "ipv6":
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_network((host.strip("[]").partition("%")[0], 64), strict=False))
    return host if kind in ("ipv4", "ipv6") else peer


class Strangers:
    """Knows which peers have shown no credential, and closes their connections beyond the bounds."""

    def __init__(self, per_host: int = PER_HOST, most: int = MAX_CONNECTIONS) -> None:
        """per_host: connections; 0 is no bound by host, for servers behind a proxy, whose address all peers have. most:
        connections of the server."""
        self._per_host = per_host
        self._crowded = int(CROWDED * most)
        self._known: dict[str, str] = {}
        """Peers of which a call had a credential, and the tenant of the first one, empty for nobody's."""
        self._known_refused: Counter[str] = Counter()
        """Refused calls by such peers, of the last REFUSALS_S at most."""
        self._checks: Counter[str] = Counter()
        """Health checks by host since `_checks_from`."""
        self._checks_from = -math.inf
        self._since: dict[str, float] = {}
        """The others: when they were first seen, the earliest first."""
        self._refused: Counter[str] = Counter()
        """Refused calls by host, of the last REFUSALS_S at most."""
        self._abusive: set[str] = set()
        """Peers whose call was refused beyond the rate."""
        self._flooding: dict[str, float] = {}
        """Hosts of which all connections without a credential are closed: until when."""
        self._port: int | None = None
        """That of the server, while its connections are bounded."""
        self._next_look = 0.0
        """When connections of refused calls may be looked for again."""
        self._closed = 0
        """Connections since the last warning."""

    def admitted(self, peer: str, tenant: str = "") -> None:
        """Note that a call of this peer, as gRPC names it, had a credential. tenant: whose; empty for nobody's."""
        self._known.setdefault(unquote(peer), tenant)

    def check_refused(self, peer: str) -> bool:
        """Count a health check of this peer's host, and return whether it is one too many."""
        if not self._per_host:
            return False
        if (now := time.monotonic()) - self._checks_from >= CHECKS_S:
            self._checks.clear()
            self._checks_from = now
        self._checks[host := host_of(peer)] += 1
        return self._checks[host] > CHECKS

    def refused(self, peer: str) -> None:
        """Note that a call of this peer had none that is valid, or needs none and was one too many."""
        if not self._per_host:
            return
        self._refused[host := host_of(peer)] += 1
        if self._refused[host] <= REFUSALS:
            return
        if (name := unquote(peer)) in self._known:
            self._known_refused[name] += 1
            if self._known_refused[name] <= KNOWN_REFUSALS:
                return
            del self._known[name]
        self._abusive.add(name)
        if self._port is not None and (now := time.monotonic()) >= self._next_look:
            self._close_abusive(self._port, now)  # here and now: a flood leaves other tasks of this loop little time

    def _close_abusive(self, port: int, now: float) -> None:
        """Close what is to be closed for the refused calls of its host."""
        peers, took_s = _connections(port)
        self._next_look = now + max(HURRIED_S, LOOK_SHARE * took_s)
        self._flooding = {host: until for host, until in self._flooding.items() if until > now}
        closing: dict[str, list[str]] = defaultdict(list)
        for peer in peers.keys() - self._known.keys():
            host = host_of(peer)
            if (
                host in self._flooding
                or peer in self._abusive
                or (self._refused[host] > REFUSALS and _received(peers[peer]) > REFUSED_BYTES)
            ):
                closing[host].append(peer)
        for host, found in closing.items():
            if len(found) >= FLOOD:
                self._flooding[host] = now + FLOOD_S
            self._closed += _shut_down(found, peers, self._known, port)
        self._abusive.clear()

    def to_close(self, peers: Collection[str], now: float) -> list[str]:
        """Return which of all open connections, by their peers, are to be closed; forget strangers that have gone.

        Those that have shown no credential for long go first, then those that came last, since the others are about to
        show theirs; if all have too many, those of the hosts that have most. now: seconds.
        """
        strangers = set(peers) - self._known.keys()
        self._since = {peer: at for peer, at in self._since.items() if peer in strangers}
        self._since.update((peer, now) for peer in peers if peer in strangers and peer not in self._since)
        closing: set[str] = set()
        late = [peer for peer, since in self._since.items() if now - since >= GRACE_S]
        ordered = [*late, *reversed([*self._since][len(late) :])]
        by_host: dict[str, list[str]] = defaultdict(list)
        for peer in ordered:
            by_host[host_of(peer)].append(peer)
        each = _fair(map(len, by_host.values()), IN_ALL)
        overdue = Counter(map(host_of, late))
        for host, held in by_host.items():
            beyond = overdue[host] - self._per_host if self._per_host else 0
            closing.update(held[: max(0, len(held) - each, beyond)])
        left = [peer for peer in ordered if peer not in closing]
        return [*closing, *left[: max(0, len(left) - IN_ALL)]]

    def crowding(self, peers: Collection[str]) -> list[str]:
        """Return which of all open connections are those of tenants beyond their share, the last of each, if few are
        left for others."""
        if len(peers) <= self._crowded:
            return []
        by_tenant: dict[str, list[str]] = defaultdict(list)
        for peer, tenant in self._known.items():
            if tenant and peer in peers:
                by_tenant[tenant].append(peer)
        held = sum(map(len, by_tenant.values()))
        each = _fair(map(len, by_tenant.values()), max(1, self._crowded - (len(peers) - held)))
        return [peer for of_tenant in by_tenant.values() for peer in of_tenant[each:]]

    @contextlib.asynccontextmanager
    async def bounded(self, port: int) -> AsyncIterator[None]:
        """Keep the bounds for the server that listens at a port, while the body runs."""
        self._port = port
        watching = asyncio.create_task(self._watch(port))
        try:
            yield
        finally:
            self._port = None
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, port: int) -> None:
        files, warned = _open_files(), float("-inf")
        cleaned = counted = time.monotonic()
        least = min(self._per_host or IN_ALL, IN_ALL)
        while True:
            await asyncio.sleep(HURRIED_S if self._flooding else LOOK_S)
            if (now := time.monotonic()) - counted >= REFUSALS_S:
                self._refused.clear()
                self._known_refused.clear()
                counted = now
            try:
                if self._flooding and now >= self._next_look:
                    self._close_abusive(port, now)
                # Only if there may be too many, since each look costs some microseconds for every connection.
                if now - cleaned < CLEAN_S and await asyncio.to_thread(_open_files) - files - len(self._known) <= least:
                    continue
                cleaned, before = now, set(self._known)
                peers, took_s = await asyncio.to_thread(_connections, port)
                for gone in before - peers.keys():  # not who has come and shown a credential meanwhile
                    self._known.pop(gone, None)
                for peer in (crowding := self.crowding(peers)):
                    self._known.pop(peer, None)
                if crowding:
                    log.warning("closing %d connections of tenants that leave others few", len(crowding))
                    await asyncio.to_thread(_shut_down, crowding, peers, (), port)
                if closing := self.to_close(peers, now):
                    self._closed += await asyncio.to_thread(_shut_down, closing, peers, self._known, port)
                if self._closed and now - warned >= WARN_S:
                    log.warning("closed %d connections of peers that have shown no credential", self._closed)
                    self._closed, warned = 0, now
                await asyncio.sleep(LOOK_SHARE * took_s)
            except Exception:  # a server without this bound is better than none
                log.exception("bounding the connections of strangers failed; trying again")
                await asyncio.sleep(CLEAN_S)


def _fair(counts: Iterable[int], most: int) -> int:
    """Return how many each may have so that all have no more than `most` together, at least 1."""
    left, ordered = most, sorted(counts)
    for at, count in enumerate(ordered):
        share = left // (len(ordered) - at)
        if count > share:
            return max(1, share)
        left -= count
    return most


def _open_files() -> int:
    return len(os.listdir(_FILES))


def _connections(port: int) -> tuple[dict[str, int], float]:
    """Return the connections that a server at a port has accepted, peer as gRPC names it -> file, and the seconds of
    this thread's CPU time that it took: on a busy machine it waits far longer."""
    began = time.thread_time()
    files = map(int, os.listdir(_FILES))
    found = {peer: file for file in files if (peer := _peer(file, port)) is not None}
    return found, time.thread_time() - began


@contextlib.contextmanager
def _as_socket(file: int) -> Iterator[socket.socket]:
    """Yield one of gRPC's files as a socket, and leave it open. Raises OSError for a file that is none."""
    found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=file)
    try:
        yield found
    finally:
        found.detach()


def _peer(file: int, port: int) -> str | None:
    """Return the peer of a file that is a connection to the port, None of any other."""
    try:
        with _as_socket(file) as found:
            own, other = found.getsockname(), found.getpeername()
    except OSError:
        return None
    if not isinstance(own, tuple) or own[1] != port:
        return None
    host = str(other[0]).removeprefix("::ffff:")
    return f"ipv6:[{host}]:{other[1]}" if ":" in host else f"ipv4:{host}:{other[1]}"


def _received(file: int) -> int:
    """Return how many bytes have come over a connection; 0 if the system does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        with _as_socket(file) as found:
            told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(told[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], sys.byteorder)


def _shut_down(closing: Iterable[str], files: dict[str, int], known: Collection[str], port: int) -> int:
    """Shut connections down, but for those that are known by now, and return how many. A file may be another one's by
    now, so its duplicate, which stays, is looked at first."""
    closed = 0
    for peer in closing:
        if peer in known:
            continue
        try:
            duplicate = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=os.dup(files[peer]))
        except OSError:
            continue
        with duplicate, contextlib.suppress(OSError):
            if _peer(duplicate.fileno(), port) == peer:
                duplicate.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed
