"""The coordinator's memory: the only module that imports redis. Every write is one Lua script, so it is all or nothing.

Nothing here is needed by a live session, and everything can be lost: verifiers register again, tickets carry what a
resume needs, epochs start from the clock. While Redis is away every method raises Unavailable and reconnects by itself.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

try:
    import redis.asyncio as aioredis
    from redis import exceptions
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError as error:
    raise ImportError("the coordinator needs redis: pip install 'outrider[coordinator]'") from error

from coordinator.records import (
    Candidate,
    Placed,
    PlacementRequest,
    Prior,
    Registration,
    ReportContext,
    SessionStatus,
    VerifierStatus,
    WindowBounds,
    WindowDecision,
    WorkloadKey,
)
from coordinator.store import keys, priors, redis_codec
from outrider.core.errors import BadRequest, Killed, Unavailable
from outrider.core.histogram import CALL_S, Histogram
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry

SCRIPTS = Path(__file__).parent / "lua"
MAX_CONNECTIONS = 32
"""More only queue inside Redis, which runs one command at a time."""
SESSIONS_AT_ONCE = 256
"""Statistics are written in lots, so that no script holds Redis for more than about a millisecond."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.ClusterDownError)
_BY_NAME = "run"
"""The method that is given what it does."""
_AWAY_REPLIES = ("LOADING", "MASTERDOWN", "OOM", "BUSY", "NOREPLICAS", "TRYAGAIN", "MISCONF")


