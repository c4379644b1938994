"""Do a task of a device, with the SDK of whichever checkout PYTHONPATH names: python -P device.py TASK OPTIONS.

It is run by its path, and imports nothing of the benchmarks, which may be another checkout's. It prints lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from edge_agent import AsyncClient
from edge_agent.target.chat_template import ChatTemplate
from outrider.core.errors import OutriderError


def say(**line: Any) -> None:
    """Print a line."""
    print(json.dumps(line), flush=True)


async def generate(options: dict[str, Any]) -> None:
    """Run sessions of one request, `sessions` of them or without end, and print what is delivered when.

    Each has a seed greater by `other_seeds` than the one before.
    """
    async with AsyncClient(draft=options.pop("draft"), **options.pop("client")) as client:
        sessions, prompt = options.pop("sessions"), options.pop("prompt")
        other_seeds = options.pop("other_seeds", 0)
        while sessions != 0:
            sessions -= 1
            say(begin=True, at=time.monotonic())
            try:
                async with await client.stream(prompt, **options) as stream:
                    async for chunk in stream:
                        say(at=time.monotonic(), tokens=list(chunk.token_ids))
                say(end=stream.completion.finish_reason, at=time.monotonic())
            except OutriderError as error:
                say(error=f"{type(error).__name__}: {error}"[:300], at=time.monotonic())
                await asyncio.sleep(0.5)
            options["seed"] += other_seeds


async def load(options: dict[str, Any]) -> None:
    """Load what a verifier offers, the draft included, and generate a little with it."""
    async with AsyncClient(**options["client"]) as client:
        try:
            completion = await client.generate("def add(a, b):", max_tokens=8, ignore_eos=True, timeout=20.0)
            say(tokens=list(completion.token_ids))
        except OutriderError as error:
            say(error=f"{type(error).__name__}: {error}"[:300])


def render(options: dict[str, Any]) -> None:
    """Render a chat template."""
    began = time.monotonic()
    try:
        text = ChatTemplate(options["template"]).render([{"role": "user", "content": "x"}])
        say(characters=len(text), seconds=time.monotonic() - began)
    except OutriderError as error:
        say(error=f"{type(error).__name__}: {error}"[:300], seconds=time.monotonic() - began)


def main() -> None:
    task, options = sys.argv[1], json.loads(sys.argv[2])
    if task == "render":
        render(options)
    else:
        asyncio.run({"generate": generate, "load": load}[task](options))


if __name__ == "__main__":
    main()
