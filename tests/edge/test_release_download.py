"""Test that a release's file arrives whole and as it was signed, or not at all, and that downloads are resumed."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from certificate import private, self_signed
from file_server import Behaviour, FileServer

from edge_agent.releases.download import ReleaseRefused, download_urls, fetch
from outrider.artifacts.store import ArtifactStore
from outrider.wire.channels import ClientTls

DATA = random.Random(7).randbytes(300_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
FILE = f"{DIGEST}.gguf"

Fetch = Callable[..., Awaitable[None]]


@pytest.fixture
async def server() -> AsyncIterator[FileServer]:
    async with FileServer({FILE: DATA}) as running:
        yield running


@pytest.fixture
def fetched(tmp_path: Path) -> Fetch:
    """Return a function that fetches the file from servers, one after another."""
    store = ArtifactStore(tmp_path, ".gguf")

    async def fetching(*servers: FileServer, tls: ClientTls | None = None) -> None:
        await fetch(store, DIGEST, len(DATA), [f"{one.url}{FILE}" for one in servers], tls or ClientTls())
        assert store.path(DIGEST).read_bytes() == DATA

    return fetching


async def refused(fetching: Awaitable[None]) -> ReleaseRefused:
    with pytest.raises(ReleaseRefused) as caught:
        await fetching
    return caught.value


@pytest.mark.parametrize("ranges", [True, False])
async def test_what_broke_off_goes_on_where_it_was_if_the_server_knows_ranges(
    server: FileServer, fetched: Fetch, ranges: bool
) -> None:
    server.behaviour = Behaviour(break_after=100_000, ranges=ranges)
    error = await refused(fetched(server))
    assert error.kind == "truncated" and "100000 of 300000 bytes" in str(error)
    await fetched(server)
    assert server.ranges == ["", "bytes=100000-"]
    await fetched(server)
    assert len(server.asked) == 2  # what is there is not asked for again


@pytest.mark.parametrize(
    ("behaviour", "kind", "said", "kept"),
    [
        (Behaviour(flip=150_000), "altered", "another SHA-256", False),
        (Behaviour(extra=b"more"), "too long", "beyond the 300000 bytes", False),
        (Behaviour(extra=b"more", lengths=False), "too long", "beyond the 300000 bytes", False),
        (Behaviour(break_after=299_999, lengths=False), "truncated", "299999 of 300000 bytes", True),
        (Behaviour(stall_after=5), "truncated", "5 of 300000 bytes", True),
        (Behaviour(status=503), "unreachable", "status 503", True),
    ],
    ids=["altered", "announced too long", "too long", "truncated", "stalled", "an error"],
)
async def test_what_is_not_the_file_is_refused_and_named(
    server: FileServer,
    fetched: Fetch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behaviour,
    kind: str,
    said: str,
    kept: bool,
) -> None:
    server.behaviour = behaviour
    for stall_s in (0.05, 0.5, 5.0) if behaviour.stall_after >= 0 else (20.0,):  # a busy machine connects late
        monkeypatch.setattr("edge_agent.releases.download.STALL_S", stall_s)
        error = await refused(fetched(server))
        if error.kind == kind:
            break
    assert error.kind == kind and said in str(error)
    assert os.listdir(tmp_path) == ([f"{DIGEST}.partial"] if kept else [])


@pytest.mark.parametrize(
    ("does", "range_"),
    [(Behaviour(break_after=200_000), "bytes=200000-"), (Behaviour(flip=9), "")],
    ids=["breaks off", "alters"],
)
async def test_the_next_address_goes_on_with_what_the_first_one_brought_if_it_is_right(
    server: FileServer, fetched: Fetch, does: Behaviour, range_: str
) -> None:
    async with FileServer({FILE: DATA}, does) as first:
        await fetched(first, server)
    assert server.ranges == [range_]


async def test_where_nobody_listens_or_nothing_is_named_it_says_so(fetched: Fetch) -> None:
    assert (await refused(fetched(FileServer(url="http://127.0.0.1:9/")))).kind == "unreachable"
    assert "--artifacts" in str(await refused(fetched()))


async def test_a_server_of_the_clusters_own_authority_is_trusted_where_that_is_named_and_shown_the_devices_certificate(
    fetched: Fetch, tmp_path: Path
) -> None:
    for name in ("server", "device"):
        (tmp_path / name).mkdir()
    authority, context = private(tmp_path / "server")
    device = self_signed(tmp_path / "device")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(device.cert)
    async with FileServer({FILE: DATA}, tls=context) as server:
        for less in (ClientTls(), ClientTls(authority)):
            assert (await refused(fetched(server, tls=less))).kind == "unreachable"
        await fetched(server, tls=ClientTls(authority, device.cert, device.key))


async def test_what_a_full_disk_holds_of_a_file_is_given_back(
    server: FileServer, fetched: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour = Behaviour(break_after=1000)
    await refused(fetched(server))
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=298_000))
    with pytest.raises(OSError, match="299000 bytes are to come, 298000 are free"):
        await fetched(server)
    assert len(server.asked) == 1 and os.listdir(tmp_path) == []


def test_relative_addresses_begin_with_the_coordinators_and_others_than_http_are_left_out() -> None:
    urls = ("drafts/a.gguf", "https://example.org/a.gguf", "file:///etc/passwd", "http://[bad")
    assert download_urls(urls, "http://here:1", "d") == (
        "http://here:1/drafts/a.gguf",
        "https://example.org/a.gguf",
        "http://here:1/artifacts/d.gguf",
    )
    assert download_urls(urls, "", "d") == ("https://example.org/a.gguf",)
