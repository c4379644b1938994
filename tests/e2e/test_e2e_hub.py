"""Test a cluster whose models come from the Hugging Face hub: a server that speaks its API has the shipped pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import Repository, hub_server
from shared_cluster import QUICK, Cluster, running
from small_pair import DRAFT, NARROW, TARGET

pytestmark = pytest.mark.e2e


def test_up_fetches_the_pair_once_and_serves_it_under_the_id(tmp_path: Path) -> None:
    target = {file.name: file for file in TARGET.iterdir()}
    repositories = {
        "org/target": Repository({**target, "pytorch_model.bin": b"pickled"}),
        "org/drafts": Repository({"wide.gguf": DRAFT, "narrow.gguf": NARROW}),
    }
    with hub_server(repositories) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_ETAG_TIMEOUT": "120"}
        up = ("up", "--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state")
        pair = ("--model", "org/target@main", "--draft", "org/drafts:wide.gguf", "--", *QUICK)
        with running(tmp_path, r"ready: coordinator at (\S+),", "outrider", *up, *pair, **variables) as program:
            assert sorted(name for name, _ in hub.fetched) == sorted([*target, "wide.gguf"])
            for told in ("org/drafts:wide.gguf is ", f"is commit {repositories['org/target'].commit}, in {tmp_path}"):
                assert program.output.index(told) < program.output.index("starting the coordinator")
            hub.fetched.clear()
            where = ("--coordinator", program.ready, "--target", "org/target", "--max-tokens", 16, "--stats")
            for draft in ("auto", "org/drafts@main:narrow.gguf"):
                generate = ("outrider-edge", "generate", "Question: 2 + 3?", *where, "--draft", draft)
                code, _, said = Cluster(tmp_path, program.ready, program).run(*generate, **variables)
                assert code == 0 and "seed" in said
            assert [name for name, _ in hub.fetched] == ["narrow.gguf"]
