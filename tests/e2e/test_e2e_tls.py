"""Test who gets in: TLS with certificates of both sides, and the tokens that `outrider up` keeps for its own user."""

from __future__ import annotations

import stat
from pathlib import Path

import grpc
import pytest
from certificate import self_signed
from shared_cluster import QUICK, Cluster, running
from small_pair import DRAFT, TARGET

pytestmark = pytest.mark.e2e

READY = r"ready: coordinator at (127\.0\.0\.1:\d+)"


def test_where_callers_need_a_certificate_all_works_with_one_and_nothing_without(tmp_path: Path) -> None:
    for name in ("own", "strange"):
        (tmp_path / name).mkdir()
    own, strange = self_signed(tmp_path / "own"), self_signed(tmp_path / "strange")
    cert, key = own.cert, own.key
    tls = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert)
    up = ("up", "--listen", "127.0.0.1:0", "--model", TARGET, "--draft", DRAFT, "--state-dir", tmp_path / "state")
    with running(tmp_path, READY, "outrider", *up, *tls, "--", *QUICK) as program:
        cluster = Cluster(tmp_path, program.ready, program)
        status = ("outrider", "status", "--coordinator", program.ready, "--ca", cert)
        generate = ("outrider-edge", "generate", "def double(x):\n", "--coordinator", program.ready)
        generate = (*generate, "--max-tokens", 8, "--tls-ca", cert)
        assert cluster.run(*status, "--cert", cert, "--cert-key", key)[0] == 0
        code, text, said = cluster.run(*generate, "--tls-cert", cert, "--tls-key", key)
        assert code == 0 and text.strip(), said
        assert (
            cluster.run(*status)[0] == cluster.run(*status, "--cert", strange.cert, "--cert-key", strange.key)[0] == 4
        )
        assert cluster.run(*generate)[0] == 1
        trust = grpc.ssl_channel_credentials(cert.read_bytes())
        for channel in (grpc.insecure_channel(program.ready), grpc.secure_channel(program.ready, trust)):
            with channel, pytest.raises(grpc.RpcError):
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)


def test_other_users_neither_administer_nor_join_what_up_started_and_its_own_user_does(tmp_path: Path) -> None:
    state = tmp_path / "state"
    own = {"OUTRIDER_COORDINATOR_STATE_DIR": str(state)}
    names = ("ADMIN", "COORDINATOR_ADMIN", "COORDINATOR_JOIN", "VERIFIER_JOIN")
    without = {f"OUTRIDER_{name}_TOKEN": "" for name in names}
    up = ("up", "--listen", "127.0.0.1:0", "--model", TARGET, "--state-dir", state, "--", *QUICK)
    with running(tmp_path, READY, "outrider", *up, **without) as program:
        cluster = Cluster(tmp_path, program.ready, program)
        [kept] = [file for file in state.iterdir() if file.name.startswith("tokens")]
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        status = ("outrider", "verifiers", "list", "--coordinator", program.ready)
        join = ("--model", TARGET, "--coordinator", program.ready, "--verifier-id", "joined", *QUICK)
        assert cluster.run(*status, **without)[0] == 5
        code, _, said = cluster.run("outrider-verifier", *join, **without)
        assert code and "token" in said
        with running(tmp_path, "listening on", "outrider-verifier", *join, **without, **own):
            code, out, _ = cluster.run(*status, **without, **own)
            assert code == 0 and "joined" in out
    assert not kept.exists()
