"""Run a device in a process of its own, where torch, transformers and redis cannot be imported, by lines of JSON.

in:  {"id": 1, "do": "generate" | "chat", "client": {...}, "prompt": ..., "options": {...}}
     {"id": 1, "do": "cancel"}
     {"id": 2, "do": "modules"}
out: {"id": 1, "attach": "127.0.0.1:7000", "verifier": "verifier-1"}   an attach
     {"id": 1, "tokens": [..], "at": seconds}                       a chunk; `at` is CLOCK_MONOTONIC, the same for all
     {"id": 1, "done": {...}} or {"id": 1, "error": "BadRequest", "message": ".."}
"""

from __future__ import annotations

import sys

FORBIDDEN = ("torch", "transformers", "redis")
for name in FORBIDDEN:
    sys.modules[name] = None  # type: ignore[assignment]

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import contextvars  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from edge_agent.sdk.client import AsyncClient  # noqa: E402
from edge_agent.sdk.sessions import Sessions  # noqa: E402
from edge_agent.session.failover import AttachTarget  # noqa: E402
from outrider.core.errors import OutriderError  # noqa: E402
from outrider.wire.channels import ClientTls  # noqa: E402

request_id: contextvars.ContextVar[int] = contextvars.ContextVar("request_id", default=0)


def report(**message: Any) -> None:
    print(json.dumps(message), flush=True)


class ReportingSessions(Sessions):
    """Report where its sessions attach."""

    def dial(self, target: AttachTarget, *, bulk: bool = False) -> Any:
        if not bulk:
            report(id=request_id.get(), attach=target.address, verifier=target.verifier_id)
        return super().dial(target, bulk=bulk)


class Client(AsyncClient):
    _sessions_type = ReportingSessions


class Device:
    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            message = json.loads(line)
            match message["do"]:
                case "cancel":
                    self._tasks[message["id"]].cancel()
                case "modules":
                    report(id=message["id"], done={"loaded": [n for n in FORBIDDEN if sys.modules.get(n) is not None]})
                case _:
                    self._tasks[message["id"]] = asyncio.create_task(self._request(message))
        for client in self._clients.values():
            await client.close()

    def _client(self, options: dict[str, Any]) -> Client:
        key = json.dumps(options, sort_keys=True)
        if key not in self._clients:
            given = dict(options)
            if ca := given.pop("ca", None):
                given["tls"] = ClientTls(Path(ca))
            self._clients[key] = Client(**given)
        return self._clients[key]

    async def _request(self, message: dict[str, Any]) -> None:
        request_id.set(message["id"])
        try:
            client = self._client(message["client"])
            begin = client.stream_chat if message["do"] == "chat" else client.stream
            stream = await begin(message["prompt"], **message["options"])
            async with stream:
                with contextlib.suppress(asyncio.CancelledError):
                    async for chunk in stream:
                        report(id=message["id"], tokens=chunk.token_ids, at=time.monotonic())
            self._done(message["id"], stream)
        except OutriderError as error:
            report(id=message["id"], error=type(error).__name__, message=str(error))
        except Exception as error:
            report(id=message["id"], error=f"defect: {type(error).__name__}", message=str(error))

    def _done(self, number: int, stream: Any) -> None:
        completion, statistics = stream.completion, stream.statistics
        report(
            id=number,
            done={
                "text": completion.text,
                "tokens": completion.token_ids,
                "finish": completion.finish_reason,
                "seed": completion.seed,
                "session": completion.session_id,
                "prompt_tokens": completion.usage.prompt_tokens,
                "steps": statistics.steps,
                "accepted": statistics.accepted,
                "evaluated": statistics.evaluated,
                "attaches": statistics.attaches,
                "draft": statistics.draft,
                "draft_failure": statistics.draft_failure,
            },
        )


if __name__ == "__main__":
    asyncio.run(Device().run())
