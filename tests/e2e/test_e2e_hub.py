"""Test a cluster whose models come from the Hugging Face hub: a server that speaks its API has the shipped pair."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Repository, hub_server
from system import QUICK, ROOT

pytestmark = pytest.mark.e2e

MODELS = ROOT / "models"


def test_up_fetches_the_pair_once_and_serves_it_under_the_id(tmp_path: Path) -> None:
    target = {file.name: file for file in (MODELS / "target").iterdir()}
    repositories = {
        "org/target": Repository({**target, "pytorch_model.bin": b"pickled"}),
        "org/drafts": Repository({"wide.gguf": MODELS / "draft.gguf", "narrow.gguf": MODELS / "draft-narrow.gguf"}),
    }
    with hub_server(repositories) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
        up = ["up", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"), "--verifiers", "2"]
        pair = ["--model", "org/target@main", "--draft", "org/drafts:wide.gguf"]
        log = tmp_path / "log"
        with (
            log.open("wb") as written,
            subprocess.Popen(
                [sys.executable, "-m", "coordinator.cli", *up, *pair, "--", *QUICK],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=written,
            ) as running,
        ):
            try:
                assert running.stdout is not None
                address = re.search(rb"127\.0\.0\.1:\d+", running.stdout.readline())
                assert address, log.read_text()
                assert sorted(name for name, _ in hub.fetched) == sorted([*target, "wide.gguf"])
                said = log.read_text()
                for told in (
                    f"org/drafts:wide.gguf is {tmp_path}",
                    f"org/target@main is commit {repositories['org/target'].commit}, in {tmp_path}",
                ):
                    assert said.index(told) < said.index("starting the coordinator")
                hub.fetched.clear()
                where = ["--coordinator", address[0].decode(), "--cache-dir", str(tmp_path / "cache"), "--stats"]
                for draft, told in (
                    ("auto", ""),
                    ("org/drafts@main:narrow.gguf", "taking org/drafts@main:narrow.gguf from"),
                ):
                    generate = ["generate", "Question: 2 + 3?", "--max-tokens", "16", "--target", "org/target"]
                    ran = subprocess.run(
                        [sys.executable, "-m", "edge_agent.cli", *generate, *where, "--draft", draft],
                        env=environment,
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=True,
                    )
                    assert told in ran.stderr and "seed" in ran.stderr
                assert [name for name, _ in hub.fetched] == ["narrow.gguf"]
            finally:
                running.send_signal(signal.SIGINT)
                running.wait(30)
