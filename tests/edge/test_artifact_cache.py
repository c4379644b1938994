"""Test that artifacts are fetched once, resumed, checked before use, and never incomplete."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from edge_agent.target.artifact_cache import ArtifactCache, ArtifactRef
from outrider.core.errors import BadRequest, ModelRefused, NotFound, Unavailable

DATA = bytes(range(256)) * 40
REF = ArtifactRef("draft", "draft.gguf", f"sha256:{hashlib.sha256(DATA).hexdigest()}", len(DATA))


class Origin:
    """Serve DATA in chunks; break off after so many, as often as the test says."""

    def __init__(self, data: bytes = DATA, *, breaks: int = 0, after: int = 3) -> None:
        self.data = data
        self.breaks = breaks
        self.after = after
        self.offsets: list[int] = []

    async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.offsets.append(offset)
        for sent, at in enumerate(range(offset, len(self.data), 1000)):
            if self.breaks and sent == self.after:
                self.breaks -= 1
                raise Unavailable("broke off")
            yield self.data[at : at + 1000]


async def test_an_artifact_is_fetched_once(tmp_path: Path) -> None:
    origin, cache = Origin(), ArtifactCache(tmp_path / "deep" / "cache")
    first = await cache.get(REF, origin.fetch)
    second = await cache.get(REF, origin.fetch)
    assert first == second and first.read_bytes() == DATA
    assert origin.offsets == [0]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


async def test_a_download_that_breaks_off_is_gone_on_with_by_a_later_process(tmp_path: Path) -> None:
    for offset in (0, 3000, 6000):
        origin = Origin(breaks=1)
        with pytest.raises(Unavailable):
            await ArtifactCache(tmp_path).get(REF, origin.fetch)
        assert origin.offsets == [offset]
    assert (await ArtifactCache(tmp_path).get(REF, Origin().fetch)).read_bytes() == DATA


async def test_bytes_of_another_hash_are_refused_and_not_kept(tmp_path: Path) -> None:
    origin = Origin(bytes(reversed(DATA)))
    with pytest.raises(ModelRefused, match=r"draft\.gguf"):
        await ArtifactCache(tmp_path).get(REF, origin.fetch)
    assert origin.offsets == [0, 0]  # once more from the start: the first try may have been damaged on disk
    assert not (tmp_path / REF.digest).exists()
    assert (await ArtifactCache(tmp_path).get(REF, Origin().fetch)).read_bytes() == DATA


async def test_a_damaged_partial_download_is_thrown_away(tmp_path: Path) -> None:
    (tmp_path / f"{REF.digest}.partial").write_bytes(b"rubbish" * 100)
    path = await ArtifactCache(tmp_path).get(REF, Origin().fetch)
    assert path.read_bytes() == DATA


async def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    cache, origin = ArtifactCache(tmp_path), Origin()
    path = await cache.get(REF, origin.fetch)
    path.write_bytes(DATA[:-1] + b"!")
    assert (await cache.get(REF, origin.fetch)).read_bytes() == DATA
    assert len(origin.offsets) == 2


async def test_more_bytes_than_announced_are_not_stored(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused):
        await ArtifactCache(tmp_path).get(REF, Origin(DATA[::-1] * 1000).fetch)
    kept = [(tmp_path / name).stat().st_size for name in os.listdir(tmp_path)]
    assert sum(kept) <= len(DATA)


async def test_a_directory_that_cannot_be_made_or_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "occupied" / f"{REF.digest}.partial").mkdir(parents=True)
    for root in (tmp_path / "file" / "cache", tmp_path / "occupied"):
        with pytest.raises(BadRequest, match=rf"{root}.*--cache-dir.*OUTRIDER_EDGE_CACHE_DIR") as caught:
            await ArtifactCache(root).get(REF, Origin().fetch)
        assert caught.value.field == "cache_dir"


async def test_a_disk_that_is_full_is_reported(tmp_path: Path) -> None:
    (tmp_path / f"{REF.digest}.partial").symlink_to("/dev/full")
    with pytest.raises(BadRequest, match=r"No space left.*--cache-dir"):
        await ArtifactCache(tmp_path).get(REF, Origin().fetch)


async def test_what_the_origin_refuses_is_passed_on(tmp_path: Path) -> None:
    async def gone(content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        raise NotFound("no such artifact")
        yield b""

    with pytest.raises(NotFound):
        await ArtifactCache(tmp_path).get(REF, gone)


@pytest.mark.parametrize("wrong", ["sha256:../../etc/passwd", "md5:abc", "sha256:" + "A" * 64, "", "0" * 64])
async def test_a_hash_that_could_name_another_file_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(BadRequest):
        await ArtifactCache(tmp_path).get(ArtifactRef("draft", "x", wrong, 1), Origin().fetch)


async def test_an_empty_or_absurd_size_is_refused(tmp_path: Path) -> None:
    for role, size in (
        ("draft", 0),
        ("draft", 1 << 40),
        ("tokenizer", (256 << 20) + 1),
        ("template", (1 << 20) + 1),
        ("special_tokens", (1 << 20) + 1),
    ):
        origin = Origin()
        with pytest.raises(BadRequest, match=role):
            await ArtifactCache(tmp_path).get(ArtifactRef(role, "x", REF.hash, size), origin.fetch)
        assert origin.offsets == []


async def test_many_clients_of_one_process_fill_a_cold_cache_together(tmp_path: Path) -> None:
    class Slow(Origin):
        async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
            async for chunk in super().fetch(content_hash, offset):
                await asyncio.sleep(0.002)
                yield chunk

    paths = await asyncio.gather(*(ArtifactCache(tmp_path).get(REF, Slow().fetch) for _ in range(5)))
    assert {path.read_bytes() for path in paths} == {DATA}
    assert os.listdir(tmp_path) == [REF.digest]


async def test_a_partial_file_that_was_finished_before_it_could_be_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, final = tmp_path / f"{REF.digest}.partial", tmp_path / REF.digest
    partial.write_bytes(DATA)
    lock = fcntl.flock

    def late(file: int, operation: int) -> None:
        """Grant the lock just after its owner has moved the file to its final name."""
        if partial.exists() and partial.stat().st_size:
            os.replace(partial, final)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    origin = Origin(bytes(len(DATA)))
    assert (await ArtifactCache(tmp_path).get(REF, origin.fetch)).read_bytes() == DATA
    assert origin.offsets == [] and os.listdir(tmp_path) == [REF.digest]
