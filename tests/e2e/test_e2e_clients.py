"""Test the HTTP server with unmodified client libraries, which have an environment of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("OUTRIDER_CLIENTS_PYTHON", "")
PROGRAM = Path(__file__).parent / "client_programs.py"
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs client libraries: make test-clients")


@pytest.mark.parametrize("client", ["langchain", "instructor", "litellm", "agents"])
def test_tools_and_structured_outputs_work(client: str, url: str) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [PYTHON, str(PROGRAM), client, f"{url}/v1"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
