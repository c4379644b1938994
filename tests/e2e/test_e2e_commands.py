"""Test the commands that people type, and TLS between all three."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from delay_proxy import DelayProxy
from grpc_health.v1 import health_pb2, health_pb2_grpc
from system import QUICK, ROOT, Failed, alive, children_of, status_of, until

from coordinator.cluster import Cluster
from outrider.wire.channels import ClientTls, channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "def double(x):\n"
OUTRIDER = (sys.executable, "-m", "coordinator.cli")
EDGE = (sys.executable, "-m", "edge_agent.cli")
VERIFIER = (sys.executable, "-m", "cloud_verifier.app")


@contextlib.asynccontextmanager
async def process(*command: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        yield made
    finally:
        for pid in [*children_of(made.pid), made.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await made.wait()


async def output(*command: str, timeout_s: float = 30.0, **environment: str) -> tuple[int, str, str]:
    async with process(*command, **environment) as made:
        out, err = await asyncio.wait_for(made.communicate(), timeout_s)
        return made.returncode or 0, out.decode(), err.decode()


async def test_up_status_generate_and_ctrl_c(pair, folder):
    target, draft = map(str, pair)
    state = str(folder / "up-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--draft", draft, "--state-dir", state)
    async with process(*up, "--name", "renamed", "--", "--max-sessions", "7", *QUICK) as running:
        assert running.stdout is not None and running.stderr is not None
        err = asyncio.create_task(running.stderr.read())  # or it would block on a full pipe
        line = (await asyncio.wait_for(running.stdout.readline(), 120)).decode()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        assert address, line
        assert ", 1 verifier; " in line
        where = ("--coordinator", address[0])

        code, out, _ = await output(*OUTRIDER, "status", *where, "--state-dir", state)
        assert code == 0
        assert re.search(r"verifier-1 +127\.0\.0\.1:\d+ +renamed .* 0/7 .* serving", out)

        generate = (*EDGE, "generate", PROMPT, *where, "--max-tokens", "24", "--cache-dir", str(folder / "cache"))
        (code, drafted, said), (_, streamed, _) = await asyncio.gather(
            output(*generate, "--stats"), output(*generate, "--draft", "none")
        )
        assert code == 0, said
        assert drafted == streamed != "\n"
        assert "tokens in" in said

        chat = ("chat", *where, "--message", "Hello", "--max-tokens", "8", "--cache-dir", str(folder / "cache"))
        assert await output(*OUTRIDER, *chat) == (0, (await output(*EDGE, *chat))[1], "")

        children = children_of(running.pid)
        assert len(children) >= 4  # coordinator, Redis, verifier, engine
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 30) == 0
        assert [pid for pid in children if alive(pid)] == []
        said = (await err).decode()
        assert "Traceback" not in said
        assert "draining: no session is live" in said
        for step in (
            "starting the coordinator",
            "coordinator is ready at",
            "starting a verifier",
            "verifier-1 is ready",
        ):
            assert step in said
        assert re.search(r"verifier-1 INFO loading target as float32 on cpu", said)  # its own progress


async def test_other_users_neither_administer_nor_join_what_up_started_and_its_own_user_does(pair, folder):
    target, state = str(pair[0]), str(folder / "up-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--state-dir", state)
    async with process(*up, "--", *QUICK) as running:
        assert running.stdout is not None
        line = (await asyncio.wait_for(running.stdout.readline(), 120)).decode()
        address = line.split()[3].rstrip(",")
        tokens = folder / "up-state" / "tokens.json"
        assert tokens.stat().st_mode & 0o777 == 0o600

        other = {"HOME": str(folder / "another-home")}
        async with channel(address) as link:
            for call in (
                coordinator_pb2_grpc.AdminStub(link).Status(pb.StatusRequest()),
                coordinator_pb2_grpc.RegistryStub(link).Register(pb.RegisterRequest(verifier_id="mine")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await output(*OUTRIDER, "status", "--coordinator", address, **other))[0] == 5

        own = {"OUTRIDER_COORDINATOR_STATE_DIR": state}
        join = (*VERIFIER, "--model", target, "--coordinator", address, "--verifier-id", "joined", *QUICK)
        async with process(*join, **own) as joining:
            assert joining.stdout is not None
            assert b"listening on" in await asyncio.wait_for(joining.stdout.readline(), 120)
            code, out, _ = await output(*OUTRIDER, "verifiers", "list", "--coordinator", address, **own)
        assert (code, "joined" in out) == (0, True)
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 30) == 0
        assert not tokens.exists()


async def test_up_in_json_has_no_plain_line_says_who_speaks_and_ends_soon(pair, folder):
    target, state = str(pair[0]), str(folder / "up-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--state-dir", state, "--verifiers", "2")
    async with process(*up, "--log-format", "json", "--", *QUICK) as running:
        assert running.stdout is not None and running.stderr is not None
        err = asyncio.create_task(running.stderr.read())
        line = await asyncio.wait_for(running.stdout.readline(), 120)
        assert ", 2 verifiers; " in json.loads(line)["message"]
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 30) == 0
        took_s = time.monotonic() - began
        lines = [json.loads(line) for line in [*(await err).splitlines(), *(await running.stdout.read()).splitlines()]]
        assert {"up", "coordinator", "verifier-1", "verifier-2"} <= {line["process"] for line in lines}
        assert took_s < 4.0  # under 1 s on an idle machine


async def test_ctrl_c_while_a_model_is_loading_leaves_no_child(pair, folder):
    target, state = str(pair[0]), str(folder / "up-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--state-dir", state)
    async with process(*up) as running:
        await until(lambda: any("cloud_verifier" in _command(pid) for pid in children_of(running.pid)), 60)
        children = children_of(running.pid)
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 20) == 0
        await until(lambda: not [pid for pid in children if alive(pid)])


async def test_a_terminated_demo_leaves_no_device_and_no_scratch(pair, tmp_path):
    async with process(*OUTRIDER, "demo", "--quick", TMPDIR=str(tmp_path)) as running:
        await _device_of(running.pid)
        children = children_of(running.pid)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 20) == 128 + signal.SIGTERM
        assert [pid for pid in children if alive(pid)] == []
        assert list(tmp_path.glob("outrider-*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end children with their parent")
async def test_a_demo_that_is_killed_outright_leaves_no_child(pair, tmp_path):
    async with process(*OUTRIDER, "demo", "--quick", TMPDIR=str(tmp_path)) as running:
        await _device_of(running.pid)
        children = children_of(running.pid)
        assert children
        running.kill()
        await until(lambda: not [pid for pid in children if alive(pid)])


async def _device_of(demo: int) -> None:
    """Wait until the demonstration's device runs."""
    await until(lambda: any("-m\0edge_agent.demo" in _command(pid) for pid in children_of(demo)), 60)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end children with their parent")
