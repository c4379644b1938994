"""Test that a release's file arrives whole and as it was signed, or not at all, and that downloads are resumed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificate import private, self_signed
from file_server import Behaviour, FileServer, wanted

from edge_agent.releases.check import ReleaseRefused
from edge_agent.releases.download import Downloader, ReleaseFile, download_urls
from outrider.artifacts.store import ArtifactStore
from outrider.wire.channels import ClientTls

DATA = random.Random(7).randbytes(300_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
FILE = f"{DIGEST}.gguf"


@pytest.fixture
async def server() -> AsyncIterator[FileServer]:
    async with FileServer({f"{DIGEST}.gguf": DATA}) as running:
        yield running


@pytest.fixture
def downloader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Downloader:
    monkeypatch.setattr("edge_agent.releases.download.STALL_S", 0.2)
    return Downloader(ArtifactStore(tmp_path, ".gguf"))


async def refused(downloader: Downloader, what: ReleaseFile, path: Path) -> ReleaseRefused:
    with pytest.raises(ReleaseRefused) as caught:
        await downloader.fetch(what)
    assert path.name not in os.listdir(path.parent), "something that was refused has got the file's name"
    return caught.value


async def test_a_file_that_is_there_is_not_asked_for_again(
    server: FileServer, downloader: Downloader, tmp_path: Path
) -> None:
    path = tmp_path / FILE
    for _ in range(2):
        await downloader.fetch(wanted(DIGEST, DATA, server))
        assert await asyncio.to_thread(path.read_bytes) == DATA
    assert len(server.asked) == 1
    assert os.listdir(tmp_path) == [FILE]


async def test_what_broke_off_goes_on_where_it_was(server: FileServer, downloader: Downloader, tmp_path: Path) -> None:
    server.behaviour = Behaviour(break_after=100_000)
    error = await refused(downloader, wanted(DIGEST, DATA, server), tmp_path / FILE)
    assert error.kind == "truncated" and "100000 of 300000 bytes" in str(error)
    await downloader.fetch(wanted(DIGEST, DATA, server))
    assert server.ranges == ["", "bytes=100000-"]
    assert await asyncio.to_thread((tmp_path / FILE).read_bytes) == DATA


async def test_a_server_that_knows_no_ranges_starts_from_the_beginning(
    server: FileServer, downloader: Downloader, tmp_path: Path
) -> None:
    server.behaviour = Behaviour(break_after=1000, ranges=False)
    await refused(downloader, wanted(DIGEST, DATA, server), tmp_path / FILE)
    await downloader.fetch(wanted(DIGEST, DATA, server))
    assert await asyncio.to_thread((tmp_path / FILE).read_bytes) == DATA


@pytest.mark.parametrize(
    ("behaviour", "kind", "said"),
    [
        (Behaviour(flip=150_000), "altered", "another SHA-256"),
        (Behaviour(extra=b"more"), "too long", "300004 bytes, the signed manifest says 300000"),
        (Behaviour(extra=b"more", lengths=False), "too long", "beyond the 300000 bytes"),
        (Behaviour(break_after=299_999, lengths=False), "truncated", "299999 of 300000 bytes"),
        (Behaviour(stall_after=5), "truncated", "5 of 300000 bytes"),
        (Behaviour(status=503), "unreachable", "status 503"),
    ],
    ids=["altered", "announced too long", "too long", "truncated", "stalled", "an error"],
)
async def test_what_is_not_the_file_is_refused_and_named(
    server: FileServer, downloader: Downloader, tmp_path: Path, behaviour: Behaviour, kind: str, said: str
) -> None:
    server.behaviour = behaviour
    begun = time.monotonic()
    error = await refused(downloader, wanted(DIGEST, DATA, server), tmp_path / FILE)
    assert error.kind == kind and said in str(error)
    assert time.monotonic() - begun < 3.0
    if kind in ("altered", "too long"):
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "first_does", [Behaviour(break_after=200_000), Behaviour(flip=9)], ids=["breaks off", "alters"]
)
async def test_the_next_address_goes_on_with_what_the_first_one_brought_if_it_is_right(
    server: FileServer, downloader: Downloader, tmp_path: Path, first_does: Behaviour
) -> None:
    alters = first_does.flip >= 0
    async with FileServer({f"{DIGEST}.gguf": DATA}, first_does) as first:
        await downloader.fetch(wanted(DIGEST, DATA, first, server))
    assert server.ranges == ["" if alters else "bytes=200000-"]
    assert await asyncio.to_thread((tmp_path / FILE).read_bytes) == DATA


async def test_where_nobody_listens_or_nothing_is_named_it_says_so(downloader: Downloader, tmp_path: Path) -> None:
    nobody = ReleaseFile(DIGEST, len(DATA), ("http://127.0.0.1:9/file.gguf",))
    assert (await refused(downloader, nobody, tmp_path / FILE)).kind == "unreachable"
    nowhere = await refused(downloader, ReleaseFile(DIGEST, len(DATA), ()), tmp_path / FILE)
    assert "--artifacts" in str(nowhere)


async def test_a_server_of_the_clusters_own_authority_is_trusted_where_that_is_named_and_shown_the_devices_certificate(
    tmp_path: Path,
) -> None:
    for name in ("server", "device"):
        (tmp_path / name).mkdir()
    authority, context = private(tmp_path / "server")
    device = self_signed(tmp_path / "device")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(device.cert)
    store = ArtifactStore(tmp_path, ".gguf")
    async with FileServer({f"{DIGEST}.gguf": DATA}, tls=context) as server:
        for less in (ClientTls(), ClientTls(authority)):
            without = Downloader(store, tls=less)
            assert (await refused(without, wanted(DIGEST, DATA, server), tmp_path / FILE)).kind == "unreachable"
        trust = ClientTls(authority, device.cert, device.key)
        await Downloader(store, tls=trust).fetch(wanted(DIGEST, DATA, server))
    assert await asyncio.to_thread((tmp_path / FILE).read_bytes) == DATA


async def test_what_a_full_disk_holds_of_a_file_is_given_back(
    server: FileServer, downloader: Downloader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour = Behaviour(break_after=1000)
    await refused(downloader, wanted(DIGEST, DATA, server), tmp_path / FILE)
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=298_000))
    with pytest.raises(OSError, match="299000 bytes are to come, 298000 are free"):
        await downloader.fetch(wanted(DIGEST, DATA, server))
    assert len(server.asked) == 1 and os.listdir(tmp_path) == []


def test_relative_addresses_begin_with_the_coordinators_and_others_than_http_are_left_out() -> None:
    urls = ("drafts/a.gguf", "https://example.org/a.gguf", "file:///etc/passwd", "http://[bad")
    assert download_urls(urls, "http://here:1", "d") == (
        "http://here:1/drafts/a.gguf",
        "https://example.org/a.gguf",
        "http://here:1/artifacts/d.gguf",
    )
    assert download_urls(urls, "", "d") == ("https://example.org/a.gguf",)
