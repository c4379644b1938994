"""Test what a device takes from its verifiers, and where it keeps that; `tests/artifacts` tests the downloads."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from edge_agent.target.artifacts import cached, digest
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire.v1 import session_pb2 as pb

DATA = bytes(range(256)) * 40
HASH = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
DRAFT = pb.Artifact(role="draft", name="draft.gguf", hash=HASH, size=len(DATA))


class Origin:
    """Send data in chunks, and note from where on it was asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.offsets: list[int] = []

    async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.offsets.append(offset)
        for at in range(offset, len(self.data), 1000):
            yield self.data[at : at + 1000]


async def test_bytes_of_another_hash_are_refused_and_not_kept(tmp_path: Path) -> None:
    origin = Origin(bytes(reversed(DATA)))
    with pytest.raises(ModelRefused, match=r"draft\.gguf"):
        await cached(ArtifactStore(tmp_path), DRAFT, origin.fetch)
    assert origin.offsets == [0, 0]  # once more from the start: the first try may have been damaged on disk
    assert (await cached(ArtifactStore(tmp_path), DRAFT, Origin().fetch)).read_bytes() == DATA


async def test_a_directory_that_cannot_be_made_or_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "occupied" / f"{digest(DRAFT)}.partial").mkdir(parents=True)
    for root in (tmp_path / "file" / "cache", tmp_path / "occupied"):
        with pytest.raises(BadRequest, match=rf"{root}.*--cache-dir.*OUTRIDER_EDGE_CACHE_DIR") as caught:
            await cached(ArtifactStore(root), DRAFT, Origin().fetch)
        assert caught.value.field == "cache_dir"


@pytest.mark.parametrize("wrong", ["sha256:../../etc/passwd", "md5:abc", "sha256:" + "A" * 64, "", "0" * 64])
def test_a_hash_that_could_name_another_file_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest):
        digest(pb.Artifact(role="draft", name="x", hash=wrong, size=1))


@pytest.mark.parametrize(
    ("role", "size"),
    [
        ("draft", 0),
        ("draft", 1 << 40),
        ("tokenizer", (256 << 20) + 1),
        ("template", (1 << 20) + 1),
        ("special_tokens", (1 << 20) + 1),
    ],
)
def test_an_empty_or_absurd_size_is_refused(role: str, size: int) -> None:
    with pytest.raises(BadRequest, match=role):
        digest(pb.Artifact(role=role, name="x", hash=HASH, size=size))
