"""Run some of the devices in a process of their own; each sends one request after another and reports each answer.

    python -m benchmarks.distill.devices '{"coordinator": ..., "cache": ..., "keys": ..., "devices": [0, 1], ...}'

Orders are lines of JSON on stdin, {"kind": "code", "pause_s": 0.0}; an empty kind is silence. The end of input is the
end. Answers are lines on stdout (`answer.Answer`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.distill.answer import DeviceAnswer
from benchmarks.support import questions
from edge_agent import AsyncClient, EdgeSettings
from edge_agent.sdk.types import Completion
from outrider.core.errors import OutriderError

PROMPTS = 2_000
"""Number of prompts that a device has of each kind."""
MAX_PROMPT = 1_200
"""Most characters of a prompt; the last ones are kept."""
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_REST_S = 0.5
"""Pause after a failure."""


@dataclass(frozen=True)
class DevicePlan:
    """Set what a process of devices does."""

    coordinator: str
    cache: str
    keys: str
    devices: list[int]
    tokens: int
    """Tokens of each request."""


class DeviceOrders:
    """Read orders from stdin and keep the latest one."""

    def __init__(self) -> None:
        self.kind, self.pause_s, self.over = "", 0.0, False
        self._news = asyncio.Event()

    async def listen(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            order = json.loads(line)
            self.kind, self.pause_s = str(order["kind"]), float(order["pause_s"])
            self._notify()
        self.over = True
        self._notify()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait at most this many seconds for another order."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def main() -> None:
    plan = DevicePlan(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    orders = DeviceOrders()
    async with asyncio.TaskGroup() as group:
        group.create_task(orders.listen())
        for number in plan.devices:
            group.create_task(device(plan, number, orders))


async def device(plan: DevicePlan, number: int, orders: DeviceOrders) -> None:
    """Send the requests that are ordered, until there are no more orders."""
    prompts = {kind: prompts_of(kind, number) for kind in ("code", "arithmetic")}
    settings = EdgeSettings(release_keys=plan.keys, release_spread_s=0.5)
    cache = Path(plan.cache) / f"device-{number}"
    async with AsyncClient(coordinator=plan.coordinator, cache_dir=cache, settings=settings) as client:
        asked = 0
        while not orders.over:
            if not orders.kind:
                await orders.wait()
                continue
            kind, pause_s = orders.kind, orders.pause_s
            answer = await ask(client, number, kind, next(prompts[kind]), options_of(number, asked, plan.tokens))
            print(answer.line, flush=True)
            asked += 1
            if answer.error or pause_s:
                await orders.wait(pause_s or _REST_S)


async def ask(client: AsyncClient, number: int, kind: str, prompt: str, options: dict[str, Any]) -> DeviceAnswer:
    """Send one request, and return its answer even if it fails."""
    begun = time.time()
    try:
        done: Completion = await client.generate(prompt, traffic_class=kind, **options)
    except OutriderError as error:
        return DeviceAnswer(number, kind, prompt, options, begun, time.time(), error=f"{type(error).__name__}: {error}")
    refused = {str(name): count for name, count in client.updates.refused.items()} if client.updates else {}
    statistics = done.statistics
    return DeviceAnswer(
        *(number, kind, prompt, options, begun, time.time()),
        first=begun + (statistics.first_token_s or 0.0),
        tokens=list(done.token_ids),
        guessed=statistics.proposed,
        steps=statistics.steps,
        attaches=statistics.attaches,
        swaps_s=statistics.swaps_s,
        release=statistics.release,
        refused=refused,
    )


def options_of(number: int, asked: int, tokens: int) -> dict[str, Any]:
    """Return the options of a request: every other one is sampled, each with a seed of its own."""
    chosen = SAMPLED if asked % 2 else {}
    return {"max_tokens": tokens, "seed": 1_000_000 * number + asked, **chosen}


def prompts_of(kind: str, number: int) -> Iterator[str]:
    """Yield this device's prompts of a kind, over and over."""
    make = {"code": questions.code, "arithmetic": questions.arithmetic}[kind]
    mine = make(PROMPTS, seed=number)
    while True:
        yield from (prompt[-MAX_PROMPT:] for prompt in mine)


if __name__ == "__main__":
    asyncio.run(main())