async def test_an_up_that_is_killed_outright_leaves_no_child(pair, folder):
    target, state = str(pair[0]), str(folder / "up-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--state-dir", state)
    async with process(*up) as running:
        await until(lambda: any("cloud_verifier" in _command(pid) for pid in children_of(running.pid)), 60)
        children = children_of(running.pid)
        assert children
        running.kill()
        await until(lambda: not [pid for pid in children if alive(pid)])


async def test_sigterm_while_a_model_is_loading_ends_a_verifier_with_0(pair):
    async with process(*VERIFIER, "--model", str(pair[0])) as running:
        await until(lambda: children_of(running.pid), 60)
        running.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert await asyncio.wait_for(running.wait(), 20) == 0
        assert time.monotonic() - began < 5.0


async def test_a_command_that_cannot_reach_anybody_says_so(folder):
    nobody = ("--coordinator", "127.0.0.1:1")
    for command, failed in (
        ((*OUTRIDER, "status", *nobody), 4),
        ((*EDGE, "generate", PROMPT, *nobody, "--cache-dir", str(folder / "cache")), 1),
    ):
        code, out, err = await output(*command)
        assert (code, out) == (failed, "")
        assert "127.0.0.1:1" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "0.0.0.0:0", "--insecure", "--coordinator", "127.0.0.1:1"), "--advertise"),
        (("--listen", "127.0.0.1:0", "--threads", "0"), "threads"),
    ],
)
async def test_a_verifier_that_would_be_unsafe_or_unreachable_is_refused(pair, flags, complaint):
    code, out, err = await output(*VERIFIER, "--model", str(pair[0]), *flags)
    assert (code, out) == (2, "")
    assert complaint in err
    assert "Traceback" not in err


async def test_plain_text_to_another_machine_is_refused_at_the_device(device):
    with pytest.raises(Failed, match="--insecure") as caught:
        await device.run({"verifier": "192.0.2.1:7000"}, PROMPT, max_tokens=4)
    assert caught.value.kind == "BadRequest"


