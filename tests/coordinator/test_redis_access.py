"""Test a coordinator over a real Redis that wants a password, a user with few rights, TLS, or a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis as redis_client
from certificate import self_signed

from coordinator.store.embedded_redis import _binary
from outrider.core.errors import Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb

PASSWORD = "redis-password-0123456789"
RIGHTS = "on >user-password ~outrider:* resetchannels -@all +@read +@write +@scripting +@transaction +@connection +time"
"""The rights that docs/operations.md gives to coordinators."""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Run a server on a port of loopback that wants the password; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), "--requirepass", PASSWORD)
    process = subprocess.Popen([_binary(), "--port", str(port), *options], stdout=subprocess.DEVNULL)
    try:
        with redis_client.Redis(port=port, password=PASSWORD) as client:
            for _ in range(1000):
                with contextlib.suppress(redis_client.ConnectionError):
                    client.ping()
                    break
            client.execute_command("ACL", "SETUSER", "outrider", *RIGHTS.split())
        yield port
    finally:
        process.kill()
        process.wait()


async def works(coordinator) -> None:
    """Use the coordinator as verifiers, devices and operators do."""
    await coordinator.join("v1")
    opened = await coordinator.open()
    assert (await coordinator.report("v1", [opened.session_id])).known
    await coordinator.resume(opened)
    await coordinator.close(opened)
    tenant = await coordinator.admin.UpdateTenant(pb.UpdateTenantRequest(action="TENANT_ACTION_CREATE", name="acme"))
    assert tenant.key
    assert await coordinator.alive() == {"v1"}
    assert not (await coordinator.admin.ListReleases(pb.ListReleasesRequest())).releases


@pytest.mark.parametrize("who", [f":{PASSWORD}", "outrider:user-password"])
async def test_with_its_password_and_few_rights_everything_works(start, port, who):
    await works(await start(redis=f"redis://{who}@127.0.0.1:{port}"))


@pytest.mark.parametrize("who", ["", ":wrong-password@", "nobody:user-password@"])
async def test_without_the_password_nothing_works_and_none_is_shown(start, port, refused, who, caplog):
    coordinator = await start(redis=f"redis://{who}127.0.0.1:{port}")
    error = await refused(coordinator.join("v1"))
    assert isinstance(error, Unavailable)
    assert "Authentication" in str(error)
    assert "password-" not in str(error) + caplog.text
    assert "wrong-password" not in str(error) + caplog.text


@contextlib.asynccontextmanager
async def tls_before(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Speak TLS at another port and pass everything on, as a Redis with TLS would; the tests' own speaks none."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, behind[1]), pass_on(behind[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def test_over_tls_only_a_trusted_redis_is_used_and_a_certificate_is_shown(start, port, tmp_path, refused):
    for name in ("server", "client"):
        (tmp_path / name).mkdir()
    redis, client = self_signed(tmp_path / "server"), self_signed(tmp_path / "client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(redis.cert, redis.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(client.cert)
    async with tls_before(port, context) as tls_port:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{tls_port}"
        shown = f"ssl_certfile={client.cert}&ssl_keyfile={client.key}"
        for wrong in (
            url.replace("rediss", "redis"),  # plain text
            f"{url}?{shown}",  # of an unknown authority
            f"{url}?ssl_ca_certs={redis.cert}",  # without a certificate
        ):
            assert isinstance(await refused((await start(redis=wrong)).join("v1")), Unavailable), wrong
        await works(await start(redis=f"{url}?ssl_ca_certs={redis.cert}&{shown}"))
