"""Break every rule of the protocol, over raw gRPC and raw TCP, as a client that has a place and a ticket.

Each attack ends by itself within a few seconds; how it ended is counted by attack and status, and ATTACKS says which
endings are right for it. Three that only wait go on beside the others, so that there is always an attack in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from benchmarks.support.draft_replay.client import ServiceAddress
from edge_agent.session.coordinator_client import CoordinatorClient
from outrider.core.addresses import split_address
from outrider.core.errors import OutriderError
from outrider.wire.channels import channel
from outrider.wire.ticket import ticket_metadata
from outrider.wire.v1 import session_pb2 as pb

METHOD = "/outrider.wire.v1.Verifier/Session"
ATTACK_S = 25.0
"""Time after which an attack that the verifier tolerates is ended."""
FLOOD_S = 2.0
STARE_S = 6.0
HALF_OPEN_S = 12.0
"""Time that a half-open connection stays: longer than a verifier's `OPEN_TIMEOUT_S` of 10."""


class RawStream:
    """Open one stream whose messages are bytes. Its place comes from the coordinator, if there is one."""

    def __init__(self, where: ServiceAddress) -> None:
        self._where = where
        self._link = channel(where.verifier)
        self._control = channel(where.coordinator) if where.coordinator else None
        self.session_id = f"raw-{id(self):x}-{time.monotonic_ns():x}"
        self.ticket = b""
        self.epoch = 1
        self.last_epoch = 1 << 30
        self.call: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.call is not None:
            self.call.cancel()
        await self._link.close()
        if self._control is not None:
            if self.ticket:  # the next attack needs a place too
                with contextlib.suppress(OutriderError):
                    await self._coordinator(self._control).close(self.session_id, self.ticket)
            await self._control.close()

    @staticmethod
    def _coordinator(control: grpc.aio.Channel) -> CoordinatorClient:
        return CoordinatorClient(lambda: control, None, asyncio.ensure_future)  # type: ignore[arg-type]

    async def place(self, wait_s: float = 0.0) -> None:
        """Take a place. Raises Overloaded if there is none."""
        if self._control is None:
            return
        placement = await self._coordinator(self._control).open("", wait_s=wait_s)
        grant = placement.grants[0]
        self.session_id, self.ticket = placement.session_id, grant.ticket
        self.epoch, self.last_epoch = grant.epoch_first, grant.epoch_last

    def begin(self, ticket: bytes | None = None) -> None:
        """Open a stream and send nothing yet. ticket: another one than its own."""
        stream = self._link.stream_stream(
            METHOD, request_serializer=bytes, response_deserializer=pb.ServerMessage.FromString
        )
        self.call = stream(metadata=ticket_metadata(self.ticket if ticket is None else ticket))

    async def open(self, prompt: list[int], max_tokens: int, ticket: bytes | None = None, **changes: Any) -> None:
        """Open a stream with a well-formed Open, apart from `changes`. ticket: another one than its own."""
        self.begin(ticket)
        attach = pb.Attach(
            epoch=self.epoch,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
            ignore_eos=True,
        )
        fields: dict[str, Any] = {"session_id": self.session_id, "attach": attach}
        await self.send(open=pb.Open(**(fields | changes)))

    async def send(self, **kind: Any) -> None:
        await self.call.write(pb.ClientMessage(**kind).SerializeToString())

    async def append(self, **fields: Any) -> None:
        await self.send(append=pb.Append(**{"first_id": 1} | fields))

    async def receive(self) -> pb.ServerMessage | None:
        """Return the next message; None at the end. Raises the stream's error."""
        message = await self.call.read()
        return None if message is grpc.aio.EOF else message

    async def read_to_end(self) -> None:
        """Read messages until the stream ends, and answer none."""
        while await self.receive() is not None:
            pass


Attack = Callable[["MaliciousClient", RawStream], Awaitable[None]]


