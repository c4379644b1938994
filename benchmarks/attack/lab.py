"""Run what is attacked: a cluster with a neighbour in it, and single processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.attack.neighbour import Neighbour, Window
from benchmarks.attack.product import Product
from benchmarks.support import proc
from benchmarks.support.harness import Pair, Size
from coordinator.cluster import Child
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

PLACES = 24
"""Places of the cluster's verifier."""
OPENS_PER_MINUTE = 300
"""Sessions that a tenant may open in a minute, where the product bounds that: its default bounds what a minute's flood
costs, and attacks take seconds."""
NEIGHBOUR, HONEST, HOSTILE, FLOODER = "neighbour", "honest", "hostile", "flooder"
OTHERS = ("first", "second", "third")
SECRET_BYTES = 24
CALL_S = 5.0
PACE = {"PACED_PASS_MS": "20", "PACED_ROW_MS": "0.05"}
"""The verifier's steps take so long as a larger target's, which attackers on the same machine cannot lengthen by using
its core. Its attention is exact, so that a token does not depend on who else is in the step."""
READY_S = 20.0
QUIET_TIMES = 5
"""Quiet times that an attack is compared with: of one alone the p99 is a single gap, and a machine changes."""
_SOCKET = re.compile(r"/[^\0: ]*redis\.sock")
"""The path in the command line of an embedded Redis."""


