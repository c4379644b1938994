"""Test the HTTP server with unmodified client libraries, which have an environment of their own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from serving_process import ready_server
from system import System

PYTHON = os.environ.get("OUTRIDER_CLIENTS_PYTHON", "")
PROGRAM = Path(__file__).parent / "client_programs.py"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not PYTHON, reason="needs client libraries: make test-clients"),
]


@pytest.mark.parametrize("client", ["langchain", "instructor", "litellm", "agents"])
async def test_tools_and_structured_outputs_work(client: str, settled: System, folder: Path) -> None:
    async with ready_server(settled, folder) as url:
        environment = {**os.environ, "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, str(PROGRAM), client, f"{url}v1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), 150)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, said.decode()[-4000:]
