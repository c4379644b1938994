"""Test that draft files are served over HTTP on a real socket, whole and in parts, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import ssl
from urllib.parse import urlsplit

import pytest
from certificate import self_signed

from coordinator.api.artifact_http import serving
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest
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
    with contextlib.closing(kind(where.hostname, where.port, timeout=60, **tls)) as connection:
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


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("bytes=0-0", 0, 1), ("bytes=100-199", 100, 200), ("bytes=262000-", 262_000, None), ("bytes=-10", -10, None)],
)
async def test_a_download_goes_on_where_it_was_cut_off(get, asked, start, end) -> None:
    status, headers, body = await get(range=asked)
    assert (status, body) == (206, CONTENT[start:end])
    first = start % len(CONTENT)
    assert headers["content-range"] == f"bytes {first}-{first + len(body) - 1}/{len(CONTENT)}"


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
