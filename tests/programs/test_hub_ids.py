"""Test that every program takes ids of the Hugging Face hub, and says at once what it cannot have from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "models" / "target")
NO_PATH = "no such path here, and the Hugging Face hub: "
DISTILL = "--traffic t --artifacts a --draft o/d:d.gguf --target o/t"


def run(tmp_path: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program without the hub and with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OUTRIDER_"))}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("command", "variable", "said"),
    [
        (
            "coordinator.cli up --model T",
            "VERIFIER_SERVER_DRAFT=o/d",
            "outrider: OUTRIDER_VERIFIER_SERVER_DRAFT o/d: NO_PATH",
        ),
        ("cloud_verifier.app --model o/t", "", "outrider-verifier: --model o/t: NO_PATH"),
        ("edge_agent.cli generate hello --draft o/d@v:d.gguf", "", "outrider-edge: --draft o/d@v:d.gguf: NO_PATH"),
        (f"cloud_verifier.distill.cli once {DISTILL}", "", "outrider-distill: --draft o/d:d.gguf: NO_PATH"),
    ],
)
def test_what_is_not_in_the_cache_is_named_by_its_flag_before_anything_starts(
    tmp_path: Path, command: str, variable: str, said: str
) -> None:
    words = [TARGET if word == "T" else word for word in command.split()]
    if words[:2] == ["coordinator.cli", "up"]:
        words += ["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
    ran = run(tmp_path, *words, **dict([f"OUTRIDER_{variable}".split("=")] if variable else []))
    assert (ran.returncode, ran.stdout) == (1 if "distill" in command else 2, "")
    assert ran.stderr.splitlines()[-1].startswith(said.replace("NO_PATH", NO_PATH)) and "Traceback" not in ran.stderr
