"""What the layers cost: the SDK over the bare stream of the session protocol, and `outrider-edge serve` over the SDK.

All three ask the same verifier, directly, for the same tokens without a draft, one request at a time: `stream` opens
the gRPC stream itself and answers Commits as the protocol asks, `sdk` is AsyncClient, `http` reads server-sent events
of `outrider-edge serve`, a process beside this one, with httpx. The verifier has one core, all of the device the other.
Arms take turns in an order drawn anew for each prompt. Prompts are such whose first token has text: by HTTP one without
is no event. A figure is the median over prompts and rounds: milliseconds from the request to its first token, and from
there to the last for each token; a ratio is the median of the ratios within a prompt and round. `nothing` is GET
/health of the same server: what an HTTP request costs here that asks for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import httpx

from benchmarks.support import harness
from benchmarks.support.harness import Pair
from edge_agent.sdk.client import AsyncClient
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import VerifierStream
from outrider.core.errors import Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, SessionLimits
from outrider.wire.channels import channel
from outrider.wire.codecs import Open, Opened

TOKENS, QUICK_TOKENS = 128, 48
ROUNDS, QUICK_ROUNDS = 5, 2
PROMPTS, QUICK_PROMPTS = 12, 3


@dataclass(frozen=True)
class RequestTiming:
    """One request, in seconds."""

    first: float
    per_token: float


Layer = Callable[[tuple[int, ...]], Awaitable[RequestTiming]]


def took(begun: float, first: float, count_after: int) -> RequestTiming:
    """count_after: tokens after those that came first."""
    return RequestTiming(first - begun, (time.perf_counter() - first) / max(1, count_after))


def over_stream(link: grpc.aio.Channel, tokens: int) -> Layer:
    """The protocol by itself."""
    numbers = iter(range(1, 1_000_000))

    async def ask(prompt: tuple[int, ...]) -> RequestTiming:
        session, begun, first, early = DeviceSession(prompt, max_tokens=tokens, ignore_eos=True), 0.0, 0.0, 0
        begun = time.perf_counter()
        async with VerifierStream(link, 5.0, Statistics()) as stream:
            stream.open(Open(f"overhead-{next(numbers)}", session.attach(1, SessionLimits())))
            while not session.finished:
                message = await stream.receive()
                if isinstance(message, Opened):
                    session.limits = message.limits
                if isinstance(message, Commit) and (delivery := session.on_commit(message)) is not None:
                    if not first and delivery.tokens:
                        first, early = time.perf_counter(), len(delivery.tokens)
                    if (append := session.poll(resting=True)) is not None:
                        stream.append(append)
        if not first:
            raise Unavailable("the verifier ended a request without a token")
        return took(begun, first, len(session.received) - early)

    return ask


def over_sdk(client: AsyncClient, tokens: int) -> Layer:
    async def ask(prompt: tuple[int, ...]) -> RequestTiming:
        begun, first, early, total = time.perf_counter(), 0.0, 0, 0
        async for chunk in await client.stream(prompt, max_tokens=tokens, ignore_eos=True):
            if not first and chunk.token_ids:
                first, early = time.perf_counter(), len(chunk.token_ids)
            total += len(chunk.token_ids)
        return took(begun, first, total - early)

    return ask


def over_http(web: httpx.AsyncClient, tokens: int) -> Layer:
    async def ask(prompt: tuple[int, ...]) -> RequestTiming:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        begun, first, total = time.perf_counter(), 0.0, 0
        async with web.stream("POST", "v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                content = json.loads(line[6:])
                if "error" in content:
                    raise Unavailable(content["error"]["message"])
                choice = content["choices"][0]
                first = first or time.perf_counter()
                if choice["finish_reason"]:
                    total = choice["outrider"]["statistics"]["tokens"]
        return took(begun, first, total - 1)

    return ask


def of_nothing(web: httpx.AsyncClient) -> Layer:
    async def ask(_: tuple[int, ...]) -> RequestTiming:
        begun = time.perf_counter()
        (await web.get("health")).raise_for_status()
        return RequestTiming(time.perf_counter() - begun, 0.0)

    return ask


@contextlib.asynccontextmanager
async def server(verifier: str) -> AsyncIterator[str]:
    """The URL of `outrider-edge serve`."""
    command = (sys.executable, "-m", "edge_agent.cli", "serve", "--verifier", verifier, "--draft", "none")
    quiet = ("--log-level", "WARNING")  # a line for each request would hide the figures
    process = await asyncio.create_subprocess_exec(
        *command, *quiet, "--listen", "127.0.0.1:0", stdout=asyncio.subprocess.PIPE, cwd=harness.ROOT
    )
    try:
        line = await process.stdout.readline() if process.stdout is not None else b""
        found = re.search(r"http://\S+/", line.decode())
        if found is None:
            raise Unavailable(f"outrider-edge serve did not start: {line!r}")
        yield found[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def measure(
    arms: dict[str, Layer], prompts: list[tuple[int, ...]], rounds: int
) -> dict[str, list[RequestTiming]]:
    """Every arm asks for every prompt in every round; a round before is not counted."""
    told: dict[str, list[RequestTiming]] = {name: [] for name in arms}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for prompt in prompts:
            for name in order.sample(list(arms), len(arms)):
                one = await arms[name](prompt)
                if turn:
                    told[name].append(one)
    return told


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def figures(told: dict[str, list[RequestTiming]]) -> dict[str, float]:
    """The last line's."""
    nothing = statistics.median(one.first for one in told.pop("nothing"))
    print(f"nothing             {1000 * nothing:7.2f} ms")
    first = {name: [one.first for one in all_] for name, all_ in told.items()}
    rest = {name: [one.per_token for one in all_] for name, all_ in told.items()}
    for name in told:
        print(
            f"{name:7} first token {1000 * statistics.median(first[name]):7.2f} ms, "
            f"then {1000 * statistics.median(rest[name]):6.3f} ms a token"
        )
    return {
        "http_over_sdk": ratio(rest["http"], rest["sdk"]),
        "sdk_over_stream": ratio(rest["sdk"], rest["stream"]),
        "http_over_sdk_first": ratio(first["http"], first["sdk"]),
        "sdk_over_stream_first": ratio(first["sdk"], first["stream"]),
    }