class MaliciousClient:
    """Attack without pause. `answers` counts (attack, its ending)."""

    def __init__(self, where: ServiceAddress, rng: random.Random, prompt: list[int], max_sequence: int = 2048) -> None:
        self._where = where
        self._rng = rng
        self._prompt = prompt
        self._most = max_sequence - len(prompt)
        self._queues: tuple[list[Attack], list[Attack]] = ([], [])
        """The attacks left of this round: those that act and those that wait."""
        self.answers: Counter[tuple[str, str]] = Counter()

    async def run(self, until: float = math.inf) -> None:
        """Attack as long as an attack may still begin. Every attack has its turn, over several calls too."""
        acting, waiting = self._queues
        await asyncio.gather(
            self._attack(acting, ATTACKS.keys() - WAITING, until), self._attack(waiting, WAITING, until)
        )

    async def _attack(self, queue: list[Attack], attacks: Collection[Attack], until: float) -> None:
        while time.monotonic() < until:
            if not queue:
                queue += sorted(attacks, key=lambda attack: attack.__name__)
                self._rng.shuffle(queue)
            await self.one(queue.pop())
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))

    async def one(self, attack: Attack) -> str:
        """Carry out one attack; return its ending: a status, or what this side saw."""
        async with RawStream(self._where) as raw:
            try:
                async with asyncio.timeout(ATTACK_S):
                    await attack(self, raw)
                ended = OK
            except grpc.aio.AioRpcError as error:
                ended = error.code().name
                if error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata():
                    ended = ENDED_BEFORE
            except asyncio.InvalidStateError:  # a write on a stream whose end this side knows already
                ended = (await raw.call.code()).name
            except TimeoutError:
                ended = "went on"
            except (OutriderError, OSError, grpc.aio.UsageError) as error:
                ended = type(error).__name__
        self.answers[attack.__name__, ended] += 1
        return ended

    @property
    def wrong(self) -> Counter[tuple[str, str]]:
        """Return the `answers` that are not expected of their attack."""
        return Counter({key: count for key, count in self.answers.items() if key[1] not in RIGHT[key[0]]})

    @property
    def not_made(self) -> list[str]:
        """Return the attacks that were not made, because they were not tried or always lacked a place."""
        made = {attack for attack, ended in self.answers if ended not in NO_PLACE}
        return [attack for attack in RIGHT if attack not in made]

    # --- the attacks

    async def garbage(self, raw: RawStream) -> None:
        raw.begin()
        await raw.call.write(self._rng.randbytes(self._rng.choice((1, 100, 100_000))))
        await raw.read_to_end()

    async def garbage_midway(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.call.write(b"\xff" * 1000)
        await raw.read_to_end()

    async def garbage_on_tcp(self, raw: RawStream) -> None:
        reader, writer = await asyncio.open_connection(*split_address(self._where.verifier))
        with contextlib.closing(writer):
            writer.write(self._rng.randbytes(100_000))
            while await reader.read(1 << 16):
                pass

    async def flood(self, raw: RawStream) -> None:
        """Send empty Appends as fast as they go, and read nothing."""
        await self._opened(raw)
        until = time.monotonic() + FLOOD_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLOOD_S):
                while time.monotonic() < until:
                    await raw.append()

    async def flood_of_nodes(self, raw: RawStream) -> None:
        """Send single nodes below the root, more than are allowed."""
        await self._opened(raw)
        for i in range(1000):
            await raw.append(first_id=i + 1, up=[0], token=[i])
        await raw.read_to_end()

    async def id_gap(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(first_id=50, up=[0], token=[7])
        await raw.read_to_end()

    async def parent_of_the_future(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(up=[5], token=[7])
        await raw.read_to_end()

    async def base_of_the_future(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(base=1 << 20, up=[0], token=[7])
        await raw.read_to_end()

    async def wrong_epoch(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.send(cancel=pb.Cancel(epoch=raw.epoch + 1))
        await raw.read_to_end()

    async def same_siblings(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(up=[0, 0], token=[7, 7])
        await raw.read_to_end()

    async def too_deep(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(up=[0] + [1] * 59, token=[7] * 60)
        await raw.read_to_end()

    async def too_many(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(up=[0] * 1000, token=list(range(1000)))
        await raw.read_to_end()

    async def no_token(self, raw: RawStream) -> None:
        await self._opened(raw)
        await raw.append(up=[0], token=[(1 << 32) - 1])
        await raw.read_to_end()

    async def never_reads(self, raw: RawStream) -> None:
        """Request and confirm a long answer without reading it."""
        await raw.place()
        await raw.open(self._prompt, self._most)
        await asyncio.sleep(STARE_S)

    async def huge_prompt(self, raw: RawStream) -> None:
        await raw.place()
        await raw.open([1] * self._rng.choice((self._most * 2, 131_072, 1_000_000)), 16)
        await raw.read_to_end()

    async def all_the_room(self, raw: RawStream) -> None:
        """Request the longest sequence allowed, and leave as soon as it begins."""
        await raw.place()
        await raw.open(self._prompt, self._most)
        for _ in range(3):
            await raw.receive()

    async def no_open(self, raw: RawStream) -> None:
        raw.begin()
        await raw.read_to_end()

    async def half_open(self, raw: RawStream) -> None:
        """Open connections that say hello in HTTP/2 and nothing else."""
        sockets = [await asyncio.open_connection(*split_address(self._where.verifier)) for _ in range(8)]
        for _, writer in sockets:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        await asyncio.sleep(HALF_OPEN_S)
        for _, writer in sockets:
            writer.transport.abort()

    async def after_the_end(self, raw: RawStream) -> None:
        await raw.place()
        await raw.open(self._prompt, 1)
        while (message := await raw.receive()) is not None:
            if message.commit.finish:
                break
        for i in range(100):
            await raw.append(first_id=i + 1, base=1, up=[0], token=[i])
        await raw.read_to_end()

    async def epoch_after_epoch(self, raw: RawStream) -> None:
        """Attach again and again, each time fencing the attach before."""
        await raw.place()
        calls = []
        try:
            for epoch in range(raw.epoch, min(raw.epoch + 8, raw.last_epoch)):
                raw.epoch = epoch
                await raw.open(self._prompt, 64)
                calls.append(raw.call)
            await raw.read_to_end()
        finally:
            for call in calls:
                call.cancel()

    async def cancel_on_cancel(self, raw: RawStream) -> None:
        await self._opened(raw)
        for _ in range(200):
            await raw.send(cancel=pb.Cancel(epoch=raw.epoch))
        await raw.read_to_end()

    async def forged_ticket(self, raw: RawStream) -> None:
        await raw.place()
        await raw.open(self._prompt, 16, ticket=bytes(byte ^ 1 for byte in raw.ticket) or b"forged")
        await raw.read_to_end()

    async def somebody_elses_session(self, raw: RawStream) -> None:
        await raw.place()
        await raw.open(self._prompt, 16, session_id="x" * 32)
        await raw.read_to_end()

    async def nonsense_sampling(self, raw: RawStream) -> None:
        await raw.place()
        sampling = pb.Sampling(temperature=float("nan"), top_p=-1.0, repetition_penalty=float("inf"))
        attach = pb.Attach(epoch=raw.epoch, prompt=self._prompt, max_tokens=16, sampling=sampling)
        await raw.open(self._prompt, 16, attach=attach)
        await raw.read_to_end()

    async def _opened(self, raw: RawStream) -> None:
        """Begin a session."""
        await raw.place()
        await raw.open(self._prompt, 256)
        await raw.receive()


OK = "OK"
"""The stream, or the attack, ended without an error."""
ENDED_BEFORE = "ended before"
"""Our own library's error for a write on a stream that has just ended; the status is then lost."""
NO_PLACE = frozenset({"Overloaded", "RESOURCE_EXHAUSTED"})
"""Refusals of the coordinator and of the verifier, which any attack that needs a place may meet."""
_REFUSED = frozenset({"INVALID_ARGUMENT"})
_SILENT = frozenset({"UNAVAILABLE"})
"""The ending for nodes that came too late to be an offence: the device is then ended for its silence."""

ATTACKS: Mapping[Attack, frozenset[str]] = {
    MaliciousClient.garbage: _REFUSED | {"UNAUTHENTICATED"},
    MaliciousClient.garbage_midway: _REFUSED | NO_PLACE,
    MaliciousClient.garbage_on_tcp: frozenset({OK, "ConnectionResetError", "BrokenPipeError"}),
    MaliciousClient.flood: NO_PLACE | {OK},
    MaliciousClient.flood_of_nodes: _REFUSED | _SILENT | NO_PLACE | {ENDED_BEFORE},
    MaliciousClient.id_gap: _REFUSED | NO_PLACE,
    MaliciousClient.parent_of_the_future: _REFUSED | NO_PLACE,
    MaliciousClient.base_of_the_future: _REFUSED | NO_PLACE,
    MaliciousClient.wrong_epoch: _REFUSED | NO_PLACE,
    MaliciousClient.same_siblings: _REFUSED | _SILENT | NO_PLACE,
    MaliciousClient.too_deep: _REFUSED | _SILENT | NO_PLACE,
    MaliciousClient.too_many: _REFUSED | NO_PLACE,
    MaliciousClient.no_token: _REFUSED | NO_PLACE,
    MaliciousClient.never_reads: NO_PLACE | {OK},
    MaliciousClient.huge_prompt: _REFUSED | NO_PLACE,
    MaliciousClient.all_the_room: NO_PLACE | {OK},
    MaliciousClient.no_open: _SILENT | {"UNAUTHENTICATED"},
    MaliciousClient.half_open: frozenset({OK}),
    MaliciousClient.after_the_end: NO_PLACE | {OK, ENDED_BEFORE},
    MaliciousClient.epoch_after_epoch: NO_PLACE | {OK},
    MaliciousClient.cancel_on_cancel: NO_PLACE | {OK, ENDED_BEFORE},
    MaliciousClient.forged_ticket: frozenset({"UNAUTHENTICATED", "Overloaded"}),
    MaliciousClient.somebody_elses_session: NO_PLACE | {"PERMISSION_DENIED"},
    MaliciousClient.nonsense_sampling: _REFUSED | NO_PLACE,
}
"""Attack -> the endings that are expected of it."""
RIGHT: Mapping[str, frozenset[str]] = {attack.__name__: endings for attack, endings in ATTACKS.items()}
WAITING: frozenset[Attack] = frozenset(
    {MaliciousClient.never_reads, MaliciousClient.no_open, MaliciousClient.half_open}
)
"""Attacks that only wait."""