class Caller:
    """Call a coordinator with a secret; its stubs need no further metadata."""

    def __init__(self, address: str, secret: str = "") -> None:
        self.channel = channel(address)
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        self._stubs = {
            name: getattr(coordinator_pb2_grpc, f"{name}Stub")(self.channel)
            for name in ("Coordinator", "Registry", "Admin")
        }

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def __call__(self, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
        """Call `Service.Method`. Raises grpc.aio.AioRpcError."""
        service, name = method.split(".")
        return await getattr(self._stubs[service], name)(request, metadata=self._metadata, timeout=timeout_s)

    async def open(self, **fields: Any) -> pb.OpenSessionResponse:
        """Open a session. Raises grpc.aio.AioRpcError."""
        opened: pb.OpenSessionResponse = await self("Coordinator.OpenSession", pb.OpenSessionRequest(**fields))
        return opened

    async def close(self, opened: pb.OpenSessionResponse) -> None:
        """Close a session, if that is possible."""
        request = pb.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self("Coordinator.CloseSession", request)

    async def tried(self, method: str, request: Any) -> str:
        """Return how a call ended: OK, or the name of its status."""
        try:
            await self(method, request)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"


@dataclass
class Lab:
    """Hold the cluster under attack, and what every attack needs."""

    product: Product
    pair: Pair
    size: Size
    scratch: Path
    cores: tuple[int, int]
    """The verifier's, and the one of everything else."""
    prompt: list[int]
    tokens: int
    """Tokens of the neighbour's sessions."""
    coordinator: Child = field(init=False)
    verifier: Child = field(init=False)
    neighbour: Neighbour = field(init=False)
    metrics: str = field(init=False, default="")
    """Where the coordinator serves its metrics."""
    attacks: list[Window] = field(default_factory=list)
    """When there was an attack."""
    calm: list[Window] = field(default_factory=list)
    """When there was none."""

    def __post_init__(self) -> None:
        self.keys = {name: secrets.token_hex(SECRET_BYTES) for name in (NEIGHBOUR, HONEST, HOSTILE, FLOODER, *OTHERS)}
        self.admin_token, self.join_token = secrets.token_hex(SECRET_BYTES), secrets.token_hex(SECRET_BYTES)
        self._started = 0
        self._running = contextlib.AsyncExitStack()
        self._beside = contextlib.AsyncExitStack()
        self._lone: Child | None = None

    async def __aenter__(self) -> Lab:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._beside.aclose()
        await self._running.aclose()

    @property
    def calm_s(self) -> float:
        """Return the seconds of quiet before each attack."""
        return self.size.pick(smoke=0.5, quick=1.5, full=10.0)

    @property
    def least_s(self) -> float:
        """Return the least seconds of an attack: in a shorter one few gaps of the neighbour's show little."""
        return self.size.pick(smoke=0.5, quick=2.5, full=10.0)

    @contextlib.asynccontextmanager
    async def under_attack(self) -> AsyncIterator[None]:
        """Take what happens in the body for the attack, and a while before it for quiet time."""
        began = time.monotonic()
        await asyncio.sleep(self.calm_s)
        at = time.monotonic()
        self.calm.append((began, at))
        try:
            yield
        finally:
            self.attacks.append((at, time.monotonic()))

    def quiet_p99_ms(self) -> float | None:
        """Return the neighbour's p99 gap in a quiet time, the median of the last few."""
        found = [p99 for window in self.calm[-QUIET_TIMES:] if (p99 := self.neighbour.p99_ms(window)) is not None]
        return statistics.median(found) if found else None

    def caller(self, tenant: str) -> Caller:
        """Return a caller with a tenant's key."""
        return Caller(self.coordinator.address, self.keys[tenant])

    def operator(self) -> Caller:
        """Return a caller with the admin token."""
        return Caller(self.coordinator.address, self.admin_token)

    def folder(self, name: str) -> Path:
        """Return a new folder."""
        self._started += 1
        made = self.scratch / f"{self._started}-{name}"
        made.mkdir(parents=True)
        return made

    @contextlib.asynccontextmanager
    async def a_coordinator(self, *options: str, tenants: Sequence[str] = (), **settings: str) -> AsyncIterator[Child]:
        """Run a coordinator with an embedded Redis.

        settings: given by its environment, so that a checkout which does not have one ignores it.
        """
        folder = self.folder("coordinator")
        arguments = ["--listen", "127.0.0.1:0", "--state-dir", str(folder / "state"), *options]
        if tenants:
            file = folder / "tenants.toml"
            file.write_text("[tenants]\n" + "".join(f'{name} = "{self.keys[name]}"\n' for name in tenants))
            arguments += ["--tenants", str(file)]
        variables = {f"OUTRIDER_COORDINATOR_{name.upper()}": value for name, value in settings.items()}
        child = await self.product.start(
            "coordinator", "coordinator.app", *arguments, logs=folder, core=self.cores[1], **variables
        )
        try:
            yield child
        finally:
            await child.stop()

    @contextlib.asynccontextmanager
    async def a_verifier(
        self,
        *options: str,
        core: int | None = None,
        module: str = "cloud_verifier.app",
        variables: Mapping[str, str] = {},
    ) -> AsyncIterator[Child]:
        """Run a verifier of the pair with its draft. variables: of its environment."""
        models = ("--model", str(self.pair.target), "--draft", str(self.pair.draft), "--threads", "1")
        folder = self.folder("verifier")
        child = await self.product.start(
            "verifier",
            module,
            *models,
            *options,
            logs=folder,
            core=self.cores[0] if core is None else core,
            **(variables or {}),
        )
        try:
            yield child
        finally:
            await child.stop()

    async def lone_verifier(self) -> Child:
        """Return a verifier without a coordinator, which is started at the first call, on the devices' core."""
        if self._lone is None or not self._lone.running:
            lone = self.a_verifier("--kv-slots", "4096", core=self.cores[1])
            self._lone = await self._beside.enter_async_context(lone)
        return self._lone

    def log_of(self, child: Child) -> str:
        """Return what a process has logged."""
        return "" if child._log is None else child._log.read_text(errors="replace")

    async def recover(self) -> bool:
        """Wait until an honest tenant is served again; start the cluster anew and return False if it is not."""
        give_up = time.monotonic() + READY_S / 2
        async with self.caller(HONEST) as honest:
            while time.monotonic() < give_up:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    opened = await honest.open()
                    await honest.close(opened)
                    return True
                await asyncio.sleep(0.25)
        await self._running.aclose()
        await self._start()
        return False

    async def _start(self) -> None:
        """Start coordinator, verifier and neighbour, and wait until the verifier serves."""
        self._running = contextlib.AsyncExitStack()
        self.calm.clear()
        try:
            enter = self._running.enter_async_context
            self.metrics = f"127.0.0.1:{free_port()}"
            self.coordinator = await enter(
                self.a_coordinator(
                    *("--metrics", self.metrics),
                    tenants=tuple(self.keys),
                    admin_token=self.admin_token,
                    join_token=self.join_token,
                    cluster_key=secrets.token_hex(SECRET_BYTES),
                    tenant_opens_per_minute=str(OPENS_PER_MINUTE),
                )
            )
            self.verifier = await enter(
                self.a_verifier(
                    *("--verifier-id", "attacked", "--coordinator", self.coordinator.address),
                    *("--attention", "exact", "--max-sessions", str(PLACES)),
                    module="benchmarks.support.paced_verifier",
                    variables={**PACE, "OUTRIDER_VERIFIER_JOIN_TOKEN": self.join_token},
                )
            )
            self.neighbour = await enter(Neighbour.running(self.product, self.cores[1], self.request(NEIGHBOUR)))
        except BaseException:
            await self._running.aclose()
            raise

    def request(self, tenant: str, **changes: Any) -> dict[str, Any]:
        """Return the neighbour's request, made by a tenant, for a task of device.py."""
        cache = str(self.scratch / "cache" / tenant)
        client = {"coordinator": self.coordinator.address, "api_key": self.keys[tenant], "cache_dir": cache}
        options = {"client": client, "prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True}
        return options | {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 7} | changes


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def redis_of(coordinator: Child) -> tuple[int, str]:
    """Return the process id and the URL of a coordinator's embedded Redis. Raises RuntimeError if it has none."""
    for pid in proc.children(coordinator.pid):
        if found := _SOCKET.search(Path("/proc", str(pid), "cmdline").read_text(errors="replace")):
            return pid, f"unix://{found.group()}"
    raise RuntimeError("the coordinator has no Redis of its own")
