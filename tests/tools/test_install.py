"""Test what the installer builds, when it builds again, and what the terminal shows meanwhile."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import install


def test_progress_is_read_from_ninja_make_and_pip() -> None:
    assert install.compile_activity("  [12/74] Building CXX object a.o") == "12 of 74 files compiled"
    assert install.compile_activity("[ 48%] Building CXX object a.o") == "48% compiled"
    assert install.compile_activity("-- The C compiler identification is GNU") is None
    assert install.pip_activity("Collecting torch==2.13.0") == "collecting torch==2.13.0"
    assert install.pip_activity("  Downloading https://x/y/torch-2.13.0.whl (200 MB)") == "downloading torch-2.13.0.whl"
    assert install.pip_activity("Installing collected packages: a, b") == "unpacking all packages"
    assert install.pip_activity("Requirement already satisfied: a") is None


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


def test_the_compilers_are_those_that_the_environment_names() -> None:
    assert (
        install.compilers({"CC": f"env {sys.executable}", "CXX": "no-such-compiler"})
        == f"Python {platform.python_version()}\n"
    )


def test_the_users_cmake_options_come_last_so_that_they_win() -> None:
    ours = install.cmake_arguments({})
    assert "-DLLAVA_BUILD=OFF" in ours and str(install.LIBRARY_ONLY) in ours
    assert install.cmake_arguments({"CMAKE_ARGS": "-DLLAVA_BUILD=ON"}) == f"{ours} -DLLAVA_BUILD=ON"


def test_a_build_uses_all_cores_unless_the_user_says_otherwise() -> None:
    assert int(install.build_environment({})["CMAKE_BUILD_PARALLEL_LEVEL"]) >= 1
    assert install.build_environment({"CMAKE_BUILD_PARALLEL_LEVEL": "3"})["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert install.build_environment({"CMAKE_ARGS": "-DX=1"})["CMAKE_ARGS"] == install.cmake_arguments(
        {"CMAKE_ARGS": "-DX=1"}
    )


def test_only_llama_cpp_itself_is_built_from_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda what, command, *_: built.append(command))
    install.llama_wheel(Path("python"))
    assert built[0][built[0].index("--no-binary") + 1] == "llama-cpp-python"


@pytest.mark.parametrize("moment_s", [0.01, 0.03, 0.06, 0.1, 0.2])
def test_ctrl_c_ends_the_installer_without_a_traceback(moment_s: float, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "importtime", install.__file__, "--venv", str(tmp_path), "coordinator"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = [""]
    while not lines[-1].rstrip().endswith(" signal"):
        lines.append(process.stderr.readline())
        assert lines[-1], f"it ended by itself: {''.join(lines)}"
    time.sleep(moment_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in said, said


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


def test_a_silent_command_is_shown_to_be_alive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "HEARTBEAT_S", 0.05)
    program = "import time; print('[1/2] a', flush=True); time.sleep(0.5)"
    install.run("compile", [sys.executable, "-c", program], activity=install.compile_activity)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "- compile" and "    0:00 1 of 2 files compiled" in lines and lines[-1] == "    done in 0:00"


def test_a_command_that_fails_shows_the_end_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        install.run("compile", [sys.executable, "-c", program])
    assert caught.value.returncode == 3
    shown = capsys.readouterr().err.split()
    assert shown[-1] == "99" and len(shown) == install.LOG_LINES


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
