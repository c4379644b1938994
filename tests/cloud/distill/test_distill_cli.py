"""Test the command: keys, settings, and the commands that need nothing else to run."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from small_pair import TARGET
from tiny_drafts import passage, tiny_base, tiny_tokenizer

from cloud_verifier.distill import cli
from cloud_verifier.distill.loop import locked, target_hashes
from cloud_verifier.traffic.log import TrafficLog
from outrider.core.errors import Overloaded
from outrider.wire.ticket import Signer


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """Return a function: arguments -> exit status, stdout, stderr."""

    def of(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return of


def test_a_key_is_made_once_and_its_public_half_shown_again(call, tmp_path: Path) -> None:
    path = tmp_path / "publisher.pem"
    first, again = call("key", "--file", str(path)), call("key", "--file", str(path))
    assert first[0] == 0 and first == again
    assert bytes.fromhex(first[1].strip()) == Signer.load(path).public_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_draft_is_exported_by_hand(call, tmp_path: Path) -> None:
    model, target = tiny_base(tmp_path / "model"), tmp_path / "target"
    tiny_tokenizer().save_pretrained(target)
    options = ("--model", str(model), "--tokenizer", str(target), "--out", str(tmp_path / "draft.gguf"))
    status, out, _ = call("export", *options)
    assert status == 0 and "Q8_0" in out
    assert call("export", *options, "--quantization", "Q9")[0] == 2
    status, _, err = call("export", "--model", str(target), *options[2:])
    assert status == 1 and "no causal LM" in err


def test_a_tenant_that_withdraws_its_consent_is_forgotten_in_the_log_and_in_datasets(call, tmp_path: Path) -> None:
    traffic, run = str(tmp_path / "log"), tmp_path / "state" / "runs" / "1"
    TrafficLog(traffic).write(passage("s", 0, [1, 2], tenant=tenant, expires_unix=4e9) for tenant in ("gone", "kept"))
    (run / "dataset" / "train").mkdir(parents=True)
    status, out, _ = call("forget", "gone", "--traffic", traffic, "--state-dir", str(tmp_path / "state"))
    assert status == 0 and "1 files" in out
    assert [one.tenant for one in TrafficLog(traffic).read()] == ["kept"]
    assert list(run.iterdir()) == []
    assert call("forget", "gone")[0] == 2


def test_two_loops_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(Overloaded, match="another outrider-distill"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_the_target_is_known_by_what_its_verifiers_announce() -> None:
    from cloud_verifier.engine.torch_backend.model import TargetModel

    async def announced() -> str:
        return (await asyncio.to_thread(TargetModel.load, TARGET)).weights_hash

    hashes = target_hashes(TARGET)
    assert hashes.weights_hash == f"sha256:{asyncio.run(announced())}"
    assert hashes.tokenizer_hash.startswith("sha256:")
