"""Test TLS, loopback and bounds, on real sockets."""

import contextlib
import socket

import grpc
import pytest
from certificate import self_signed
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire import channels
from outrider.wire.channels import ClientTls, ServerTls, check_bind, is_loopback
from outrider.wire.health import Health
from outrider.wire.status import error_from_rpc


@pytest.fixture
def certificate(tmp_path):
    """Make a self-signed certificate for 127.0.0.1 and its key, as files."""
    made = self_signed(tmp_path)
    return ServerTls(made.cert, made.key)


async def healthy(channel):
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def serving():
    """Start a server with a health service on a free port."""
    servers = []

    async def start(**options):
        server = channels.server()
        Health().add_to(server)
        port = channels.bind(server, "127.0.0.1:0", **options)
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


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


@pytest.mark.parametrize("address", ["0.0.0.0:7700", "[::]:7700", "10.0.0.1:7700", "verifier.example:7700"])
async def test_plain_text_beyond_this_machine_is_refused_with_the_way_out(address):
    for refused in (
        lambda: channels.bind(channels.server(), address),
        lambda: channels.channel(address),
        lambda: check_bind(address, None, False),
    ):
        with pytest.raises(BadRequest, match=r"not a loopback address.*--tls-cert.*--insecure"):
            refused()


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


async def test_a_taken_port_is_refused_rather_than_shared_and_by_us_alone(serving, capfd):
    address = await serving()
    with pytest.raises(Unavailable, match=rf"cannot listen on {address} \(--listen\): Address already in use; end the"):
        channels.bind(channels.server(), address)
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


async def test_localhost_and_every_interface_are_listened_at_in_both_families():
    for address, families in (
        ("localhost:0", [socket.AF_INET, socket.AF_INET6]),
        ("127.0.0.1:0", [socket.AF_INET]),
        ("[::]:0", [socket.AF_INET6]),
    ):
        listeners = channels.listening(address)
        with contextlib.ExitStack() as stack:
            for one in listeners:
                stack.enter_context(one)
            if not socket.has_ipv6:
                continue
            assert [one.family for one in listeners] == families
            (port,) = {one.getsockname()[1] for one in listeners}
            for host in () if address.startswith("127") else ("127.0.0.1", "::1"):
                socket.create_connection((host, port), timeout=10).close()
            with pytest.raises(OSError, match=r"Address already in use$"):
                channels.listening(address.replace(":0", f":{port}"))


@pytest.mark.parametrize(
    ("address", "environment", "named"),
    [
        ("cluster.example:7700", {}, ""),
        ("cluster.example:7700", {"http_proxy": "http://me:secret@proxy:3128"}, "http://***@proxy:3128 (http_proxy)"),
        ("cluster.example:7700", {"http_proxy": "http://a:1", "https_proxy": "http://b:2"}, "http://b:2 (https_proxy)"),
        ("cluster.example:7700", {"http_proxy": "http://a:1", "no_proxy": "localhost, .example"}, ""),
        ("127.0.0.1:7700", {"http_proxy": "http://a:1"}, ""),
        ("localhost:7700", {"grpc_proxy": "http://a:1"}, ""),
    ],
)
def test_the_proxy_through_which_calls_go_is_named_without_its_credentials(address, environment, named, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = str(Unavailable(channels.proxy_of(address)))
    assert named in said and bool(named) == bool(said) and "secret" not in said


@pytest.mark.parametrize("far", [False, True])
def test_a_silent_peer_is_pinged_and_no_server_takes_a_clients_pings_for_abuse(monkeypatch, far):
    made = []
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda _, options: made.append(dict(options)))
    monkeypatch.setattr(grpc.aio, "server", lambda options, **_: made.append(dict(options)))
    channels.channel("127.0.0.1:1", far=far)
    channels.server()
    client, server = made
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"] <= 2_000
    for options in made:
        assert options["grpc.http2.max_pings_without_data"] == 0
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
    assert client["grpc.keepalive_timeout_ms"] == (12_000 if far else 2_000)
