"""Test that draft files are served over HTTP on a real socket, whole and in parts, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import socket
import ssl
from urllib.parse import urlsplit

import pytest
from certificate import self_signed

from coordinator.api import artifact_http
from coordinator.api.artifact_http import MAX_CONNECTIONS, serving
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire.channels import ServerTls

CONTENT = bytes(range(256)) * 1_024
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "artifacts"
    folder.mkdir()
    (folder / f"{DIGEST}.gguf").write_bytes(CONTENT)
    (folder / "notes.txt").write_text("private")
    (tmp_path / "ticket-key.pem").write_text("secret")
    return folder


@pytest.fixture
async def get(folder):
    """Send a request; return status, headers (lower case) and body."""
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:

        async def ask(path: str = f"artifacts/{DIGEST}.gguf", method: str = "GET", **headers: str):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await asyncio.to_thread(_ask, base, method, f"/{path}", named)

        yield ask


def _ask(base, method, path, headers, context=None):
    where = urlsplit(base)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    tls = {"context": context} if context else {}
    with contextlib.closing(kind(where.hostname, where.port, timeout=10, **tls)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


async def test_a_file_comes_whole_by_its_hash_with_or_without_its_suffix(get) -> None:
    for path in (f"artifacts/{DIGEST}.gguf", f"artifacts/{DIGEST}"):
        status, headers, body = await get(path)
        assert (status, body) == (200, CONTENT)
        assert headers["content-length"] == str(len(CONTENT))
        assert headers["accept-ranges"] == "bytes"
        assert headers["etag"] == f'"{DIGEST}"'
        assert "immutable" in headers["cache-control"]


async def test_head_tells_the_size_without_the_file(get) -> None:
    status, headers, body = await get(method="HEAD")
    assert (status, headers["content-length"], body) == (200, str(len(CONTENT)), b"")


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("bytes=0-0", 0, 1), ("bytes=100-199", 100, 200), ("bytes=262000-", 262_000, None), ("bytes=-10", -10, None)],
)
async def test_a_download_goes_on_where_it_was_cut_off(get, asked, start, end) -> None:
    status, headers, body = await get(range=asked)
    assert (status, body) == (206, CONTENT[start:end])
    first = start % len(CONTENT)
    assert headers["content-range"] == f"bytes {first}-{first + len(body) - 1}/{len(CONTENT)}"


async def test_a_range_is_kept_for_the_same_file_only(get) -> None:
    status, _, body = await get(range="bytes=5-9", if_range=f'"{DIGEST}"')
    assert (status, body) == (206, CONTENT[5:10])
    status, _, body = await get(range="bytes=5-9", if_range='"another"')
    assert (status, body) == (200, CONTENT)


async def test_a_range_beyond_the_end_is_refused_with_the_size(get) -> None:
    status, headers, _ = await get(range=f"bytes={len(CONTENT)}-")
    assert (status, headers["content-range"]) == (416, f"bytes */{len(CONTENT)}")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "artifacts/",
        "artifacts/notes.txt",
        "artifacts/../ticket-key.pem",
        "artifacts/..%2fticket-key.pem",
        "artifacts/%2e%2e/ticket-key.pem",
        f"artifacts/{DIGEST.upper()}.gguf",
        f"artifacts/{DIGEST}.gguf.part",
        f"artifacts/{DIGEST[:-1]}",
        f"artifacts/{DIGEST}%00",
        f"artifacts/{'0' * 64}.gguf",
        f"artifacts/x/{DIGEST}.gguf",
        "docs",
        "openapi.json",
    ],
)
async def test_nothing_else_is_served(get, path) -> None:
    status, _, body = await get(path)
    assert status == 404
    assert b"secret" not in body
    assert b"private" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_files_are_only_read(get, method, folder) -> None:
    assert (await get(method=method))[0] == 405
    assert (folder / f"{DIGEST}.gguf").read_bytes() == CONTENT


async def test_a_folder_of_that_name_is_no_file(get, folder) -> None:
    (folder / f"{'a' * 64}.gguf").mkdir()
    assert (await get(f"artifacts/{'a' * 64}.gguf"))[0] == 404


async def test_many_fetch_at_once_while_the_loop_goes_on(get) -> None:
    found = await asyncio.gather(*(get() for _ in range(12)))
    assert all(body == CONTENT for _, _, body in found)


async def test_a_client_that_goes_away_does_no_harm(folder, get) -> None:
    (folder / f"{'b' * 64}.gguf").write_bytes(b"x" * 8_000_000)
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:
        port = urlsplit(base).port
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(f"GET /artifacts/{'b' * 64} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                await asyncio.to_thread(connection.recv, 100)
        status, _, body = await asyncio.to_thread(_ask, base, "GET", f"/artifacts/{DIGEST}", {})
        assert (status, body) == (200, CONTENT)


# --- clients that hold a place for nothing


def _connected(base: str, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(base).port), timeout=10, source_address=(source, 0))


def _status(base: str, source: str = "127.0.0.1") -> int:
    """Return the status of a request from this address, 0 if the connection is closed instead."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", urlsplit(base).port, timeout=10)) as client:
        client.sock = _connected(base, source)
        try:
            client.request("GET", f"/artifacts/{DIGEST}")
            return client.getresponse().status
        except ConnectionError:
            return 0


