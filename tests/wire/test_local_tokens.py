"""Test the tokens that `outrider up` keeps for the same user's commands: who finds them, and who is refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from outrider.core.errors import BadRequest
from outrider.wire import local_tokens
from outrider.wire.local_tokens import ADMIN, JOIN

TOKENS = {ADMIN: "a" * 64, JOIN: "j" * 64}


def test_tokens_are_kept_for_the_user_alone_while_the_cluster_runs(tmp_path: Path) -> None:
    with local_tokens.kept(TOKENS, "127.0.0.1:7700", tmp_path / "state") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert local_tokens.find(ADMIN, "localhost:7700", tmp_path / "state") == TOKENS[ADMIN]
    assert local_tokens.find(ADMIN, "127.0.0.1:7700", tmp_path / "state") == ""


def test_a_token_is_for_no_other_coordinator(tmp_path: Path) -> None:
    with local_tokens.kept(TOKENS, "0.0.0.0:7700", tmp_path):
        assert local_tokens.find(ADMIN, "127.0.0.1:7700", tmp_path) == TOKENS[ADMIN]
        assert local_tokens.find(ADMIN, "127.0.0.1:7701", tmp_path) == ""
        assert local_tokens.find(ADMIN, "[::1]:7700", tmp_path) == ""  # anybody's program may listen there
        assert local_tokens.find(ADMIN, "coordinator.example:7700", tmp_path) == ""


def test_a_coordinator_at_every_address_is_found_by_each_that_it_has(tmp_path: Path) -> None:
    for listening, found in (("0.0.0.0", ("127.0.0.1", "localhost")), ("[::]", ("127.0.0.1", "localhost", "[::1]"))):
        with local_tokens.kept(TOKENS, f"{listening}:7700", tmp_path):
            for host in ("127.0.0.1", "localhost", "[::1]"):
                token = local_tokens.find(JOIN, f"{host}:7700", tmp_path)
                assert token == (TOKENS[JOIN] if host in found else ""), (listening, host)


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    with local_tokens.kept(TOKENS, "127.0.0.1:7700", tmp_path) as path:
        path.chmod(mode)
        with pytest.raises(BadRequest, match=rf"{path} has mode {mode:04o}.* must be 0600; restart `outrider up`"):
            local_tokens.find(ADMIN, "127.0.0.1:7700", tmp_path)
