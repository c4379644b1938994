"""Test that a download resumes where it broke off, takes no more than announced, and is hashed before it is named."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from outrider.artifacts.download import DownloadRefused, download
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import Unavailable

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()


class Origin:
    """Send the data in chunks; break off after a number of them, or begin at another place than requested."""

    def __init__(self, data: bytes = DATA, *, breaks_after: int = -1, whole: bool = False) -> None:
        self.data = data
        self.breaks_after = breaks_after
        self.whole = whole
        self.offsets: list[int] = []

    async def __call__(self, offset: int) -> AsyncGenerator[tuple[int, bytes], None]:
        self.offsets.append(offset)
        for sent, at in enumerate(range(0 if self.whole else offset, len(self.data), 1000)):
            if sent == self.breaks_after:
                raise Unavailable("broke off")
            yield at, self.data[at : at + 1000]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


async def get(store: ArtifactStore, origin: Origin, attempts: int = 1) -> Path:
    return await download(
        store, DIGEST, len(DATA), origin, name="the draft", announced_by="its manifest", attempts=attempts
    )


async def refused(store: ArtifactStore, origin: Origin, attempts: int = 1) -> DownloadRefused:
    with pytest.raises(DownloadRefused) as caught:
        await get(store, origin, attempts)
    assert store.find(DIGEST) is None, "something that was refused has got the file's name"
    return caught.value


async def broken_off(store: ArtifactStore, after: int = 3) -> None:
    with pytest.raises(Unavailable):
        await get(store, Origin(breaks_after=after))


async def test_a_short_file_is_kept_and_gone_on_with(store: ArtifactStore) -> None:
    error = await refused(store, Origin(DATA[:5500]))
    assert error.reason == "truncated" and f"5500 of {len(DATA)} bytes" in str(error)
    origin = Origin()
    assert (await get(store, origin)).read_bytes() == DATA and origin.offsets == [5500]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(DATA[:500] + b"?" + DATA[501:], "altered"), (DATA + b"!", "too long"), (DATA * 1000, "too long")],
)
@pytest.mark.parametrize("attempts", [2])
async def test_nothing_is_kept_of_what_is_not_the_file(
    store: ArtifactStore, data: bytes, reason: str, attempts: int
) -> None:
    origin = Origin(data)
    assert (await refused(store, origin, attempts)).reason == reason
    assert origin.offsets == [0] * attempts and os.listdir(store.folder) == []


async def test_a_damaged_beginning_is_fetched_once_more(store: ArtifactStore) -> None:
    await broken_off(store)
    store.partial_path(DIGEST).write_bytes(b"x" * 2500)
    origin = Origin()
    assert (await get(store, origin)).read_bytes() == DATA
    assert origin.offsets == [2500, 0]


async def test_a_download_that_another_process_has_begun_is_left_to_it(store: ArtifactStore) -> None:
    store.folder.mkdir()
    with store.partial(DIGEST) as theirs:
        theirs.write(DATA[:700])
        theirs.flush()
        assert (await get(store, Origin())).read_bytes() == DATA
        assert store.partial_path(DIGEST).read_bytes() == DATA[:700]


async def test_a_disk_without_room_is_not_filled(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await broken_off(store)
    room = shutil.disk_usage(store.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=6000))
    origin = Origin()
    with pytest.raises(OSError, match=f"{len(DATA) - 3000} bytes are to come, 6000 are free"):
        await get(store, origin)
    assert origin.offsets == [] and os.listdir(store.folder) == []


async def test_a_download_that_is_cancelled_is_gone_on_with(store: ArtifactStore) -> None:
    came = asyncio.Event()

    async def hanging(offset: int) -> AsyncGenerator[tuple[int, bytes], None]:
        yield offset, DATA[:1234]
        came.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(
        download(store, DIGEST, len(DATA), hanging, name="the draft", announced_by="its manifest")
    )
    await came.wait()
    task.cancel()
    await asyncio.wait({task})
    origin = Origin()
    assert (await get(store, origin)).read_bytes() == DATA and origin.offsets == [1234]
