"""Test that a store's files are named by content, whole, readable by others, and removed when nothing holds them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from outrider.artifacts.store import ArtifactStore, digest_of
from outrider.core.errors import BadRequest

DATA = b"GGUF" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "deep" / "store", ".gguf")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "draft.gguf"
    path.write_bytes(DATA)
    path.chmod(0o600)
    return path


def test_a_file_is_put_under_its_digest_once_and_everybody_may_read_it(store: ArtifactStore, source: Path) -> None:
    assert store.put(source) == DIGEST
    before = store.path(DIGEST).stat()
    assert store.put(source) == DIGEST
    assert store.path(DIGEST).stat() == before and stat.S_IMODE(before.st_mode) == 0o644
    assert store.path(DIGEST).read_bytes() == DATA and os.listdir(store.folder) == [f"{DIGEST}.gguf"]


@pytest.mark.parametrize("name", ["", "..", "../draft.gguf", "A" * 64, "0" * 63, f"{'0' * 64}.txt", "draft.gguf"])
def test_only_digests_name_files(store: ArtifactStore, source: Path, name: str) -> None:
    store.put(source)
    assert store.find(name) is None
    assert store.find(DIGEST) == store.find(f"{DIGEST}.gguf") == store.path(DIGEST)


def test_tidying_leaves_what_is_wanted_and_what_is_no_artifact(store: ArtifactStore) -> None:
    store.folder.mkdir(parents=True)
    kept, gone = "a" * 64, "b" * 64
    for name in (f"{kept}.gguf", f"{kept}.partial", f"{gone}.gguf", f"{gone}.partial", f"{gone}.etag", "state.json"):
        (store.folder / name).write_bytes(b"x")
    store.tidy({kept})
    assert sorted(os.listdir(store.folder)) == [f"{kept}.gguf", f"{kept}.partial", "state.json"]


@pytest.mark.parametrize("wrong", ["sha256:../../etc/passwd", "md5:abc", "sha256:" + "A" * 64, "", "0" * 64])
def test_only_the_form_of_a_hash_becomes_a_name(wrong: str) -> None:
    with pytest.raises(BadRequest, match="64 hex digits") as caught:
        digest_of(wrong, "artifact.hash")
    assert caught.value.field == "artifact.hash"