def _reaching(
    method: Callable[Concatenate[Store, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Store, _P], Coroutine[Any, Any, _T]]:
    """The method, with every way of not reaching Redis made Unavailable."""

    @functools.wraps(method)
    async def wrapped(self: Store, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        name, begun = method.__name__, time.perf_counter()
        if name == _BY_NAME:
            name = str(args[0])  # the script's, of which there are as few
        try:
            return await method(self, *args, **kwargs)
        except _AWAY as error:
            self.counters.failed[name, type(error).__name__] += 1
            raise self._unavailable(error) from error
        except exceptions.ResponseError as error:
            reply = next((reply for reply in _AWAY_REPLIES if str(error).startswith(reply)), "")
            self.counters.failed[name, reply or "ResponseError"] += 1
            if reply:
                raise self._unavailable(error) from error
            raise
        finally:
            self.counters.calls_s[name].add(time.perf_counter() - begun)

    return wrapped


def _call_histograms() -> defaultdict[str, Histogram]:
    return defaultdict(lambda: Histogram(CALL_S))


@dataclass
class StoreCounters:
    """Count the calls of one store since the process began."""

    calls_s: defaultdict[str, Histogram] = field(default_factory=_call_histograms)
    """Seconds per call, by the store's method, whether or not it succeeded."""
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed calls, by method and by the name of the Redis error."""


class Store:
    """One pool of connections. Safe to share between tasks; close it when done."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        """Connects at first use. Raises BadRequest for a URL that redis does not understand."""
        self.name = without_credentials(url)
        self.counters = StoreCounters()
        try:
            pool = aioredis.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                decode_responses=True,
                retry=Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),  # a pooled connection may be stale
            )
        except ValueError as error:
            raise BadRequest(
                f"redis is {self.name!r}, must be redis://, rediss:// or unix://", field="redis"
            ) from error
        self._redis = aioredis.Redis.from_pool(pool)
        self._scripts: dict[str, Any] = {
            path.stem: self._redis.register_script(path.read_text()) for path in sorted(SCRIPTS.glob("*.lua"))
        }

    async def close(self) -> None:
        """Drop the connections."""
        await self._redis.aclose()

    @_reaching
    async def register(self, registration: Registration, lease_ms: int) -> bool:
        """Start a lease. True where it replaced a live instance of the same id."""
        fields = redis_codec.flat(redis_codec.of_registration(registration))
        arguments = [registration.verifier_id, registration.instance, lease_ms, *fields]
        return bool(await self._run("register", _lease_keys(registration.verifier_id), arguments))

    @_reaching
    async def report(
        self,
        verifier_id: str,
        instance: int,
        verifier: VerifierTelemetry,
        sessions: Sequence[SessionTelemetry],
        *,
        lease_ms: int,
    ) -> ReportContext | None:
        """Renew the lease and the seats of the sessions listed, and keep what is said of them.

        None where the lease is lost or someone else's.
        """
        fields = redis_codec.flat(redis_codec.of_telemetry(verifier))
        ids = [session.session_id for session in sessions]
        arguments = [verifier_id, instance, lease_ms, lease_ms, len(fields), *fields, *ids]
        touched = [key(session_id) for session_id in ids for key in (keys.closed, keys.session)]
        leased = [*_lease_keys(verifier_id), keys.cordon(verifier_id)]
        known, *found = await self._run("report", [*leased, *touched], arguments)
        if not known:
            return None
        drain, killed, facts = found
        kinds = priors.kinds(ids, facts, [session.draft_release for session in sessions])
        for start in range(0, len(sessions), SESSIONS_AT_ONCE):
            await self._observe(verifier_id, sessions[start : start + SESSIONS_AT_ONCE], kinds, 2 * lease_ms)
        return ReportContext(kinds, tuple(killed), bool(drain))

    @_reaching
    async def priors(self, kinds: Iterable[WorkloadKey]) -> dict[WorkloadKey, Prior]:
        """What was seen of each of these kinds lately, where anything was."""
        asked = list(dict.fromkeys(kinds))
        if not asked:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for kind in asked:
                pipe.hgetall(priors.key(kind))
            replies = await pipe.execute()
        return {kind: priors.read(record) for kind, record in zip(asked, replies, strict=True) if record}

    @_reaching
    async def windows(self, verifier_ids: Sequence[str]) -> dict[str, WindowDecision]:
        """Session id -> what was decided last, of all sessions on these verifiers."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for verifier_id in verifier_ids:
                pipe.hgetall(keys.windows(verifier_id))
            replies = await pipe.execute()
        decisions = [
            redis_codec.decision_from_json(verifier_id, written)
            for verifier_id, reply in zip(verifier_ids, replies, strict=True)
            for written in reply.values()
        ]
        return {decision.session_id: decision for decision in decisions if decision is not None}

    @_reaching
    async def decide(self, verifier_id: str, windows: Iterable[WindowDecision], *, keep_ms: int) -> None:
        """Keep what was decided of a verifier's sessions, in place of what was before."""
        arguments: list[Any] = [keep_ms]
        for window in windows:
            arguments += [window.session_id, redis_codec.decision_to_json(window)]
        await self._run("decide", [keys.windows(verifier_id)], arguments)

    @_reaching
    async def bounds(self, session_ids: Sequence[str]) -> dict[str, WindowBounds]:
        """What an operator allows these sessions, where he has said so; "" asks for what all others are allowed."""
        if not session_ids:
            return {}
        values = await self._redis.mget([keys.bounds(session_id) for session_id in session_ids])
        found = {i: redis_codec.bounds_from_json(value) for i, value in zip(session_ids, values, strict=True)}
        return {session_id: bounds for session_id, bounds in found.items() if bounds is not None}

    @_reaching
    async def knows(self, session_id: str) -> bool:
        """Whether the session was placed, and is not over as far as anybody said."""
        return bool(await self._redis.exists(keys.session(session_id)))

    @_reaching
    async def bound(self, session_id: str, bounds: WindowBounds | None, *, keep_ms: int | None) -> None:
        """Allow a session's window so much from now on; None lifts the bounds. keep_ms: None keeps them until then."""
        if bounds is None:
            await self._redis.delete(keys.bounds(session_id))
        else:
            await self._redis.set(keys.bounds(session_id), redis_codec.bounds_to_json(bounds), px=keep_ms)

    @_reaching
    async def deregister(self, verifier_id: str, instance: int) -> bool:
        """End the lease. False where it was not this instance's."""
        return bool(await self._run("deregister", _lease_keys(verifier_id), [verifier_id, instance]))

    @_reaching
    async def fleet(self) -> list[str]:
        """Ids of all who have a valid lease, in order."""
        return sorted(await self._run("fleet", [keys.FLEET], []))

    @_reaching
    async def verifiers(self, ids: Sequence[str] | None = None) -> list[VerifierStatus]:
        """Those of these with a valid lease, by id; None: everybody."""
        asked = await self.fleet() if ids is None else ids
        async with self._redis.pipeline(transaction=False) as pipe:
            for verifier_id in asked:
                pipe.hgetall(keys.verifier(verifier_id))
                pipe.pttl(keys.verifier(verifier_id))
                pipe.exists(keys.cordon(verifier_id))
            replies = await pipe.execute()
        found = zip(asked, replies[::3], replies[1::3], replies[2::3], strict=True)
        return [
            redis_codec.verifier_status(verifier_id, record, ttl, cordon)
            for verifier_id, record, ttl, cordon in found
            if record
        ]

    @_reaching
    async def steer(self, verifier_id: str, order: str, *, keep_ms: int) -> bool:
        """`cordon`, `uncordon` or `drain`. False where nobody of this id is registered or has a cordon to be lifted."""
        touched = [keys.verifier(verifier_id), keys.cordon(verifier_id)]
        return bool(await self._run("steer", touched, [order, keep_ms]))

    @_reaching
    async def seated(self, verifier_ids: Sequence[str], most: int) -> tuple[list[tuple[str, str]], int]:
        """(verifier id, session id) of those that hold a seat on one of these, `most` at most; how many there are."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for verifier_id in verifier_ids:
                pipe.zrange(keys.seats(verifier_id), 0, most - 1)
                pipe.zcard(keys.seats(verifier_id))
            replies = await pipe.execute()
        held = [(v, s) for v, sessions in zip(verifier_ids, replies[::2], strict=True) for s in sessions]
        return held[:most], sum(replies[1::2])

    @_reaching
    async def seats_of(self, verifier_id: str) -> list[str]:
        """Ids of all sessions that hold a seat there, in order."""
        return sorted(map(str, await self._redis.zrange(keys.seats(verifier_id), 0, -1)))

    @_reaching
    async def sessions(self, held: Iterable[tuple[str, str]]) -> list[SessionStatus]:
        """What is known of those of (verifier id, session id) that are there, and not on another verifier by now."""
        asked = list(held)
        async with self._redis.pipeline(transaction=False) as pipe:
            for _, session_id in asked:
                pipe.hgetall(keys.stats(session_id))
                pipe.hgetall(keys.session(session_id))
            replies = await pipe.execute()
        records = zip(asked, replies[::2], replies[1::2], strict=True)
        return [
            status
            for (seat_on, session_id), reported, placed in records
            if (status := redis_codec.session_status(session_id, seat_on, reported, placed)).verifier_id == seat_on
        ]

    @_reaching
    async def where(self, session_id: str) -> tuple[str, ...]:
        """Verifiers that may serve a session: the one that reports it, then the one where it was placed last."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.stats(session_id), "verifier")
            pipe.hget(keys.session(session_id), "verifier")
            return tuple(dict.fromkeys(name for name in await pipe.execute() if name))

    @_reaching
    async def kill_session(self, session_id: str, *, keep_ms: int) -> tuple[str, ...]:
        """End a session for good: its seats are free, no ticket brings it back. Where it was; empty: it is unknown."""
        where = await self.where(session_id)
        if where:
            seats = [keys.seats(verifier_id) for verifier_id in where]
            touched = [keys.session(session_id), keys.stats(session_id), keys.closed(session_id), *seats]
            await self._run("kill", touched, [session_id, keep_ms])
        return where

    @_reaching
    async def place(
        self,
        session_id: str,
        tenant: str,
        need: PlacementRequest,
        among: Sequence[Candidate],
        *,
        floor: int,
        span: int,
        seat_ms: int,
        session_ms: int,
        load_weight_ms: float,
    ) -> Placed | int:
        """Take a seat, or return how many of the candidates are alive (and have no room). Raises Killed.

        `floor`: the greatest epoch that the asker knows; every epoch of the placement is greater.
        """
        touched = [keys.session(session_id), keys.closed(session_id)]
        for candidate in among:
            name = candidate.verifier_id
            touched += [keys.verifier(name), keys.seats(name), keys.cordon(name)]
        weights, tokenizer = need.weights or ("", "")
        name = "" if need.weights else need.target  # weights bind, names may change
        arguments: list[Any] = [session_id, tenant, floor, span, seat_ms, session_ms, load_weight_ms]
        arguments += [name, weights, tokenizer, need.numerics_class, need.draft, need.traffic]
        for candidate in among:
            arguments += [candidate.verifier_id, candidate.rtt_ms, int(candidate.failed)]
        reply = await self._run("place", touched, arguments)
        if not reply[0]:
            if reply[1] < 0:
                raise Killed(f"an operator has ended session {session_id}; it cannot be resumed")
            return int(reply[1])
        epoch, primary, record, standby, standby_record = reply
        return Placed(
            epoch, redis_codec.seat(primary, record), redis_codec.seat(standby, standby_record) if standby else None
        )

    @_reaching
    async def close_session(self, session_id: str, served_by: str, *, lease_ms: int) -> None:
        """Forget a session and free its seat on the verifier that a ticket named and on the one it was placed on."""
        placed = await self._redis.hget(keys.session(session_id), "verifier")
        seats = [keys.seats(str(verifier_id)) for verifier_id in {served_by, placed} if verifier_id]
        touched = [keys.session(session_id), keys.stats(session_id), keys.closed(session_id), *seats]
        await self._run("close", touched, [session_id, 2 * lease_ms])

    @_reaching
    async def share_key(self, key_id: str, public_key: bytes, forget_ms: int) -> dict[str, bytes]:
        """Vouch for a coordinator's public key; returns everybody's."""
        entries = await self._run("public_keys", [keys.PUBLIC_KEYS], [f"{key_id}:{public_key.hex()}", forget_ms])
        return {name: bytes.fromhex(raw) for name, raw in (entry.split(":", 1) for entry in entries)}

    async def _observe(
        self, verifier_id: str, sessions: Sequence[SessionTelemetry], kinds: Mapping[str, WorkloadKey], keep_ms: int
    ) -> None:
        arguments: list[Any] = [verifier_id, keep_ms, priors.POSITIONS, priors.OUTCOMES, priors.KEPT_MS]
        touched = []
        for s in sessions:
            kind = kinds.get(s.session_id)
            arguments += [f"{s.epoch:020d}", redis_codec.session_bytes(s), s.committed]
            arguments += [priors.digits(s.acceptance_history) if kind else "", s.draft_ms, s.nodes_per_level]
            touched += [keys.stats(s.session_id), keys.closed(s.session_id), priors.key(kind or priors.NO_KIND)]
        await self._run("observe", touched, arguments)

    @_reaching
    async def run(self, script: str, touched: Sequence[str], arguments: Sequence[Any]) -> Any:
        """A script by its name, for those who keep other things here than sessions (`releases.store`)."""
        return await self._run(script, touched, arguments)

    async def _run(self, script: str, touched: Sequence[str], arguments: Sequence[Any]) -> Any:
        return await self._scripts[script](keys=list(touched), args=list(arguments))

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"the coordinator's store at {self.name} cannot be used ({type(error).__name__}: {str(error)[:200]}); live"
            " sessions go on, opening and resuming work again once it is back"
        )


def without_credentials(url: str) -> str:
    """The URL as it may be shown and logged."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "no URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _lease_keys(verifier_id: str) -> list[str]:
    return [keys.verifier(verifier_id), keys.seats(verifier_id), keys.FLEET]
