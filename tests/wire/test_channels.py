"""Test TLS, loopback and bounds, on real sockets."""

import asyncio
import datetime
import ipaddress
import os
import signal
import sys
import time

import grpc
import pytest
from certificate import self_signed
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from delay_proxy import DelayProxy
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from logged import errors_logged

from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire import channels
from outrider.wire.channels import ClientTls, ServerTls, check_bind, is_loopback
from outrider.wire.status import error_from_rpc

HUNG_SERVER = """
import asyncio
from grpc_health.v1 import health, health_pb2_grpc
from outrider.wire import channels

async def main():
    server = channels.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    print(channels.bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Make a self-signed certificate for 127.0.0.1 and its key, as files."""
    directory = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "outrider test")])
    now = datetime.datetime.now(datetime.UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (directory / "cert.pem").write_bytes(made.public_bytes(pem))
    (directory / "key.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    return ServerTls(directory / "cert.pem", directory / "key.pem")


async def healthy(channel):
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def serving():
    """Start a server with a health service on a free port."""
    servers = []

    async def start(**options):
        server = channels.server()
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = channels.bind(server, "127.0.0.1:0", **options)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def test_a_client_that_trusts_the_certificate_gets_through(serving, certificate):
    address = await serving(tls=certificate)
    async with channels.channel(address, tls=ClientTls(certificate.cert)) as channel:
        assert await healthy(channel)


@pytest.mark.parametrize("plain", [True, False])
async def test_a_client_that_does_not_trust_the_certificate_or_finds_none_is_cut_off(serving, certificate, plain):
    address = await serving(tls=None if plain else certificate)
    async with channels.channel(address, tls=ClientTls()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await healthy(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    why = "it does not speak TLS" if plain else "its TLS certificate is not trusted"
    assert f"cannot be reached: {why}" in str(error_from_rpc(caught.value))


async def test_where_clients_need_a_certificate_only_one_of_the_named_authority_gets_through(
    serving, certificate, tmp_path
):
    (tmp_path / "client").mkdir()
    (tmp_path / "stranger").mkdir()
    client, stranger = self_signed(tmp_path / "client"), self_signed(tmp_path / "stranger")
    address = await serving(tls=ServerTls(certificate.cert, certificate.key, client.cert))
    for refused in (ClientTls(certificate.cert), ClientTls(certificate.cert, stranger.cert, stranger.key)):
        async with channels.channel(address, tls=refused) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await healthy(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with channels.channel(address, tls=ClientTls(certificate.cert, client.cert, client.key)) as channel:
        assert await healthy(channel)


def test_a_clients_certificate_without_its_key_is_refused(certificate):
    for half in (ClientTls(cert=certificate.cert), ClientTls(key=certificate.key)):
        with pytest.raises(BadRequest, match="go together"):
            channels.channel("127.0.0.1:1", tls=half)


async def test_a_command_says_in_one_line_that_its_peer_speaks_no_tls(serving):
    command = (sys.executable, "-c", "from outrider.console_scripts import operator; operator()")
    arguments = ("status", "--tls", "--coordinator", await serving())
    process = await asyncio.create_subprocess_exec(*command, *arguments, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 4
    assert len(said.splitlines()) == 1 and b"cannot be reached: it does not speak TLS" in said


async def test_a_first_connection_over_tls_survives_a_long_round_trip(serving, certificate):
    async with (
        DelayProxy(await serving(tls=certificate), rtt_ms=250.0) as proxy,
        channels.channel(proxy.address, tls=ClientTls(certificate.cert)) as channel,
    ):
        assert await healthy(channel)


@pytest.mark.slow
async def test_a_device_keeps_a_silent_connection_whose_answers_to_pings_take_seconds():
    async def answers_late(request, context):
        await asyncio.sleep(channels.PING_EVERY_MS / 1000 + 4.0)
        return b"answer"

    server = channels.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answers_late)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Late", handlers),))
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    far = DelayProxy(f"127.0.0.1:{port}", rtt_ms=channels.PING_TIMEOUT_MS + 1_000)
    async with far, channels.channel(far.address, far=True) as channel:
        assert await channel.unary_unary("/test.Late/Call")(b"", wait_for_ready=True) == b"answer"
    await server.stop(0)


async def test_a_plain_client_of_a_tls_server_is_cut_off(serving, certificate):
    address = await serving(tls=certificate)
    async with channels.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await healthy(channel)


async def test_plain_text_works_on_loopback(serving):
    async with channels.channel(await serving()) as channel:
        assert await healthy(channel)


@pytest.mark.parametrize("address", ["0.0.0.0:7700", "[::]:7700", "10.0.0.1:7700", "verifier.example:7700"])
async def test_plain_text_beyond_this_machine_is_refused_with_the_way_out(address):
    for refused in (
        lambda: channels.bind(channels.server(), address),
        lambda: channels.channel(address),
        lambda: check_bind(address, None, False),
    ):
        with pytest.raises(BadRequest, match=r"not a loopback address.*--tls-cert.*--insecure"):
            refused()


async def test_plain_text_beyond_this_machine_can_be_insisted_on(certificate):
    check_bind("0.0.0.0:7700", None, True)
    check_bind("0.0.0.0:7700", certificate, False)
    await channels.channel("10.0.0.1:7700", insecure=True).close()
    server = channels.server()
    assert channels.bind(server, "0.0.0.0:0", insecure=True) > 0
    await server.stop(None)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("LocalHost:1", True),
        ("localhost.example:1", False),
        ("[::]:1", False),
        ("192.168.1.1:1", False),
    ],
)
def test_only_what_never_leaves_this_machine_is_loopback(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    "address", ["", ":1", "host", "host:", "host:x", "host:65536", "::1:80", "host:" + "9" * 9_999]
)
def test_what_is_no_address_is_refused_with_the_form_of_one(address):
    with pytest.raises(BadRequest, match="HOST:PORT"):
        split_address(address)


async def test_a_taken_port_is_refused_rather_than_shared(serving):
    address = await serving()
    with pytest.raises(Unavailable, match=rf"cannot listen on {address} \(--listen\): Address already in use; end the"):
        channels.bind(channels.server(), address)


async def test_a_taken_port_is_reported_by_us_alone(serving, capfd):
    with pytest.raises(Unavailable):
        channels.bind(channels.server(), await serving())
    assert "add_port.cc" not in capfd.readouterr().err  # gRPC's own line


async def test_missing_and_senseless_tls_files_are_refused_by_name(tmp_path):
    absent = tmp_path / "absent.pem"
    with pytest.raises(BadRequest, match=r"absent\.pem cannot be read"):
        channels.bind(channels.server(), "127.0.0.1:0", tls=ServerTls(absent, absent))
    with pytest.raises(BadRequest, match=r"absent\.pem cannot be read"):
        channels.channel("127.0.0.1:1", tls=ClientTls(absent))
    senseless = tmp_path / "senseless.pem"
    senseless.write_bytes(b"garbage")
    with pytest.raises(BadRequest, match=r"senseless\.pem is no PEM"):
        channels.channel("127.0.0.1:1", tls=ClientTls(senseless))


async def test_a_certificate_without_its_key_is_refused_at_once(certificate):
    mixed = ServerTls(certificate.cert, certificate.cert)
    with pytest.raises(Unavailable, match="certificate and key"):
        channels.bind(channels.server(), "127.0.0.1:0", tls=mixed)


async def test_a_server_whose_start_was_cancelled_stops_without_a_word(caplog):
    server = channels.server()
    channels.bind(server, "127.0.0.1:0")
    starting = asyncio.create_task(channels.start(server))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    await server.stop(0.0)
    del server
    await asyncio.sleep(0.1)
    assert starting.cancelled()
    assert errors_logged(caplog) == []


async def test_a_server_that_hangs_without_closing_is_noticed_within_seconds():
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HUNG_SERVER, stdout=pipe)
    try:
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        async with channels.channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert await watch.read() is not grpc.aio.EOF
            os.kill(process.pid, signal.SIGSTOP)
            hung = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - hung < 10
    finally:
        process.kill()
        await process.wait()
