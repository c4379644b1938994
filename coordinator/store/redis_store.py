"""Run scripts and read commands on Redis. This is the only module that imports redis.

Every write to more than one key is one transaction (`change`) or, where many of them would meet at one key, one Lua
script, so it happens whole or not at all. Nothing in Redis is needed by a
live session, and everything there can be lost: verifiers register again, tickets carry what a resume needs, epochs
start from the clock. While Redis is away every call raises Unavailable; the connection comes back by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

from outrider.core.errors import BadRequest, Unavailable
from outrider.core.histogram import CALL_S, Histogram

SCRIPTS = Path(__file__).parent / "lua"
TIMEOUT_S = 2.0
"""Longest wait for one command; callers then try another coordinator."""
MAX_CONNECTIONS = 32
"""More only queue inside Redis, which runs one command at a time."""
_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
)
_AWAY_REPLIES = ("LOADING", "MASTERDOWN", "OOM", "BUSY", "NOREPLICAS", "MISCONF")
ATTEMPTS = 16
"""Attempts at a transaction: each fails only because another one went through."""
Command = Sequence[Any]
_R = TypeVar("_R")
_IN_PIPELINE = "of pipeline caused error: "
"""How the client begins the reply to a command of a pipeline, which it gives as a tuple's text."""


def call_histograms() -> defaultdict[str, Histogram]:
    """Return histograms of seconds per call, by name."""
    return defaultdict(lambda: Histogram(CALL_S))


@dataclass
class StoreCounters:
    """Counts the calls of one store since the process began."""

    calls_s: defaultdict[str, Histogram] = field(default_factory=call_histograms)
    """Seconds per call, by operation, whether or not it succeeded."""
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed calls, by operation and by the name of the Redis error."""


class RedisStore:
    """A pool of connections that is safe to share between tasks; close it when done."""

    def __init__(self, url: str) -> None:
        """Prepare connections, which are made at first use. Raises BadRequest for a URL that redis does not accept."""
        self.name = without_credentials(url)
        self.counters = StoreCounters()
        try:
            self._redis = _client(url, TIMEOUT_S)
        except ValueError as error:
            raise BadRequest(
                f"redis is {self.name!r}, must be a redis://, rediss:// or unix:// URL", field="redis"
            ) from error
        self._scripts: dict[str, Any] = {
            path.stem: self._redis.register_script(path.read_text()) for path in sorted(SCRIPTS.glob("*.lua"))
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script of the folder `lua` and return its reply. Raises Unavailable."""
        with self._counted(script):
            return await self._scripts[script](keys=keys, args=arguments)

    async def call(self, operation: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip, counted as `operation`, and return their replies. Raises Unavailable."""
        if not commands:
            return []
        with self._counted(operation):
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

    async def now_unix(self) -> float:
        """Return the time by Redis' clock, in seconds. Raises Unavailable."""
        [(seconds, micros)] = await self.call("time", [("TIME",)])
        return int(seconds) + int(micros) / 1e6

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        """Count a call, and raise Unavailable for every way of not reaching Redis."""
        begun = time.perf_counter()
        try:
            yield
        except _AWAY as error:
            self.counters.failed[operation, type(error).__name__] += 1
            raise self._unavailable(error) from error
        except exceptions.ResponseError as error:
            words = str(error).rpartition(_IN_PIPELINE)[2].lstrip("(\"'")
            reply = next((reply for reply in _AWAY_REPLIES if words.startswith(reply)), "")
            self.counters.failed[operation, reply or "ResponseError"] += 1
            if reply:
                raise self._unavailable(error) from error
            raise
        finally:
            self.counters.calls_s[operation].add(time.perf_counter() - begun)

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"the coordinator's store at {self.name} cannot be used ({type(error).__name__}: {str(error)[:200]}); live"
            " sessions go on, opening and resuming work again once it is back"
        )


def _client(url: str, timeout_s: float) -> Any:
    """Return a client. Raises ValueError."""
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
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
    """Return the URL as it may be shown and logged."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "no URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
