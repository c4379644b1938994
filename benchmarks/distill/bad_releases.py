"""Offer bad draft releases by a coordinator and a file server that tamper with them, while sessions go on as usual.

Each bad release meets a real device of its own, which must refuse it, say why, and go on with the draft that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from benchmarks.distill.fleet import until
from edge_agent import AsyncClient, EdgeSettings
from outrider.core.errors import Unavailable
from outrider.wire.channels import bind, channel, server
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

_CALL_S = 120.0
_WAIT_S = 600.0
_SERIAL = 1 << 62
"""A serial above all of the real coordinator's, which grow with the clock."""
OLD, NEW = 9, 10
"""Version of a release that is offered after a newer one, and the version of that newer one."""
PROMPT = "Question: A baker fills 6 trays with 12 rolls each and sells 40 of them. How many rolls are left?\nAnswer:"
TOKENS = 160


class TamperingCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Pass calls on to the real coordinator, but answer OfferRelease itself. Use it as an async context manager."""

    def __init__(self, real: str) -> None:
        self.offer = pb.OfferReleaseResponse(serial=_SERIAL)
        self.address = ""
        self._channel = channel(real)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._server = server()

    async def __aenter__(self) -> Self:
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def offers(self, manifest: bytes, base_url: str) -> int:
        """Offer this release from now on, and return its serial."""
        serial = self.offer.serial + 1
        self.offer = pb.OfferReleaseResponse(serial=serial, manifest=manifest, base_url=base_url)
        return serial

    async def OpenSession(self, request: Any, context: Any) -> Any:
        answer = await self._passed_on(self._stub.OpenSession, request, context)
        answer.release_serial = self.offer.serial
        return answer

    async def ResumeSession(self, request: Any, context: Any) -> Any:
        return await self._passed_on(self._stub.ResumeSession, request, context)

    async def CloseSession(self, request: Any, context: Any) -> Any:
        return await self._passed_on(self._stub.CloseSession, request, context)

    async def ListTargets(self, request: Any, context: Any) -> Any:
        return await self._passed_on(self._stub.ListTargets, request, context)

    async def OfferRelease(self, request: Any, context: Any) -> Any:
        return self.offer

    async def _passed_on(self, method: Any, request: Any, context: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())


@dataclass
class FileServer:
    """Serve files over HTTP, whole or cut off after `cut` bytes. Use it as an async context manager."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Path -> content."""
    cut: int = 0
    """Bytes after which each answer is cut off, 0 for never."""
    url: str = ""
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            body = self.files.get(head.split(" ")[1].lstrip("/"))
            status = "404 Not Found" if body is None else "200 OK"
            length = len(body or b"")
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode())
            writer.write((body or b"")[: self.cut or None])
            await writer.drain()
        writer.close()


@dataclass(frozen=True)
class Refusal:
    """Hold the reaction of one device to one bad release."""

    what: str
    wanted: str
    """The kind of refusal that is expected."""
    got: tuple[str, ...]
    message: str
    identical: bool
    """Whether its text is that of plain streaming."""
    kept: bool
    """Whether it never drafted with the release that it refused."""

    @property
    def held(self) -> bool:
        return self.got == (self.wanted,) and self.identical and self.kept and bool(self.message)


@dataclass(frozen=True)
class BadRelease:
    """Describe a release that a device must refuse."""

    what: str
    wanted: str
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest
    forged: bool = False
    """Whether somebody else has signed it."""
    flipped: bool = False
    cut: bool = False
    before: int = 0
    """Version of the release that the device has found healthy before; 0 for none."""


BAD_RELEASES = (
    BadRelease("a tampered file", "altered", flipped=True),
    BadRelease("an old version", "version", lambda m: dataclasses.replace(m, version=OLD), before=NEW),
    BadRelease("a wrong key", "signature", forged=True),
    BadRelease("a truncated download", "truncated", cut=True),
    BadRelease("a wrong tokenizer", "tokenizer", lambda m: dataclasses.replace(m, tokenizer_hash="sha256:" + "0" * 64)),
)


class BadReleaseTrials:
    """Offer bad releases to devices. Each is derived from ``draft``, a good file."""

    def __init__(self, coordinator: str, draft: Path, signer: Signer, folder: Path) -> None:
        self._coordinator = coordinator
        self._data = draft.read_bytes()
        self._signer = signer
        self._folder = folder

    async def offer_all(self, releases: tuple[BadRelease, ...] = BAD_RELEASES) -> list[Refusal]:
        """Offer each bad release to a device of its own, and return how it was refused."""
        async with AsyncClient(coordinator=self._coordinator, draft=None, timeout=None) as plain:
            text = (await plain.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)).token_ids
            served = (await plain.prepare()).description.target
        digest = hashlib.sha256(self._data).hexdigest()
        good = Manifest(
            version=NEW,
            weights_hash=served.weights_hash,
            tokenizer_hash=served.tokenizer_hash,
            artifact=f"sha256:{digest}",
            size=len(self._data),
            quantization="Q8_0",
        )
        return [await self._offer(release, good, text) for release in releases]

    async def _offer(self, bad: BadRelease, good: Manifest, text: tuple[int, ...]) -> Refusal:
        settings = EdgeSettings(release_keys=self._signer.public_key.hex(), release_spread_s=0.0)
        cache = self._folder / bad.wanted
        signer = Signer.generate() if bad.forged else self._signer
        async with TamperingCoordinator(self._coordinator) as coordinator, FileServer() as files:
            files.files[f"artifacts/{good.digest}.gguf"] = self._data
            async with AsyncClient(coordinator=coordinator.address, cache_dir=cache, settings=settings) as client:
                updates = client.updates
                if updates is None:
                    raise RuntimeError("a device with keys follows releases")
                if bad.before:
                    coordinator.offers(sign(dataclasses.replace(good, version=bad.before), signer), files.url)
                    while updates.floor < bad.before:
                        await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
                if bad.flipped:
                    files.files[f"artifacts/{good.digest}.gguf"] = flipped(self._data)
                files.cut = len(self._data) // 2 if bad.cut else 0
                with logged_warnings("edge_agent.releases") as warnings:
                    coordinator.offers(sign(bad.change(good), signer), files.url)
                    done = await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
                    with contextlib.suppress(Unavailable):  # what was not refused is reported as such
                        await until(lambda: bool(updates.refused), _WAIT_S, f"{bad.what} is refused")
                    later = await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        return Refusal(
            bad.what,
            bad.wanted,
            tuple(sorted(updates.refused)),
            next((line for line in warnings if "is not used" in line), "; ".join(warnings)),
            done.token_ids == later.token_ids == text,
            bool(bad.before) or later.statistics.release != good.digest,
        )


def flipped(data: bytes) -> bytes:
    """Return the data with one bit in the middle changed."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@contextlib.contextmanager
def logged_warnings(name: str) -> Iterator[list[str]]:
    """Collect the warnings of a logger and of those below it."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector, logger = Collector(logging.WARNING), logging.getLogger(name)
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
