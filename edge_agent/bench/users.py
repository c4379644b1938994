"""Run users: SDK clients in processes of their own, each of which generates one text after the other.

Every user is a device of its own, which loads its draft and drafts as any device does. The draft passes compete for the
cores that the processes run on, so `busy` stands beside each figure: near 1 the devices' cores bound it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from edge_agent.bench.delay import DelayedAddresses
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError, Unavailable
from outrider.processes import tied_to_this_process

if TYPE_CHECKING:
    from edge_agent.sdk.generation import CompletionStream

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 20_260_731}
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 0}
TEXT_S = 300.0
"""Seconds after which a text fails, because the service does not work."""
TAIL = 32
LOOPS = 0.75
"""Share of the 4-grams of a text's last TAIL tokens that came before, from which on the target goes round in a loop."""

PromptInput = Sequence[int] | Sequence[str]
"""The token ids of a prompt, or the turns of a user in a chat, between which the target answers."""


@dataclass(frozen=True)
class Users:
    """Describe users who generate at the same time."""

    device: Mapping[str, Any]
    """Settings of each device, over those of the environment; with the address of a coordinator or a verifier."""
    prompts: Sequence[PromptInput]
    """Those after the first `warm` are shared: a user who is done takes the next one of its process."""
    count: int = 1
    draft: str | None = None
    """As the setting `draft` of a device; None for none."""
    rtt_ms: float = 0.0
    """Emulated distance to coordinator and verifiers, in addition to the real one."""
    options: Mapping[str, Any] = field(default_factory=lambda: SAMPLED)
    """Of each request."""
    seconds: float | None = None
    """Time after which what still runs is cut off; users begin with their prompts again until then."""
    read: bool = False
    """Whether the verifier reads all prompts before, so that each first token is that of a known one."""
    warm: int = 1
    """Prompts, the first ones, that each new device answers before, uncounted, to learn how good its draft is."""

    def prompts_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the prompts that users with these numbers share, at least one for each."""
        shared = range(self.warm, len(self.prompts))
        return sorted(prompt for one in numbers for prompt in shared[one :: self.count] or [shared[one % len(shared)]])


@dataclass(frozen=True)
class Text:
    """Hold one text, as its user got it. Times are on the clock that all processes of a machine share."""

    user: int
    prompt: int
    """Its number among the prompts."""
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
    turn: int = 0
    draft: str = ""
    """Name of the device's draft."""

    @property
    def first_token_s(self) -> float:
        return self.delivered_s[0] - self.begun_s

    @property
    def seconds(self) -> float:
        """Return the time from the request to the last token."""
        return self.delivered_s[-1] - self.begun_s

    @property
    def rate(self) -> float:
        """Return the tokens per second from the first token on; 0 for a text that came all at once."""
        first = sum(at == self.delivered_s[0] for at in self.delivered_s)
        seconds = self.delivered_s[-1] - self.delivered_s[0]
        return (len(self.tokens) - first) / seconds if seconds else 0.0


@dataclass(frozen=True)
class Run:
    """Hold the texts of users that ran at the same time. busy: share of their cores' time that their processes took."""

    texts: tuple[Text, ...]
    busy: float

    @property
    def together(self) -> tuple[int, float]:
        """Return the tokens of all users while all of them were generating, and the seconds of that time."""
        by_user: dict[int, list[float]] = {}
        for text in self.texts:
            by_user.setdefault(text.user, []).extend(text.delivered_s)
        begin, end = max(map(min, by_user.values())), min(map(max, by_user.values()))
        return sum(begin < at <= end for times in by_user.values() for at in times), max(0.0, end - begin)

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all users together, while all of them were generating; 0 if never all did."""
        tokens, seconds = self.together
        return tokens / seconds if seconds else 0.0

    @property
    def rate(self) -> float:
        """Return the tokens per second of a text from its first token on, in the median."""
        return statistics.median(text.rate for text in self.texts)

    @property
    def acceptance_length(self) -> float:
        """Return the mean tokens of a step of the target."""
        return sum(len(text.tokens) for text in self.texts) / sum(text.steps for text in self.texts)

    @property
    def degenerate(self) -> int:
        return sum(degenerates(text.tokens) for text in self.texts)


def differing(texts: Sequence[Text], reference: Sequence[Text]) -> int:
    """Return how many texts are not those of the reference, as far as those go that were cut off."""
    expected = {(text.prompt, text.turn): text.tokens for text in reference if text.whole}
    pairs = ((text, expected.get((text.prompt, text.turn))) for text in texts)
    return sum(
        text.tokens != (wanted if text.whole else wanted[: len(text.tokens)])
        for text, wanted in pairs
        if wanted is not None
    )


def degenerates(tokens: Sequence[int]) -> bool:
    """Return whether a text ends in a loop, as small targets' texts do, which any draft predicts well."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    first = {gram: i for i, gram in reversed(list(enumerate(grams)))}
    tail = range(max(0, len(grams) - TAIL), len(grams))
    return len(tail) >= TAIL // 2 and sum(first[grams[i]] < i for i in tail) > LOOPS * len(tail)


