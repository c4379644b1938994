"""Choose the engines of the verifiers that a benchmark starts: our own, and vLLM in its own interpreter beside it."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from outrider.core.errors import BadRequest

PYTHON = "OUTRIDER_VLLM_PYTHON"
"""Environment variable that names the interpreter of an environment with vLLM."""
TORCH, VLLM = "torch", "vllm"

Engines = dict[str, tuple[str, ...]]
"""Engine -> the options of a verifier that runs it; our own comes first."""


def engines(vllm_python: Path | None = None) -> Engines:
    """Return our own engine, and vLLM if an interpreter that has it is given."""
    if vllm_python is None:
        return {TORCH: ()}
    # A symbolic link stays one: it tells Python its environment.
    return {TORCH: (), VLLM: ("--engine", VLLM, "--engine-python", str(vllm_python.absolute()))}


def add_options(parser: ArgumentParser) -> None:
    """Add --engine and --engine-python, which are spelled as those of `outrider-verifier`."""
    parser.add_argument(
        "--engine",
        choices=(TORCH, VLLM),
        default=TORCH,
        help="vllm: measure verifiers that run vLLM too, beside our own engine's (default: our own engine alone)",
    )
    add_python(parser, "--engine-python")


def add_python(parser: ArgumentParser, flag: str) -> None:
    """Add the option that names vLLM's interpreter."""
    named = os.environ.get(PYTHON)
    parser.add_argument(
        flag,
        type=Path,
        default=Path(named) if named else None,
        metavar="PATH",
        help=f"interpreter of an environment with vLLM, which is compared then (default: {PYTHON})",
    )


def chosen(options: Namespace) -> Engines:
    """Return the engines that the options of `add_options` name. Raises BadRequest for vLLM without an interpreter."""
    if options.engine == TORCH:
        return engines()
    if options.engine_python is None:
        raise BadRequest(
            "--engine vllm needs --engine-python PATH; make an environment with"
            " `python -m cloud_verifier.vllm_environment FOLDER`, and give FOLDER/bin/python",
            field="engine_python",
        )
    return engines(options.engine_python)
