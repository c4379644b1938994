"""Test that a store's files are named by content, whole, readable by others, and removed when nothing holds them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from outrider.artifacts import store as store_module
from outrider.artifacts.store import ArtifactStore, content_hash, digest_of, file_digest, known_file_digest
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


def test_a_copy_that_broke_off_is_begun_again(
    store: ArtifactStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object, file: object) -> None:
        file.write(DATA[:100] + b"?")  # type: ignore[attr-defined]
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", broken)
        with pytest.raises(OSError, match="full"):
            store.put(source)
    assert store.find(DIGEST) is None
    store.put(source)
    assert store.verify(DIGEST) and os.listdir(store.folder) == [f"{DIGEST}.gguf"]


def test_two_that_put_one_file_at_once_do_not_mix(store: ArtifactStore, source: Path) -> None:
    store.folder.mkdir(parents=True)
    with store.partial(DIGEST) as held:
        held.write(b"another writer's half")
        store.put(source)
        assert store.verify(DIGEST)
    assert store.partial_path(DIGEST).exists(), "what the other writer has stays its own"


def test_a_damaged_or_missing_file_is_not_verified(store: ArtifactStore, source: Path) -> None:
    assert not store.verify(DIGEST)
    store.put(source)
    assert store.verify(DIGEST)
    store.path(DIGEST).write_bytes(DATA[:-1] + b"!")
    assert not store.verify(DIGEST)


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


def test_hashes_are_the_same_of_bytes_and_of_a_file(source: Path) -> None:
    assert content_hash(DATA) == content_hash(source) == f"sha256:{file_digest(source)}" == f"sha256:{DIGEST}"
    assert digest_of(content_hash(DATA), "field") == DIGEST


@pytest.mark.parametrize("wrong", ["sha256:../../etc/passwd", "md5:abc", "sha256:" + "A" * 64, "", "0" * 64])
def test_only_the_form_of_a_hash_becomes_a_name(wrong: str) -> None:
    with pytest.raises(BadRequest, match="64 hex digits") as caught:
        digest_of(wrong, "artifact.hash")
    assert caught.value.field == "artifact.hash"


def test_a_known_digest_is_read_again_once_the_file_changes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = store_module.file_digest
    monkeypatch.setattr(store_module, "file_digest", lambda path: (read.append(path), original(path))[1])
    assert known_file_digest(source) == known_file_digest(source) == DIGEST
    assert len(read) == 1
    source.write_bytes(DATA + b"!")
    assert known_file_digest(source) == hashlib.sha256(DATA + b"!").hexdigest()