async def run(pair: Pair, *, quick: bool) -> dict[str, float]:
    tokens, rounds, prompts = (QUICK_TOKENS, QUICK_ROUNDS, QUICK_PROMPTS) if quick else (TOKENS, ROUNDS, PROMPTS)
    core, device_core = harness.cores()
    async with harness.cluster(prefix_cache=False) as cluster:
        verifier = await cluster.start_verifier("--model", str(pair.target), cores=(core,))
        harness.pin(device_core)
        async with (
            AsyncClient(verifier=verifier.address, draft=None) as client,
            channel(verifier.address) as link,
            server(verifier.address) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as web,
        ):
            kit = await client.prepare()
            ids: list[tuple[int, ...]] = []
            for prompt in harness.prompts("heldout"):
                some = tuple(kit.tokenizer.encode_prompt(prompt.text))
                if len(ids) < prompts and (await client.generate(some, max_tokens=1, ignore_eos=True)).text:
                    ids.append(some)
            arms = {
                "stream": over_stream(link, tokens),
                "sdk": over_sdk(client, tokens),
                "http": over_http(web, tokens),
                "nothing": of_nothing(web),
            }
            told = await measure(arms, ids, rounds)
    return figures(told)


def main() -> None:
    args = harness.arguments("overhead", __doc__).parse_args()
    harness.finish(asyncio.run(run(Pair.in_folder(args.models), quick=args.quick)))


if __name__ == "__main__":
    main()
