"""Test what the installer builds, when it builds again, and what the terminal shows meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import install


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
