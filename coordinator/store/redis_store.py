"""Run scripts and read commands on Redis. This is the only module that imports redis.

Every write to more than one key is one transaction (`change`) or, where many of them would meet at one key, one Lua
script, so it happens whole or not at all. Nothing in Redis is needed by a
live session, and everything there can be lost: verifiers register again, tickets carry what a resume needs, epochs
start from the clock. While Redis is away every call raises Unavailable; the connection comes back by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

try:
    import redis.asyncio as aioredis
    from redis import exceptions
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError as error:
    raise ImportError("the coordinator needs redis: pip install 'outrider[coordinator]'") from error

from outrider.core.errors import BadRequest, InternalError, Unavailable
from outrider.core.histogram import CALL_S, Histogram
from outrider.wire.telemetry import WRONG_CLOCK_S

log = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "lua"
TIMEOUT_S = 2.0
"""Longest wait for one command; callers then try another coordinator."""
MAX_CONNECTIONS = 32
"""More only queue inside Redis, which runs one command at a time."""
_CLUSTER = "this is a Redis cluster: give a Redis that is not split over nodes"
_CAUSES = (
    ("OOM|OutOfMemory", "Redis is out of memory: raise its maxmemory, or give the coordinators a Redis of their own"),
    ("MISCONF", "Redis takes no writes, since it cannot save to its disk: see Redis' own log"),
    ("READONLY|ReadOnly", "this Redis is a replica, which takes no writes: give the primary's address"),
    ("NOPERM|NoPermission", "its user lacks rights in Redis: docs/operations.md lists those that it needs"),
    ("NOAUTH|Authentication", "Authentication failed: the URL's user name and password must be those of a Redis user"),
    ("LOADING|BusyLoading", "Redis is still reading its data from disk"),
    ("BUSY", "a script of somebody else keeps Redis busy"),
    ("MASTERDOWN|MasterDown", "this Redis is a replica without its primary"),
    ("NOREPLICAS", "Redis takes no writes without its replicas"),
    ("MOVED|Moved|CROSSSLOT|CrossSlot|CLUSTERDOWN|ClusterDown", _CLUSTER),
    ("unknown command", "what answers lacks commands of Redis: give Redis 6 or later, or Valkey, itself"),
)
"""What begins a reply of Redis or names its error, and what it means in plain words; another try may succeed later.

