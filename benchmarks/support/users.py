"""Run users: SDK clients in processes of their own, each of which generates one text after the other.

Every user is a device of its own, which loads its draft and drafts as any device does. The draft passes compete for the
cores that the processes run on, so `busy` stands beside each figure: near 1 the devices' cores bound it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.network_proxy import DelayProxy
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import Unavailable
from outrider.processes import tied_to_this_process

ROOT = Path(__file__).resolve().parents[2]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 20_260_731}
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0}
TEXT_S = 300.0
"""Seconds after which a text fails, because the service does not work."""
TAIL = 64
LOOPS = 0.75
"""Share of the 4-grams of a text's last TAIL tokens that came before, from which on the target goes round in a loop."""


@dataclass(frozen=True)
class Users:
    """Describe users, where they are served, and what they ask for."""

    coordinator: str
    verifier: str
    """Address of the verifier that is `rtt_ms` away."""
    prompts: Sequence[Sequence[int]]
    count: int = 1
    draft: str | None = None
    """As the SDK's `draft`: `auto`, the path of a file, or None."""
    rtt_ms: float = 0.0
    options: dict[str, Any] = field(default_factory=lambda: SAMPLED)
    """Of each request."""
    texts: int | None = None
    """Texts of each user, None for one of each prompt but those to warm up with."""
    seconds: float | None = None
    """Time after which what still runs is cut off; texts begin again until then."""
    warm: int = 1
    """Prompts, the first ones, that each user asks before, uncounted, so that its draft has learned how good it is."""


@dataclass(frozen=True)
class Text:
    """Hold one text, as its user got it. Times are on the clock that all processes of a machine share."""

    user: int
    prompt: int
    tokens: tuple[int, ...]
    begun_s: float
    delivered_s: tuple[float, ...]
    """When each token came."""
    steps: int
    """Messages that brought tokens."""
    evaluated: int
    """Tokens of the device's draft that the target evaluated."""
    accepted: int
    bytes_up: int = 0
    """Bytes of the messages that the device sent, without headers."""
    bytes_down: int = 0
    whole: bool = True
    """Whether it was not cut off."""

    @property
    def first_token_s(self) -> float:
        return self.delivered_s[0] - self.begun_s

    @property
    def rate(self) -> float:
        """Return the tokens per second from the first token on."""
        first = sum(at == self.delivered_s[0] for at in self.delivered_s)
        seconds = self.delivered_s[-1] - self.delivered_s[0]
        return (len(self.tokens) - first) / seconds if seconds else 0.0


@dataclass(frozen=True)
class Played:
    """Hold the texts of users that ran at the same time. busy: share of their cores' time that their processes took."""

    texts: tuple[Text, ...]
    busy: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all users together, while all of them were generating."""
        by_user: dict[int, list[float]] = {}
        for text in self.texts:
            by_user.setdefault(text.user, []).extend(text.delivered_s)
        begin, end = max(map(min, by_user.values())), min(map(max, by_user.values()))
        return sum(begin < at <= end for times in by_user.values() for at in times) / (end - begin)

    @property
    def rate(self) -> float:
        """Return the tokens per second of a text from its first token on, in the median."""
        return statistics.median(text.rate for text in self.texts)

    @property
    def first_token_ms(self) -> float:
        return 1e3 * statistics.median(text.first_token_s for text in self.texts)

    @property
    def acceptance_length(self) -> float:
        """Return the mean tokens of a step of the target."""
        return sum(len(text.tokens) for text in self.texts) / sum(text.steps for text in self.texts)

    @property
    def degenerate(self) -> int:
        """Return how many texts end in a loop."""
        return sum(degenerates(text.tokens) for text in self.texts)

    def differing(self, reference: Played) -> int:
        """Return how many texts are not those of the reference, as far as those go that were cut off."""
        expected = {text.prompt: text.tokens for text in reference.texts if text.whole}
        pairs = ((text, expected[text.prompt]) for text in self.texts if text.prompt in expected)
        return sum(text.tokens != (wanted if text.whole else wanted[: len(text.tokens)]) for text, wanted in pairs)


def degenerates(tokens: Sequence[int]) -> bool:
    """Return whether a text ends in a loop, as small targets' texts do, which any draft predicts well."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    first = {gram: i for i, gram in reversed(list(enumerate(grams)))}
    tail = range(max(0, len(grams) - TAIL), len(grams))
    return len(tail) >= TAIL // 2 and sum(first[grams[i]] < i for i in tail) > LOOPS * len(tail)