async def test_tls_between_all_three(pair, folder, device):
    ca, cert, key = certificates(folder / "tls")
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    target, draft = map(str, pair)
    async with Cluster(logs=folder / "tls-logs") as cluster:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", "--state-dir", str(folder / "tls-state"), *tls)
        await cluster.start_verifier("--model", target, "--draft", draft, *QUICK, *tls, "--coordinator-ca", str(ca))
        where = {"coordinator": cluster.address}
        drafted = await device.run({**where, "ca": str(ca)}, PROMPT, max_tokens=24)
        assert drafted["accepted"] >= 0
        assert len((await status_of(cluster.address, ca)).verifiers) == 1
        async with DelayProxy(cluster.address, 200.0) as way, DelayProxy(cluster.verifiers[0].address, 200.0) as on:
            far = {"coordinator": way.address, "ca": str(ca), "reroute": {cluster.verifiers[0].address: on.address}}
            distant = await device.run(far, PROMPT, max_tokens=24)
        assert distant["attaches"] == 1
        code, out, _ = await output(*OUTRIDER, "status", "--coordinator", cluster.address, "--ca", str(ca))
        assert code == 0
        assert "verifier-1" in out
        # Neither plain text nor somebody else's authority gets in.
        other_ca, _, _ = certificates(folder / "other_ca")
        for other in ({}, {"ca": str(other_ca)}):
            with pytest.raises(Failed) as caught:
                await device.run({**where, **other}, PROMPT, max_tokens=4)
            assert caught.value.kind == "Unavailable"


async def test_up_speaks_tls_with_its_verifiers_and_status_trusts_public_authorities(pair, folder):
    ca, cert, key = certificates(folder / "up-tls")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", str(pair[0]), "--state-dir", str(folder / "up-state"))
    async with process(*up, "--tls-cert", str(cert), "--tls-key", str(key), "--", *QUICK) as running:
        assert running.stdout is not None
        line = (await asyncio.wait_for(running.stdout.readline(), 60)).decode()
        status = (*OUTRIDER, "status", "--coordinator", line.split()[3].rstrip(","), "--tls")
        status = (*status, "--state-dir", str(folder / "up-state"))
        code, out, said = await output(*status, GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=str(ca))
        assert (code, said) == (0, "")
        assert "verifier-1" in out
        code, out, _ = await output(*status)
        assert (code, out) == (4, "")


async def test_where_callers_need_a_certificate_everything_works_with_one_and_nothing_without(pair, folder):
    _, cert, key = certificates(folder / "mtls")
    _, strange, strange_key = certificates(folder / "strange")
    target, draft, state = str(pair[0]), str(pair[1]), str(folder / "mtls-state")
    up = (*OUTRIDER, "up", "--listen", "127.0.0.1:0", "--model", target, "--draft", draft, "--state-dir", state)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert))
    async with process(*up, *tls, "--", *QUICK) as running:
        assert running.stdout is not None
        address = (await asyncio.wait_for(running.stdout.readline(), 120)).decode().split()[3].rstrip(",")
        status = (*OUTRIDER, "verifiers", "list", "-o", "json", "--coordinator", address, "--state-dir", state)
        generate = (*EDGE, "generate", PROMPT, "--coordinator", address, "--max-tokens", "8", "--tls-ca", str(cert))
        generate = (*generate, "--cache-dir", str(folder / "mtls-cache"))
        assert (await output(*status, "--ca", str(cert)))[0] == 4
        assert (await output(*status, "--ca", str(cert), "--cert", str(strange), "--cert-key", str(strange_key)))[
            0
        ] == 4
        code, out, _ = await output(*status, "--ca", str(cert), "--cert", str(cert), "--cert-key", str(key))
        assert code == 0
        assert (await output(*generate))[0] == 1
        code, text, said = await output(*generate, "--tls-cert", str(cert), "--tls-key", str(key))
        assert (code, bool(text.strip())) == (0, True), said

        verifier = json.loads(out)["verifiers"][0]["address"]
        for trust, gets_in in ((ClientTls(cert), False), (ClientTls(cert, cert, key), True)):
            async with channel(verifier, tls=trust) as link:
                check = health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                if gets_in:
                    assert (await check).status == health_pb2.HealthCheckResponse.SERVING
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await check


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def certificates(folder: Path) -> Sequence[Path]:
    """Return a certificate for 127.0.0.1 that is its own authority: (authority, certificate, key)."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
    today = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "cert.pem", folder / "key.pem"