Redis 6 has it within the reply, behind the name of a script and a line.
"""
ATTEMPTS = 16
"""Attempts at a transaction: each fails only because another one went through."""
_PLACE = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d+)?(/\d*)?|/[^@]+", re.ASCII)
"""HOST, HOST:PORT or HOST:PORT/NUMBER; or the path of a socket."""
_IN_PIPELINE = "of pipeline caused error: "
"""How the client begins the reply to a command of a pipeline, behind the command, which messages must not repeat."""
Command = Sequence[Any]
_R = TypeVar("_R")


def call_histograms() -> defaultdict[str, Histogram]:
    """Return histograms of seconds per call, by name."""
    return defaultdict(lambda: Histogram(CALL_S))


class RedisStore:
    """A pool of connections that is safe to share between tasks; close it when done."""

    def __init__(self, url: str) -> None:
        """Prepare connections, which are made at first use. Raises BadRequest for a URL that redis does not accept."""
        self.name = without_credentials(url)
        self.calls_s = call_histograms()
        """Seconds per call, by operation, whether or not it succeeded."""
        self.failed = Counter[tuple[str, str]]()
        """Failed calls, by operation and by the name of the Redis error."""
        try:
            self._redis = _client(url, TIMEOUT_S)
        except ValueError as error:
            raise BadRequest(
                f"redis is {self.name}, must be a redis://, rediss:// or unix:// URL; write what is none of letters,"
                " digits, - . _ ~ in its user name and password as %XX, such as %40 for @, %2F for / and %23 for #",
                field="redis",
            ) from error
        self._scripts = {path.stem: path.read_text() for path in sorted(SCRIPTS.glob("*.lua"))}
        self._hashes = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._scripts.items()}

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script of the folder `lua` and return its reply. Raises Unavailable."""
        [reply] = await self.call(script, [self.script(script, keys, arguments)])
        return reply

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Command:
        """Return the command for `call` that runs a script of the folder `lua`."""
        return "EVALSHA", self._hashes[name], len(keys), *keys, *arguments

    async def call(self, operation: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip, counted as `operation`, and return their replies. Raises Unavailable.

        If Redis has begun anew and lacks a script, all are sent twice: what stands beside a script must allow that.
        """
        if not commands:
            return []
        with self._counted(operation):
            try:
                return await self._sent(commands)
            except exceptions.NoScriptError:
                await self._sent([("SCRIPT", "LOAD", text) for text in self._scripts.values()])
                return await self._sent(commands)

    async def _sent(self, commands: Sequence[Command]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(await pipe.execute())

    async def change(
        self,
        operation: str,
        watched: Sequence[str],
        reads: Sequence[Command],
        decide: Callable[..., tuple[_R, Sequence[Command]]],
    ) -> _R:
        """Write what `decide` makes of the replies to `reads`, all of it unless a watched key changes meanwhile.

        decide: takes the replies and returns a result and the commands that write, none to leave all as it is. If a
        watched key has changed, it is called again with new replies. Counted as `operation`. Raises Unavailable.
        """
        with self._counted(operation):
            for _ in range(ATTEMPTS):
                async with self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(*watched)
                    result, commands = decide(*[await pipe.execute_command(*command) for command in reads])
                    if not commands:
                        return result
                    pipe.multi()
                    for command in commands:
                        pipe.execute_command(*command)
                    with contextlib.suppress(exceptions.WatchError):
                        await pipe.execute()
                        return result
        raise Unavailable(f"{watched[0]} changes all the time in the coordinator's store; ask again", retry_after_s=1.0)

    async def warn(self) -> None:
        """Log it if Redis' clock is wrong, or it may throw keys away of its own accord, as far as its user may ask."""
        with contextlib.suppress(exceptions.RedisError):
            seconds, micros = await self._redis.time()
            ahead_s = seconds + micros / 1e6 - time.time()
            if abs(ahead_s) > WRONG_CLOCK_S:
                log.warning(
                    "the clock of Redis at %s is %+.0f s off this machine's: set both, as by NTP", self.name, ahead_s
                )
            memory = await self._redis.info("memory")
            if memory.get("maxmemory") and memory.get("maxmemory_policy") != "noeviction":
                log.warning(
                    "Redis at %s throws keys away when its memory is full (maxmemory-policy %s): sessions, tenants and"
                    " releases would vanish; set noeviction",
                    self.name,
                    memory.get("maxmemory_policy"),
                )

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        """Count a call, and raise Unavailable for every way of not reaching Redis."""
        begun = time.perf_counter()
        try:
            yield
        except (exceptions.RedisError, UnicodeError) as error:
            kind, said = type(error).__name__, str(error).rpartition(_IN_PIPELINE)[2][:200]
            found = ((re.search(rf"\b({words})", f"{kind} {said}"), cause) for words, cause in _CAUSES)
            word, cause = next(((match[1], cause) for match, cause in found if match), ("", ""))
            self.failed[operation, word if word.isupper() else kind] += 1
            away = isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError)
            if not (cause or away):
                raise InternalError(f"Redis at {self.name} refuses {operation!r}: {kind}: {said}") from error
            raise Unavailable(
                f"the coordinator's store at {self.name} cannot be used ({cause or f'{kind}: {said}'}); live sessions"
                " go on, opening and resuming work again once it is back"
            ) from error
        finally:
            self.calls_s[operation].add(time.perf_counter() - begun)


def _client(url: str, timeout_s: float) -> Any:
    """Return a client. Raises ValueError."""
    if not _readable(url):
        raise ValueError("a password with characters that end a URL's host")
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options["protocol"] = 2  # proxies and older servers refuse HELLO, with which the next one begins
    options |= {"decode_responses": True, "encoding_errors": "surrogateescape"}  # protobuf messages are no text
    options["retry"] = Retry(NoBackoff(), 1, (exceptions.ConnectionError,))  # a pooled connection may be stale
    pool = aioredis.BlockingConnectionPool.from_url
    return aioredis.Redis.from_pool(pool(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options))


def milliseconds(time_reply: Sequence[Any]) -> int:
    """Return the reply to TIME in milliseconds."""
    seconds, micros = time_reply
    return 1000 * int(seconds) + int(micros) // 1000


def scored(reply: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the members and scores of a reply with scores: pairs, or one after the other by the older protocol."""
    flat = bool(reply) and isinstance(reply[0], str)
    pairs = zip(reply[::2], reply[1::2], strict=True) if flat else reply
    return [(member, int(float(score))) for member, score in pairs]


def without_credentials(url: str) -> str:
    """Return the URL as it may be shown and logged: less and less of it, the less it reads as one."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("redis", "rediss", "unix"):
        return "no such URL"
    if not _readable(url):
        return f"{scheme}://***"
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def _readable(url: str) -> bool:
    """Return whether a URL's credentials end where its parser thinks so, and what follows is a place."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    place = parts.netloc.rpartition("@")[2] + parts.path
    hidden = "@" in parts.path + parts.query + parts.fragment or parts.fragment
    return not hidden and _PLACE.fullmatch(place) is not None