def _closed(client: socket.socket) -> bool:
    """Return whether the server closes the connection within the socket's timeout."""
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_silent_connections_shut_nobody_else_out_and_end_soon(folder, monkeypatch) -> None:
    monkeypatch.setattr(artifact_http, "REQUEST_S", 2.0)
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:
        silent = [await asyncio.to_thread(_connected, base) for _ in range(MAX_CONNECTIONS)]
        assert await asyncio.to_thread(_status, base, "127.0.0.2") == 200
        assert await asyncio.to_thread(_status, base) == 0  # its address has too many already
        assert all([await asyncio.to_thread(_closed, client) for client in silent])
        assert await asyncio.to_thread(_status, base) == 200
        for client in silent:
            client.close()


@pytest.mark.parametrize("first", [b"", f"GET /artifacts/{'0' * 64} HTTP/1.1\r\nhost: x\r\n\r\n".encode()])
async def test_a_request_that_comes_byte_by_byte_is_not_waited_for(folder, monkeypatch, first) -> None:
    monkeypatch.setattr(artifact_http, "REQUEST_S", 0.3)
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(base).port)
        writer.write(first + b"GET ")
        ended = asyncio.create_task(reader.read())
        for _ in range(100):
            if ended.done():
                break
            writer.write(b"/")
            await asyncio.sleep(0.05)
        assert ended.done()
        ended.exception()  # the connection may have been reset
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off_and_a_slow_one_is_not(folder, monkeypatch) -> None:
    monkeypatch.setattr(artifact_http, "STALL_S", 1.0)
    size = 32_000_000
    (folder / f"{'b' * 64}.gguf").write_bytes(b"x" * size)
    request = f"GET /artifacts/{'b' * 64} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:
        with await asyncio.to_thread(_connected, base) as stuck, await asyncio.to_thread(_connected, base) as slow:
            stuck.sendall(request)
            slow.sendall(request)
            got = 0
            while got < size:  # over about twice the time
                got += len(await asyncio.to_thread(slow.recv, 800_000))
                await asyncio.sleep(0.05)
            assert await asyncio.to_thread(_received, stuck) < size


def _received(client: socket.socket) -> int:
    got = 0
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1_000_000):
            got += len(part)
    return got


async def test_the_port_is_free_again_once_it_is_over(folder) -> None:
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0") as base:
        address = urlsplit(base).netloc
        with pytest.raises(Unavailable, match="is the port taken"):
            async with serving(ArtifactStore(folder, ".gguf"), address):
                pass
    async with serving(ArtifactStore(folder, ".gguf"), address) as again:
        assert again == base


async def test_beyond_loopback_plain_text_needs_insecure_and_a_name_for_devices(folder) -> None:
    with pytest.raises(BadRequest, match="--insecure"):
        async with serving(ArtifactStore(folder, ".gguf"), "0.0.0.0:0"):
            pass
    with pytest.raises(BadRequest, match="--artifacts-url"):
        async with serving(ArtifactStore(folder, ".gguf"), "0.0.0.0:0", insecure=True):
            pass
    async with serving(
        ArtifactStore(folder, ".gguf"), "0.0.0.0:0", insecure=True, url="https://drafts.example/"
    ) as base:
        assert base == "https://drafts.example/"


async def test_where_callers_need_a_certificate_drafts_are_served_to_those_that_show_one(folder, tmp_path) -> None:
    for name in ("server", "client"):
        (tmp_path / name).mkdir()
    server, client = self_signed(tmp_path / "server"), self_signed(tmp_path / "client")
    tls = ServerTls(server.cert, server.key, client.cert)
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0", tls=tls) as base:
        context = ssl.create_default_context(cafile=server.cert)
        path = f"/artifacts/{DIGEST}"
        with pytest.raises(OSError, match=r"CERTIFICATE_REQUIRED|reset|closed"):
            await asyncio.to_thread(_ask, base, "GET", path, {}, context)
        context.load_cert_chain(client.cert, client.key)
        assert (await asyncio.to_thread(_ask, base, "GET", path, {}, context))[2] == CONTENT


async def test_with_the_coordinators_certificate_it_speaks_tls(folder, tmp_path) -> None:
    tls = self_signed(tmp_path)
    async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0", tls=tls) as base:
        assert base.startswith("https://")
        context = ssl.create_default_context(cafile=tls.cert)
        status, _, body = await asyncio.to_thread(_ask, base, "GET", f"/artifacts/{DIGEST}", {}, context)
        assert (status, body) == (200, CONTENT)


async def test_a_certificate_that_cannot_be_used_is_refused(folder, tmp_path) -> None:
    tls = self_signed(tmp_path)
    tls.key.write_text("no key")
    with pytest.raises(BadRequest, match="TLS certificate and key cannot be used"):
        async with serving(ArtifactStore(folder, ".gguf"), "127.0.0.1:0", tls=tls):
            pass
