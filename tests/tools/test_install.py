"""Test what the installer builds, when it builds again, and what the terminal shows meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import install


def test_the_pin_of_llama_cpp_is_found_in_the_constraints() -> None:
    name, _, version = install.pinned("llama_cpp_python").partition("==")
    assert name == "llama_cpp_python" and version
    with pytest.raises(LookupError, match="no_such_package"):
        install.pinned("no_such_package")


@pytest.mark.parametrize(
    "changed",
    [
        ("llama==2", "avx2", "gcc 12", {}),
        ("llama==1", "avx512", "gcc 12", {}),
        ("llama==1", "avx2", "gcc 13", {}),
        ("llama==1", "avx2", "gcc 12", {"CMAKE_ARGS": "-DGGML_CUDA=ON"}),
        ("llama==1", "avx2", "gcc 12", {"CFLAGS": "-march=native"}),
        ("llama==1", "avx2", "gcc 12", {"CXXFLAGS": "-march=native"}),
    ],
)
def test_a_wheel_is_built_again_for_another_version_cpu_compiler_or_option(changed: tuple) -> None:
    before = install.build_key("llama==1", "avx2", "gcc 12", {})
    assert before == install.build_key("llama==1", "avx2", "gcc 12", {"HOME": "/elsewhere"})
    assert before != install.build_key(*changed)


def test_only_llama_cpp_itself_is_built_from_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda what, command, *_: built.append(command))
    install.llama_wheel(Path("python"))
    assert built[0][built[0].index("--no-binary") + 1] == "llama-cpp-python"


def test_a_wheel_that_is_there_is_used_without_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[list[str]] = []

    def build(what: str, command: list[str], *_: object) -> None:
        built.append(command)
        scratch = Path(command[command.index("-w") + 1])
        (scratch / "llama_cpp_python-1-py3-none-any.whl").write_bytes(b"wheel")

    monkeypatch.setattr(install, "run", build)
    first = install.llama_wheel(Path("python"))
    assert install.llama_wheel(Path("python")) == first and len(built) == 1
    assert first.is_relative_to(tmp_path / "outrider" / "wheels")
    assert (first / "llama_cpp_python-1-py3-none-any.whl").read_bytes() == b"wheel"
    assert f"found in {first}" in capsys.readouterr().out


def test_a_failure_ends_with_exit_code_1_and_the_command_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no network\nexit 7\n")
    python.chmod(0o755)
    assert install.main(["--venv", str(tmp_path), "coordinator"]) == 1
    error = capsys.readouterr().err
    assert "no network" in error and "failed with exit code 7" in error