async def run_users(users: Users, cores: Sequence[int]) -> Run:
    """Run the users on these cores, one process for each core, and return what they got. Raises Unavailable."""
    async with devices(users.count, cores) as running:
        return await running.run(users)


@contextlib.asynccontextmanager
async def devices(count: int, cores: Sequence[int], *, pinned: bool = True) -> AsyncIterator[Devices]:
    """Start a process for each core, but no more than there are users; end them with the context.

    pinned: each stays on its core.
    """
    async with contextlib.AsyncExitStack() as stack:
        prefixes = [("taskset", "--cpu-list", str(core)) if pinned else () for core in cores[:count]]
        yield Devices([await stack.enter_async_context(_process(prefix)) for prefix in prefixes])


class Devices:
    """The processes of users. A user who runs again with the same draft and distance has the same device."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        """processes: one for each core."""
        self._processes = processes

    async def run(self, users: Users) -> Run:
        """Run the users, and return what they got. Raises Unavailable if one of them fails."""
        every = len(self._processes)
        for first, process in enumerate(self._processes):
            _write(process, json.dumps({"first": first, "every": every} | asdict(users)))
        for process in self._processes:
            await _answer(process)  # it is ready
        for process in self._processes:
            _write(process, "go")
        answers = await asyncio.gather(*map(_answer, self._processes))
        texts = (Text(**text) for answer in answers for text in answer["texts"])
        longest_s = max(answer["seconds"] for answer in answers)
        return Run(tuple(texts), sum(answer["cpu_s"] for answer in answers) / longest_s / every)


@contextlib.asynccontextmanager
async def _process(prefix: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(*tied_to_this_process(), *prefix, sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 28,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C in a terminal reaches the one that started it alone
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _write(process: asyncio.subprocess.Process, line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line.encode() + b"\n")


async def _answer(process: asyncio.subprocess.Process) -> Any:
    """Return the next line of a process. Raises Unavailable if it fails."""
    line = b"" if process.stdout is None else await process.stdout.readline()
    answer = json.loads(line or '{"error": "its process has ended"}')
    if "error" in answer:
        raise Unavailable(f"a device failed: {answer['error']}")
    return answer


class Process:
    """Runs the users of one process: those whose number is `first`, and every so many after it."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._ways: dict[float, DelayedAddresses] = {}
        self._clients: dict[tuple[int, str | None, float], AsyncClient] = {}

    async def run(self) -> None:
        """Run the users that each line on stdin describes: prepare, wait for a line, and print what users got."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            first, every = request.pop("first"), request.pop("every")
            users = Users(**request)
            await self._prepare(users, range(first, users.count, every))
            print(json.dumps({"ready": True}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            began, cpu_s = time.monotonic(), time.process_time()
            until = None if users.seconds is None else began + users.seconds
            numbers = range(first, users.count, every)
            prompts = users.prompts_of(numbers)
            queue = iter(prompts) if until is None else itertools.cycle(prompts)
            running = [self._user(users, number).run(queue, until) for number in numbers]
            texts = [asdict(text) for found in await asyncio.gather(*running) for text in found]
            taken = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu_s}
            print(json.dumps({"texts": texts} | taken), flush=True)

    async def _prepare(self, users: Users, numbers: Sequence[int]) -> None:
        """Load what new devices need, one after the other since that takes whole cores, and then warm them up."""
        fresh = [number for number in numbers if (number, users.draft, users.rtt_ms) not in self._clients]
        for number in fresh:
            client = self._clients[number, users.draft, users.rtt_ms] = await self._device(users)
            await client.prepare()
        await asyncio.gather(*(self._user(users, number).warm_up() for number in fresh))
        if users.read:
            await asyncio.gather(*(self._user(users, number).read() for number in numbers))

    async def _device(self, users: Users) -> AsyncClient:
        if users.rtt_ms not in self._ways:
            self._ways[users.rtt_ms] = await self._stack.enter_async_context(DelayedAddresses(users.rtt_ms))
        ways, settings = self._ways[users.rtt_ms], EdgeSettings(**users.device)
        client = AsyncClient(
            coordinator=ways[settings.coordinator] if settings.coordinator else None,
            verifier=None if settings.coordinator else settings.verifier,
            draft=users.draft.split(",") if users.draft and "," in users.draft else users.draft,
            reroute=ways,
            timeout=TEXT_S,
            settings=settings,
        )
        return await self._stack.enter_async_context(client)

    def _user(self, users: Users, number: int) -> User:
        return User(users, number, self._clients[number, users.draft, users.rtt_ms])


@dataclass(frozen=True)
class User:
    """One of the users, at its device."""

    users: Users
    number: int
    client: AsyncClient

    async def warm_up(self) -> None:
        """Generate texts that do not count."""
        options = {**self.users.options, "speculation": True}
        for prompt in self.users.prompts[: self.users.warm]:
            await (await self._stream(_turns(prompt)[:1], options)).drain()

    async def read(self) -> None:
        """Let the verifier read the first turn of each prompt of the user."""
        for prompt in self.users.prompts_of([self.number]):
            options = {**self.users.options, "max_tokens": 1}
            await (await self._stream(_turns(self.users.prompts[prompt])[:1], options)).drain()

    async def run(self, prompts: Iterator[int], until: float | None) -> list[Text]:
        """Return the texts of prompts that this user takes, one after the other, until there are no more or `until`."""
        found: list[Text] = []
        for prompt in prompts:
            found += await self._texts(prompt, until)
            if until is not None and time.monotonic() >= until:
                break
        return found

    async def _texts(self, prompt: int, until: float | None) -> list[Text]:
        """Return the text of a prompt, in a chat those of all its turns, but none that was cut off before any token."""
        found: list[Text] = []
        said: list[str | Sequence[int]] = []
        for turn, text in enumerate(_turns(self.users.prompts[prompt])):
            said.append(text)
            begun, delivered, whole = time.monotonic(), list[float](), False
            stream = await self._stream(said, self.users.options)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())), stream:
                    while (chunk := await stream.next()) is not None:
                        delivered += [time.monotonic()] * len(chunk.token_ids)
                    whole = True
            if delivered:
                found.append(self._text(stream, prompt, turn, begun, delivered, whole))
            if not whole:
                break
            said.append(stream.completion.text)
        return found

    def _text(
        self, stream: CompletionStream, prompt: int, turn: int, begun: float, delivered: Sequence[float], whole: bool
    ) -> Text:
        counts = stream.statistics
        return Text(
            user=self.number,
            prompt=prompt,
            turn=turn,
            tokens=stream.completion.token_ids[: len(delivered)],
            begun_s=begun,
            delivered_s=tuple(delivered),
            steps=counts.steps,
            evaluated=counts.evaluated,
            accepted=counts.accepted,
            bytes_up=counts.bytes_up,
            bytes_down=counts.bytes_down,
            whole=whole,
            draft=counts.draft,
        )

    async def _stream(self, said: Sequence[str | Sequence[int]], options: Mapping[str, Any]) -> CompletionStream:
        """Begin an answer. said: token ids, or what the user and the target said in turn.

        A target without a chat template continues the text of what was said.
        """
        texts = [one for one in said if isinstance(one, str)]
        if not texts:
            return await self.client.stream([one for one in said[0] if isinstance(one, int)], **options)
        if (await self.client.prepare()).template is None:
            return await self.client.stream("\n\n".join(texts), **options)
        roles = itertools.cycle(("user", "assistant"))
        return await self.client.stream_chat(
            [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **options
        )


def _turns(prompt: PromptInput) -> list[str | Sequence[int]]:
    """Return what a user says, one after the other."""
    texts = [one for one in prompt if isinstance(one, str)]
    return list[str | Sequence[int]](texts) or [[one for one in prompt if isinstance(one, int)]]


async def _run() -> None:
    async with contextlib.AsyncExitStack() as stack:
        await Process(stack).run()


def main() -> None:
    try:
        asyncio.run(_run())
    except (OutriderError, ImportError) as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
