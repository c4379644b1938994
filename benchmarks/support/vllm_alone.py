"""Run vLLM as it is, without Outrider, in the interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import vllm_generate
from edge_agent.bench.users import Run, Text
from outrider.core.errors import Unavailable

PRELOADED = ("libiomp5.so", "libtcmalloc")
"""Libraries that vLLM's documentation wants to be loaded before on CPUs."""


def runs(
    python: Path,
    model: Path,
    dtype: str,
    users: Mapping[int, Sequence[Sequence[int]]],
    tokens: int,
    *,
    temperature: float = 0.0,
    speculative: Mapping[str, Any] | None = None,
) -> list[Run]:
    """Return a run for each number of users, with their prompts, on this process's CPUs with one thread.

    tokens: of each answer. speculative: vLLM's own `speculative_config`. Raises Unavailable if it does not run.
    """
    libraries = [next(iter(sorted(python.parent.parent.glob(f"lib/{n}*"))), None) for n in PRELOADED]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LD_PRELOAD": ":".join(str(one) for one in libraries if one)}
    asked = {"model": str(model.absolute()), "dtype": dtype, "runs": [*users.items()], "tokens": tokens}
    asked |= {"temperature": temperature, "speculative": speculative}
    command = [str(python), vllm_generate.__file__]
    ran = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    if ran.returncode:
        raise Unavailable(f"vLLM in {python} ended with status {ran.returncode}; its error stands above")
    return [
        Run(tuple(_text(number, *text) for number, text in enumerate(texts)), busy=1.0)
        for texts in json.loads(ran.stdout.splitlines()[-1])
    ]


def _text(number: int, user: int, begun_s: float, tokens: list[int], delivered_s: list[float]) -> Text:
    steps = len({*delivered_s})
    return Text(user, number, tuple(tokens), begun_s, tuple(delivered_s), steps=steps, evaluated=0, accepted=0)