async def play(users: Users, cores: Sequence[int]) -> Played:
    """Run the users on these cores, one process for each core, and return what they got. Raises Unavailable."""
    cores = cores[: users.count]
    async with contextlib.AsyncExitStack() as stack:
        running = []
        for number, core in enumerate(cores):
            shares = {"first": number, "every": len(cores)} | asdict(users)
            running.append(await stack.enter_async_context(_process(core, json.dumps(shares).encode())))
        for process in running:
            await _line(process)  # it is ready
        for process in running:
            if process.stdin is not None:
                process.stdin.write(b"go\n")
        answers = await asyncio.gather(*map(_line, running))
    texts = (Text(**text) for answer in answers for text in answer["texts"])
    return Played(tuple(texts), sum(answer["busy"] for answer in answers) / len(answers))


@contextlib.asynccontextmanager
async def _process(core: int, request: bytes) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(*tied_to_this_process(), "taskset", "--cpu-list", str(core), sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 28,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        if process.stdin is not None:
            process.stdin.write(request + b"\n")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> Any:
    line = b"" if process.stdout is None else await process.stdout.readline()
    if not line:
        raise Unavailable("the devices have ended; their error stands above")
    return json.loads(line)


class Process:
    """Runs the users of one process: those whose number is `first`, and every so many after it."""

    def __init__(self, users: Users, first: int, every: int) -> None:
        self._users = users
        self._numbers = range(first, users.count, every)
        self._texts: list[Text] = []

    async def run(self) -> None:
        """Prepare, wait for a line on stdin, and print what the users got."""
        users = self._users
        async with contextlib.AsyncExitStack() as stack:
            ways = {}
            for address in filter(None, (users.coordinator, users.verifier)):
                proxy = DelayProxy(address, users.rtt_ms)
                ways[address] = (await stack.enter_async_context(proxy)).address if users.rtt_ms else address
            clients = {}
            for number in self._numbers:
                client = AsyncClient(
                    coordinator=ways[users.coordinator],
                    reroute={users.verifier: ways[users.verifier]},
                    draft=users.draft,
                    timeout=TEXT_S,
                )
                clients[number] = await stack.enter_async_context(client)
                await client.prepare()
            await asyncio.gather(*(self._warm_up(*each) for each in clients.items()))
            print(json.dumps("ready"), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            began, cpu_s = time.monotonic(), time.process_time()
            until = None if users.seconds is None else began + users.seconds
            await asyncio.gather(*(self._user(number, client, until) for number, client in clients.items()))
            busy = (time.process_time() - cpu_s) / (time.monotonic() - began)
            print(json.dumps({"texts": [asdict(text) for text in self._texts], "busy": busy}), flush=True)

    async def _warm_up(self, number: int, client: AsyncClient) -> None:
        for turn in range(self._users.warm):
            await self._text(number, turn, client, None)

    async def _user(self, number: int, client: AsyncClient, until: float | None) -> None:
        warm, turn = self._users.warm, 0
        prompts = len(self._users.prompts) - warm
        while (turn < (self._users.texts or prompts)) if until is None else (time.monotonic() < until):
            text = await self._text(number, warm + (number + turn) % prompts, client, until)
            if text is not None:
                self._texts.append(text)
            turn += 1

    async def _text(self, number: int, prompt: int, client: AsyncClient, until: float | None) -> Text | None:
        """Generate one text; return None if it was cut off before it had a token."""
        begun, delivered, whole = time.monotonic(), list[float](), False
        stream = await client.stream(self._users.prompts[prompt], **self._users.options)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else max(0.0, until - begun)), stream:
                while (chunk := await stream.next()) is not None:
                    delivered += [time.monotonic()] * len(chunk.token_ids)
                whole = True
        if not delivered:
            return None
        counts = stream.statistics
        return Text(
            user=number,
            prompt=prompt,
            tokens=stream.completion.token_ids[: len(delivered)],
            begun_s=begun,
            delivered_s=tuple(delivered),
            steps=counts.steps,
            evaluated=counts.evaluated,
            accepted=counts.accepted,
            bytes_up=counts.bytes_up,
            bytes_down=counts.bytes_down,
            whole=whole,
        )


def main() -> None:
    request = json.loads(sys.stdin.readline())
    first, every = request.pop("first"), request.pop("every")
    harness.main(lambda: Process(Users(**request), first, every).run())


if __name__ == "__main__":
    main()
