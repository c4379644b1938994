"""Test what the command prints about itself, and what it refuses before it loads anything."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from cloud_verifier.app import main, parse
from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import main as engine
from cloud_verifier.engine_process.ipc import error_from_failure
from cloud_verifier.verifier import VerifierProcess, check_settings
from outrider.core.errors import BadRequest, ModelRefused

SECRET = "sesame"


@pytest.fixture
def complaint(capsys):
    """Return a function: arguments -> the message of its refusal."""

    def of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(arguments)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return of


def refusal(kind=BadRequest, **settings) -> str:
    """Return the error of a verifier that does not start."""
    with pytest.raises(kind) as caught:
        asyncio.run(serve(**settings))
    return str(caught.value)


async def serve(**settings) -> int:
    config = VerifierConfig(**settings)
    check_settings(config)
    return await VerifierProcess(config).run(asyncio.Event())


def test_the_join_token_is_never_printed(monkeypatch, complaint):
    monkeypatch.setenv("OUTRIDER_VERIFIER_JOIN_TOKEN", SECRET)
    for arguments in ([], ["--model", "m", "--threads", "0"], ["--model", "m", "--tls-cert", "c"]):
        assert SECRET not in complaint(*arguments)
    config = parse(["--model", "m"])
    assert config.join_token.get_secret_value() == SECRET
    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"ENGINE_ARGS": '{"token_budget": 2}'},
            "ENGINE_ARGS.token_budget: Input should be greater than or equal to 16",
        ),
        ({"TLS_CERT": "file.pem"}, "tls_cert and tls_key go together"),
        ({"VERIFIER_ID": "a\nb"}, "verifier_id holds what cannot be printed"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(monkeypatch, complaint, settings, said):
    for name, value in settings.items():
        monkeypatch.setenv(f"OUTRIDER_VERIFIER_{name}", value)
    assert said in complaint("--model", "m")


def test_a_missing_certificate_is_refused_before_the_model_is_read(tmp_path):
    missing = tmp_path / "no.pem"
    assert str(missing) in refusal(model=tmp_path, tls_cert=missing, tls_key=missing)
    assert str(missing) in refusal(model=tmp_path, coordinator="127.0.0.1:1", coordinator_ca=missing)


def test_beyond_this_machine_a_verifier_needs_a_coordinator_or_open_to_all(tmp_path):
    for settings in ({"insecure": True}, {"tls_cert": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}):
        said = refusal(model=tmp_path, listen="0.0.0.0:0", **settings)
        assert "--coordinator" in said
        assert "--open-to-all" in said
    for settings in ({"listen": "0.0.0.0:0", "insecure": True, "open_to_all": True}, {"listen": "127.0.0.1:0"}):
        with pytest.raises(ModelRefused):  # it has come as far as the model, which is not there
            asyncio.run(serve(model=tmp_path, **settings))


# --- without the extra


def hollow_target(folder):
    """Write the files that a target must have, with nothing in them."""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def test_without_its_extra_it_ends_with_one_line_that_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")  # which the program sets
    for module in ("outrider.wire.health", "cloud_verifier.verifier"):  # imported anew
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)  # as if it were not installed
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path)])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert "grpc_health" in line and "pip install 'outrider[verifier]'" in line


def test_an_engine_without_its_extra_tells_the_front_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "cloud_verifier.engine_process.torch_target", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
    sent = []
    with pytest.raises(SystemExit) as ended:
        engine._run(VerifierConfig(model=tmp_path), types.SimpleNamespace(send=sent.extend))
    assert ended.value.code == 1
    [event] = sent
    error = error_from_failure(event.failure)
    assert isinstance(error, ModelRefused) and "transformers" in str(error)
    assert "pip install 'outrider[verifier]'" in str(error)


# --- its traffic log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"traffic": "{}/tokenizer.json/log"}, "where nothing can be written"),
        ({"traffic": "{}/log", "traffic_redact": "nosuchmodule:hook"}, "cannot be imported"),
    ],
)
def test_a_log_or_a_hook_that_cannot_be_is_refused_before_the_model_is_read(tmp_path, settings, said):
    hollow_target(tmp_path)
    assert said in refusal(model=tmp_path, **{name: value.format(tmp_path) for name, value in settings.items()})
