"""The demonstration that `outrider demo` runs on the device's side: text as it is made, then a table against streaming.

Every request is made twice, with the draft and as plain cloud streaming of the same service, on loopback and behind an
emulated round trip. The outputs must be identical: the exit code says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options
from outrider.core.errors import OutriderError
from outrider.core.text import table
from outrider.wire.channels import split_address

TOKENS, QUICK_TOKENS = 120, 48
GREEDY = Options(max_tokens=TOKENS, temperature=0.0)
SAMPLED = Options(max_tokens=TOKENS, temperature=0.8, top_p=0.95, seed=20_260_731)


@dataclass(frozen=True)
class Showpiece:
    name: str
    prompt: str
    options: Options


SHOWPIECES = (
    Showpiece("code, greedy", 'def read_lines(path):\n    """Return the lines of a file."""\n', GREEDY),
    Showpiece(
        "arithmetic, greedy",
        "Question: A baker fills 6 trays with 12 rolls each and sells 40 of them. How many rolls are left?\nAnswer:",
        GREEDY,
    ),
    Showpiece("code, sampled", "class Queue:\n    def __init__(self, maxsize=0):\n", SAMPLED),
    Showpiece(
        "arithmetic, sampled",
        "Question: Mia reads 15 pages a day for 8 days. The book has 200 pages. How many pages remain?\nAnswer:",
        SAMPLED,
    ),
    Showpiece("code, greedy", "import os\nimport sys\n\n\ndef main():\n    parser = ", GREEDY),
    Showpiece(
        "arithmetic, greedy",
        "Question: Tickets cost 7 dollars. A class of 24 pupils and 2 teachers goes to the show. What do they pay?\n"
        "Answer:",
        GREEDY,
    ),
)


@dataclass(frozen=True)
class Row:
    """One request, both ways."""

    link: str
    name: str
    drafted: Completion
    streamed: Completion

    @property
    def identical(self) -> bool:
        return self.drafted.token_ids == self.streamed.token_ids


@contextlib.asynccontextmanager
async def clients(coordinator: str, reroute: dict[str, str]) -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """One that drafts and one that streams."""
    async with (
        AsyncClient(coordinator=coordinator, reroute=reroute) as drafting,
        AsyncClient(coordinator=coordinator, reroute=reroute, draft=None) as streaming,
    ):
        for client in (drafting, streaming):
            await client.generate("def main():\n", max_tokens=24)  # neither pays for first-time work in the table
        yield drafting, streaming


async def show(client: AsyncClient, piece: Showpiece) -> Completion:
    """Print the text as the verifier commits it."""
    print(f"\n--- {piece.name}\n{piece.prompt}", end="", flush=True)
    stream = await client.stream(piece.prompt, **piece.options)
    async for chunk in stream:
        print(chunk.text, end="", flush=True)
    print()
    return stream.completion


async def over_link(
    link: str, coordinator: str, reroute: dict[str, str], pieces: Sequence[Showpiece], *, visible: bool
) -> list[Row]:
    rows = []
    async with clients(coordinator, reroute) as (drafting, streaming):
        for piece in pieces:
            streamed = await streaming.generate(piece.prompt, **piece.options)
            if visible:
                drafted = await show(drafting, piece)
            else:
                drafted = await drafting.generate(piece.prompt, **piece.options)
            rows.append(Row(link, piece.name, drafted, streamed))
    return rows


_COLUMNS = (
    "LINK",
    "REQUEST",
    "TOKENS",
    "STEPS",
    "PER STEP",
    "TOKENS/S",
    "STREAMING",
    "SPEED-UP",
    "BYTES/TOKEN",
    "IDENTICAL",
)
"""STREAMING is the same request without a draft, in tokens/s; BYTES/TOKEN is payload up and down."""


def _cells(row: Row) -> tuple[str, ...]:
    drafted, streamed = row.drafted.statistics, row.streamed.statistics
    tokens = max(1, drafted.tokens)
    speedup = drafted.tokens_per_s / streamed.tokens_per_s if streamed.tokens_per_s else 0.0
    return (
        row.link,
        row.name,
        str(drafted.tokens),
        str(drafted.steps),
        f"{drafted.tokens_per_step:.2f}",
        f"{drafted.tokens_per_s:.0f}",
        f"{streamed.tokens_per_s:.0f}",
        f"{speedup:.2f}x",
        f"{drafted.bytes_up / tokens:.0f} up, {drafted.bytes_down / tokens:.0f} down",
        "yes" if row.identical else "NO",
    )


def overall(rows: Sequence[Row]) -> str:
    """One line per link: all its tokens over all its seconds."""
    lines = []
    for link in dict.fromkeys(row.link for row in rows):
        chosen = [row for row in rows if row.link == link]
        drafted, streamed = (
            sum(s.tokens for s in side) / max(1e-9, sum(s.last_token_s or 0.0 for s in side))
            for side in ([r.drafted.statistics for r in chosen], [r.streamed.statistics for r in chosen])
        )
        steps = sum(row.drafted.statistics.steps for row in chosen)
        per_step = sum(row.drafted.statistics.tokens for row in chosen) / max(1, steps)
        lines.append(
            f"{link}: {drafted:.0f} tokens/s against {streamed:.0f} by cloud streaming, {drafted / streamed:.2f}x"
            f" (time to the first token included); {per_step:.2f} tokens per verifier step"
        )
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def delayed(target: str, rtt_ms: float) -> AsyncIterator[str]:
    """Yield a loopback address that passes connections to HOST:PORT `target`, each byte half of `rtt_ms` later."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def receive() -> None:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                queue.put_nowait((loop.time() + rtt_ms / 2000, data))

        async with asyncio.TaskGroup() as group:
            group.create_task(receive())
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with contextlib.closing(writer), contextlib.suppress(ExceptionGroup, OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection(*split_address(target))
            with contextlib.closing(far_writer):
                await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(options: argparse.Namespace) -> int:
    pieces: Sequence[Showpiece] = SHOWPIECES
    if options.quick:
        pieces = tuple(replace(p, options=p.options | Options(max_tokens=QUICK_TOKENS)) for p in SHOWPIECES[:2])
    print("The draft runs in this process on llama.cpp; every token below was verified by the target in another one.")
    rows = await over_link("loopback", options.coordinator, {}, pieces, visible=True)
    async with delayed(options.verifier, options.rtt_ms) as address:
        reroute = {options.verifier: address}
        link = f"RTT {options.rtt_ms:.0f} ms"
        rows += await over_link(link, options.coordinator, reroute, pieces, visible=False)
    print(f"\n{table(_COLUMNS, [_cells(row) for row in rows])}\n\n{overall(rows)}")
    different = sum(not row.identical for row in rows)
    if different:
        print(f"\n{different} of {len(rows)} outputs differ from cloud streaming: that is a defect", file=sys.stderr)
        return 1
    print(f"\nall {len(rows)} outputs are identical to cloud streaming")
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m edge_agent.demo", description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port")
    parser.add_argument("--verifier", required=True, help="host:port of the verifier, for the emulated link")
    parser.add_argument("--rtt-ms", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="two requests, 48 tokens")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        raise SystemExit(asyncio.run(run(parser.parse_args(arguments))))
    except OutriderError as error:
        print(f"outrider demo: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
