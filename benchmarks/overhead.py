"""Measure the overhead of the SDK over the bare session stream, and of `outrider-edge serve` over the SDK.

All three ask the same verifier, directly, for the same tokens without a draft, one request at a time: `stream` opens
the gRPC stream itself and answers Commits as the protocol asks, `sdk` is AsyncClient, `http` reads server-sent events
of `outrider-edge serve`, a process beside this one, with httpx. The verifier has one core, all of the device the other.
The layers take turns in an order drawn anew for each prompt. Only prompts whose first token has text are used, because
by HTTP a token without text is no event. A figure is the median over prompts and rounds: milliseconds from the request
to its first token, and from there to the last for each token; a ratio is the median of the ratios within a prompt and
round. `health` is GET /health of the same server: the least that an HTTP request costs here.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import httpx

from benchmarks.support import harness
from benchmarks.support.harness import Criterion, Pair, Size
from edge_agent.sdk.client import AsyncClient
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import VerifierStream
from outrider.core.errors import Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, SessionLimits
from outrider.wire.channels import channel
from outrider.wire.codecs import Open, Opened

Timing = tuple[float, float]
"""Seconds from a request to its first token, and from there to the last for each token."""
Layer = Callable[[tuple[int, ...]], Awaitable[Timing]]
"""A function that sends a prompt through one layer and times it."""


def timing(begun: float, first: float, count_after: int) -> Timing:
    """Return the timing of a request that ends now. count_after: tokens after those that came first."""
    return first - begun, (time.perf_counter() - first) / max(1, count_after)


def over_stream(link: grpc.aio.Channel, tokens: int) -> Layer:
    """Return the layer that is the session protocol by itself."""
    numbers = iter(range(1, 1_000_000))

    async def ask(prompt: tuple[int, ...]) -> Timing:
        session, first, early = DeviceSession(prompt, max_tokens=tokens, ignore_eos=True), 0.0, 0
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
        return timing(begun, first, len(session.received) - early)

    return ask


def over_sdk(client: AsyncClient, tokens: int) -> Layer:
    async def ask(prompt: tuple[int, ...]) -> Timing:
        begun, first, early, total = time.perf_counter(), 0.0, 0, 0
        async for chunk in await client.stream(prompt, max_tokens=tokens, ignore_eos=True):
            if not first and chunk.token_ids:
                first, early = time.perf_counter(), len(chunk.token_ids)
            total += len(chunk.token_ids)
        return timing(begun, first, total - early)

    return ask


def over_http(web: httpx.AsyncClient, tokens: int) -> Layer:
    async def ask(prompt: tuple[int, ...]) -> Timing:
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
        return timing(begun, first, total - 1)

    return ask


def over_health(web: httpx.AsyncClient) -> Layer:
    async def ask(_: tuple[int, ...]) -> Timing:
        begun = time.perf_counter()
        (await web.get("health")).raise_for_status()
        return time.perf_counter() - begun, 0.0

    return ask


@contextlib.asynccontextmanager
async def server(verifier: str) -> AsyncIterator[str]:
    """Run `outrider-edge serve` and yield its URL."""
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


async def measure(layers: dict[str, Layer], prompts: list[tuple[int, ...]], rounds: int) -> dict[str, list[Timing]]:
    """Send every prompt through every layer in every round, after a first round that is not counted."""
    timings: dict[str, list[Timing]] = {name: [] for name in layers}
    order = random.Random(0)
    for number in range(rounds + 1):
        for prompt in prompts:
            for name in order.sample(list(layers), len(layers)):
                measured = await layers[name](prompt)
                if number:
                    timings[name].append(measured)
    return timings


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


GOAL = 1.05
COMPARED = ("http_over_sdk", "sdk_over_stream", "http_over_sdk_first", "sdk_over_stream_first")
"""Ratios of the last line that should be less than GOAL."""


def figures(timings: dict[str, list[Timing]]) -> dict[str, float]:
    """Print the medians; return the figures of the last line."""
    health = statistics.median(first for first, _ in timings.pop("health"))
    print(f"health              {1000 * health:7.2f} ms")
    first = {name: [each[0] for each in found] for name, found in timings.items()}
    rest = {name: [each[1] for each in found] for name, found in timings.items()}
    for name in timings:
        print(
            f"{name:7} first token {1000 * statistics.median(first[name]):7.2f} ms, "
            f"then {1000 * statistics.median(rest[name]):6.3f} ms a token"
        )
    return {
        "http_over_sdk": ratio(rest["http"], rest["sdk"]),
        "sdk_over_stream": ratio(rest["sdk"], rest["stream"]),
        "http_over_sdk_first": ratio(first["http"], first["sdk"]),
        "sdk_over_stream_first": ratio(first["sdk"], first["stream"]),
        "health_ms": round(1000 * health, 2),
        "sdk_first_ms": round(1000 * statistics.median(first["sdk"]), 2),
        "http_first_ms": round(1000 * statistics.median(first["http"]), 2),
    }


async def run(pair: Pair, size: Size) -> dict[str, float]:
    tokens, rounds, count = size.pick(smoke=(8, 1, 1), quick=(48, 1, 2), full=(128, 5, 12))
    async with harness.one_verifier(pair, prefix_cache=False, coordinator=False) as cluster:
        verifier = cluster.verifiers[0].address
        async with (
            AsyncClient(verifier=verifier, draft=None, timeout=None) as client,
            channel(verifier) as link,
            server(verifier) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as web,
        ):
            tokenizer = (await client.prepare()).tokenizer
            prompts: list[tuple[int, ...]] = []
            for prompt in harness.prompts("heldout"):
                ids = tuple(tokenizer.encode_prompt(prompt.text))
                if len(prompts) < count and (await client.generate(ids, max_tokens=1, ignore_eos=True)).text:
                    prompts.append(ids)
            layers = {
                "stream": over_stream(link, tokens),
                "sdk": over_sdk(client, tokens),
                "http": over_http(web, tokens),
                "health": over_health(web),
            }
            return figures(await measure(layers, prompts, rounds))


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("overhead", __doc__).parse_args(argv)
    found = await run(Pair.in_folder(options.models), options.size)
    goals = [Criterion.bound(name, found[name], at_most=GOAL, strict=True, enforced_from=None) for name in COMPARED]
    harness.finish(found, goals, options.size)


if __name__ == "__main__":
    asyncio.run(main())
