"""Test that artifacts are fetched once, resumed, checked before use, and never incomplete."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from edge_agent.target.artifact_cache import ArtifactCache, ArtifactRef
from outrider.core.errors import BadRequest, ModelRefused, Unavailable

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


async def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    cache, origin = ArtifactCache(tmp_path), Origin()
    path = await cache.get(REF, origin.fetch)
    path.write_bytes(DATA[:-1] + b"!")
    assert (await cache.get(REF, origin.fetch)).read_bytes() == DATA
    assert len(origin.offsets) == 2


async def test_a_directory_that_cannot_be_made_or_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "occupied" / f"{REF.digest}.partial").mkdir(parents=True)
    for root in (tmp_path / "file" / "cache", tmp_path / "occupied"):
        with pytest.raises(BadRequest, match=rf"{root}.*--cache-dir.*OUTRIDER_EDGE_CACHE_DIR") as caught:
            await ArtifactCache(root).get(REF, Origin().fetch)
        assert caught.value.field == "cache_dir"


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
