"""Test `outrider verifiers|sessions|tenants|status|top` against a real coordinator."""

from __future__ import annotations

import asyncio
import json
import types

import pytest
from certificate import self_signed

from coordinator import cli
from coordinator.cli import output
from outrider.wire import local_tokens
from outrider.wire.v1 import coordinator_pb2 as pb


@pytest.fixture
def outrider(coordinator, capsys):
    """Run `outrider ...`; return the exit code, stdout and stderr."""

    async def run(*arguments: object) -> tuple[int, str, str]:
        words = [*map(str, arguments), "--coordinator", coordinator.address]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(cli.main, words)
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
async def busy(coordinator):
    """Register v1 with sessions a and b, and v2 with none."""
    for name in ("v1", "v2"):
        await coordinator.join(name)
    await coordinator.report("v1", "ab")
    return coordinator


async def test_a_long_list_is_cut_with_a_notice_and_goes_on_from_there(coordinator, outrider):
    await coordinator.join("v1")
    await coordinator.report("v1", list("abcde"))
    code, out, err = await outrider("sessions", "list", "--limit", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["a", "b"]
    assert "2 sessions are shown, and there are more: --limit N shows more of them, --after v1/b the next" in err
    code, out, err = await outrider("sessions", "list", "--limit", "3", "--after", "v1/b")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["c", "d", "e"]


async def test_more_than_one_answer_holds_are_all_shown(coordinator, outrider, monkeypatch):
    monkeypatch.setattr(output, "ENTRIES_PER_CALL", 2)
    names = [f"v{i}" for i in range(1, 6)]
    for name in names:
        await coordinator.join(name)
    await coordinator.report("v1", list("abcde"))
    for words in (("status",), ("top", "--once")):
        code, out, _ = await outrider(*words)
        assert code == 0 and {*names, *"abcde"} <= {word for line in out.splitlines() for word in line.split()[:2]}
    code, out, _ = await outrider("status", "-o", "json")
    found = json.loads(out)
    assert (found["total_verifiers"], found["total_sessions"]) == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("verifiers", "show", "v9"), 3, "outrider verifiers list"),
        (("verifiers", "cordon", "v9"), 3, "outrider verifiers list"),
        (("verifiers", "show", "a/b"), 2, "letters, digits"),
        (("sessions", "show", "nobody"), 3, "outrider sessions list"),
        (("sessions", "kill", "nobody"), 3, "outrider sessions list"),
        (("sessions", "list", "--verifier", "v9"), 3, "outrider verifiers list"),
        (("sessions", "list", "--limit", "0"), 2, "must be from 1 to"),
        (("sessions", "list", "--after", "nonsense"), 2, "after"),
        (("sessions", "list", "-o", "xml"), 2, "invalid choice"),
        (("status", "--watch", "0"), 2, "0.1 to 3600"),
        (("window", "show", "nobody"), 3, "outrider sessions list"),
        (("window", "lift", "nobody"), 3, "outrider sessions list"),
        (("tenants", "revoke", "nobody"), 3, "outrider tenants list"),
        (("tenants", "create", "a b"), 2, "letters, digits"),
        (("releases", "show", "abcdef"), 3, "no release"),
    ],
)
async def test_what_is_wrong_ends_with_the_code_of_its_kind_and_the_way_out(busy, outrider, arguments, code, complaint):
    ended, out, err = await outrider(*arguments)
    assert (ended, out) == (code, "")
    assert complaint in err
    assert "Traceback" not in err


async def test_a_command_finds_the_token_that_up_keeps_and_one_that_is_given_wins(start, outrider_of, tmp_path):
    tokens = {local_tokens.ADMIN: "admin-token-0123456789"}
    coordinator = await start(admin_token=tokens[local_tokens.ADMIN])
    status = ("status", "--coordinator", coordinator.address, "--state-dir", str(tmp_path))
    assert (await outrider_of(*status))[0] == 5
    with local_tokens.kept(tokens, coordinator.address, tmp_path) as path:
        assert (await outrider_of(*status))[0] == 0
        assert (await outrider_of(*status[:3]))[0] == 5  # another folder
        assert (await outrider_of("--state-dir", str(tmp_path), *status[:3]))[0] == 0
        assert (await outrider_of(*status, OUTRIDER_ADMIN_TOKEN="wrong"))[0] == 5
        path.chmod(0o644)
        code, err = await outrider_of(*status)
        assert code == 2
        assert f"{path} has mode 0644" in err


@pytest.fixture
def outrider_of(capsys, monkeypatch, tmp_path):
    """Run the command as a user whose home is empty; return its code and what it says on stderr."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    async def run(*arguments: str, **variables: str) -> tuple[int, str]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            for name, value in variables.items():
                patch.setenv(name, value)
            await asyncio.to_thread(cli.main, list(arguments))
        return ended.value.code, capsys.readouterr().err

    return run


async def test_the_environment_says_which_coordinator_to_ask_and_how(start, outrider_of, tmp_path):
    peer = await start(admin_token="admin-token-0123456789")
    tls = self_signed(tmp_path)
    safe = await start(tls_cert=tls.cert, tls_key=tls.key)

    async def status(*flags: str, **variables: object) -> int:
        named = {f"OUTRIDER_ADMIN_{name}": str(value) for name, value in variables.items()}
        return (await outrider_of("status", *flags, **named))[0]

    token = "admin-token-0123456789"
    assert await status(COORDINATOR=peer.address, TOKEN=token) == 0
    assert await status("--coordinator", peer.address, COORDINATOR="127.0.0.1:1", TOKEN=token) == 0
    assert await status(COORDINATOR=safe.address) == 4
    assert await status(COORDINATOR=safe.address, CA=tls.cert) == 0
    assert await status("--no-tls", COORDINATOR=peer.address, TLS="true", TOKEN=token) == 0
    assert await status(TLS="perhaps") == 2


async def test_watching_shows_what_has_changed_and_ends_well_with_ctrl_c(busy, outrider, capsys, monkeypatch):
    request = pb.UpdateVerifierRequest(verifier_id="v2", action=pb.VERIFIER_ACTION_CORDON)
    loop, shown, waits = asyncio.get_running_loop(), [], []

    async def cordoned() -> None:
        await busy.admin.UpdateVerifier(request)

    async def sleep(seconds: float) -> None:
        """Stand in for the sleep between two lists: cordon v2 after the first, and press Ctrl-C once that shows."""
        [line] = capsys.readouterr().out.splitlines()
        shown.append([verifier["state"] for verifier in json.loads(line)["verifiers"]])
        waits.append(seconds)
        if shown[-1] == ["serving", "cordoned"] or len(shown) == 1_000:
            raise KeyboardInterrupt
        if len(shown) == 1:
            asyncio.run_coroutine_threadsafe(cordoned(), loop).result(30.0)

    monkeypatch.setattr(output, "asyncio", types.SimpleNamespace(run=asyncio.run, sleep=sleep))
    assert await outrider("verifiers", "list", "-o", "json", "--watch", "7") == (0, "", "")
    assert shown[0] == ["serving", "serving"] and shown[-1] == ["serving", "cordoned"]
    assert set(waits) == {7.0}
