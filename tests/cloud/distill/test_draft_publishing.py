"""Test that a publisher killed at any line publishes once."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest
from loop_fakes import SIGNER, TARGET, World, killed_at

from cloud_verifier.distill import publisher as publisher_module
from cloud_verifier.distill.publisher import create_key
from outrider.artifacts import atomic_files
from outrider.artifacts import store as artifact_store
from outrider.artifacts.store import file_digest
from outrider.core.errors import BadRequest, Unavailable
from outrider.wire.manifest import name_of, read_unverified, sign, verify
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

MODULES = (publisher_module, artifact_store, atomic_files)
NIGHTLY = bool(os.environ.get("OUTRIDER_NIGHTLY"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def draft(world: World, content: bytes = b"GGUF one") -> tuple[Path, str]:
    """Write a draft; return its path and quantization."""
    file = world.folder / "draft.gguf"
    file.write_bytes(content)
    return file, "Q8_0"


async def test_a_release_is_a_file_under_its_hash_and_a_manifest_that_devices_believe(world: World) -> None:
    parent = file_digest(world.folder / "narrow.gguf")
    known = await world.publisher().publish(*draft(world), parent=parent, metrics={"gain": 0.5})
    manifest = verify(world.releases.published[0], {SIGNER.key_id: SIGNER.public_key})
    assert manifest == read_unverified(known.manifest)
    assert (manifest.version, manifest.parent, dict(manifest.metrics)) == (1, f"sha256:{parent}", {"gain": 0.5})
    assert (manifest.weights_hash, manifest.tokenizer_hash) == (TARGET.weights_hash, TARGET.tokenizer_hash)
    file = world.folder / "artifacts" / f"{name_of(manifest)}.gguf"
    assert file_digest(file) == name_of(manifest) and file.stat().st_size == manifest.size
    assert file.stat().st_mode & stat.S_IROTH


async def test_a_version_that_was_taken_meanwhile_is_signed_anew(world: World) -> None:
    one = draft(world)
    publisher = world.publisher()

    async def gone(manifest: bytes) -> None:
        raise Unavailable("killed on the way")

    world.releases.publish, original = gone, world.releases.publish  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await publisher.publish(*one)
    world.releases.publish = original  # type: ignore[method-assign]
    theirs = pb.Manifest(
        version=1,
        weights_hash=TARGET.weights_hash,
        tokenizer_hash=TARGET.tokenizer_hash,
        artifact="sha256:" + "ab" * 32,
        size=5,
        quantization="Q8_0",
    )
    await world.releases.publish(sign(theirs, SIGNER))
    assert read_unverified((await world.publisher().publish(*one)).manifest).version == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that a kill left open
def test_killed_before_any_line_it_publishes_exactly_once(tmp_path: Path) -> None:
    line = kills = 0
    while True:
        folder = tmp_path / str(line)
        folder.mkdir()
        world = World(folder)
        one = draft(world)
        ended = killed_at(line, MODULES, lambda world=world, one=one: world.publisher().publish(*one))
        again = killed_at(1_000_000, MODULES, lambda world=world, one=one: world.publisher().publish(*one))
        assert again is not None and world.releases.versions == [1]
        assert again.manifest == world.releases.published[0], "what is signed twice is two releases of one version"
        digest = name_of(read_unverified(again.manifest))
        place = world.folder / "artifacts" / f"{digest}.gguf"
        assert file_digest(place) == digest
        if ended is not None:
            break
        line, kills = line + (1 if NIGHTLY else 5), kills + 1
    assert kills > (40 if NIGHTLY else 8)
    gc.collect()  # files that killed runs left open are reported here, not in a later test


def test_a_key_is_its_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "publisher.pem"
    made = create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Signer.load(path).public_key == made.public_key
    with pytest.raises(BadRequest, match="exists"):
        create_key(path)
    path.chmod(0o640)
    with pytest.raises(BadRequest, match="chmod 600"):
        Signer.load(path)
