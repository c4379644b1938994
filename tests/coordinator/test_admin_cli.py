"""Test `outrider verifiers|sessions|tenants|status|top` against a real coordinator."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest
from certificate import self_signed
from peers import identity

from coordinator import cli
from outrider.core.errors import NotFound
from outrider.wire import channels, local_tokens
from outrider.wire.status import abort
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

EVIL = "\x1b[2J\u202eevil"


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
    reports = [
        SessionTelemetry(
            session_id=i, tenant="ann", epoch=7, steps=10, committed=25, evaluated=40, accepted=10, rtt_ms=20.0
        )
        for i in "ab"
    ]
    load = {"step_ms": 10.0, "tokens_per_s": 81.0, "min_acceptance": 0.25, "kv_used": 5, "kv_capacity": 10}
    await coordinator.report("v1", reports, step_cost_ms={1: 9.5}, timing_ms={"forward": 8.0}, **load)
    return coordinator


# --- what is shown


async def test_verifiers_and_sessions_are_listed_and_shown(busy, outrider):
    code, out, err = await outrider("verifiers", "list")
    assert (code, err) == (0, "")
    head, one, two = out.splitlines()
    assert head.split()[:4] == ["VERIFIER", "ADDRESS", "TARGET", "SESSIONS"]
    assert re.match(
        r"v1 +127\.0\.0\.1:\d+ +demo float32 +2/8 +81 +10\.0 ms .* 0\.25 +25% +20\.0 ms +5/10 .* serving", one
    )
    assert two.startswith("v2 ")
    code, out, _ = await outrider("verifiers", "show", "v1")
    assert [part for part in ("2 of 8", "forward 8.0 ms", "1: 9.5 ms", "20 of 80 nodes") if part not in out] == []
    code, out, _ = await outrider("sessions", "list")
    assert [line.split()[:6] for line in out.splitlines()[1:]] == [[i, "ann", "v1", "live", "25", "2.50"] for i in "ab"]
    code, out, _ = await outrider("sessions", "show", "a")
    assert "25 tokens, 2.50 a step" in out and "25%, 10 of 40 nodes" in out
    assert "no window is decided" in (await outrider("window", "show"))[1]
    code, out, _ = await outrider("top", "--once", "--sessions", "1")
    assert re.search(r"^a +ann +v1 +- +25 +25% +20\.0 ms", out, re.MULTILINE) and "and 1 more sessions" in out


async def test_what_there_is_none_of_is_said(outrider):
    assert (await outrider("verifiers", "list"))[:2] == (0, "no verifier is registered\n")
    assert (await outrider("sessions", "list"))[:2] == (0, "no session holds a place\n")
    code, out, err = await outrider("tenants", "list")
    assert (code, out) == (0, "no tenants\n")
    assert "callers need no key" in err
    code, out, _ = await outrider("status")
    assert code == 0 and out.splitlines()[1:] == ["", "no verifier is registered", "", "no sessions"]
    assert (await outrider("window", "show"))[:2] == (0, "bounds for all: none\n\nno sessions\n")


# --- JSON stays as it is

VERIFIER = {
    "id": "v1",
    "address": "127.0.0.1:10001",
    "state": "serving",
    "cordoned": False,
    "draining": False,
    "target": {
        "name": "demo",
        "weights": "sha256:w",
        "tokenizer": "sha256:t",
        "dtype": "float32",
        "backend": "sdpa",
        "hardware": "cpu",
    },
    "sessions": 2,
    "capacity": 8,
    "tokens_per_s": 81.0,
    "min_acceptance": 0.25,
    "evaluated": 80,
    "accepted": 20,
    "acceptance": 0.25,
    "rtt_ms": 20.0,
    "kv_used": 5,
    "kv_capacity": 10,
    "lease_s": 0,
    "step_ms": 10.0,
    "node_ms": 0.0,
    "step_parts_ms": {"forward": 8.0},
    "step_cost_ms": {"1": 9.5},
    "session_cost_ms": 0.0,
}
SESSION = {
    "id": "a",
    "tenant": "ann",
    "verifier": "v1",
    "standby": None,
    "state": "live",
    "epoch": 7,
    "committed": 25,
    "tokens_per_step": 2.5,
    "evaluated": 40,
    "accepted": 10,
    "acceptance": 0.25,
    "rtt_ms": 20.0,
    "draft": None,
    "lossy": False,
    "traffic_class": None,
}


async def read(outrider, *arguments: str) -> dict:
    """Return the JSON document, with what time changes set to 0."""
    code, out, _ = await outrider(*arguments, "-o", "json")
    assert code == 0
    document = json.loads(out)
    for verifier in [document, *document.get("verifiers", [])]:
        if "lease_s" in verifier:
            assert 0 < verifier["lease_s"] <= 5.0
            verifier["lease_s"] = 0
    return document


async def test_json_of_verifiers_sessions_and_status_keeps_its_names_and_units(busy, outrider):
    listed = await read(outrider, "verifiers", "list")
    assert (listed["verifiers"][0], listed["next"]) == (VERIFIER, None)
    assert await read(outrider, "verifiers", "show", "v1") == VERIFIER
    assert await read(outrider, "sessions", "list", "--limit", "1") == {"sessions": [SESSION], "next": "v1/a"}
    assert await read(outrider, "sessions", "show", "a") == {**SESSION, "window": None}
    status = await read(outrider, "status")
    assert list(status) == [
        *("coordinator", "uptime_s", "store", "verifiers", "sessions", "total_verifiers", "total_sessions")
    ]
    assert (status["verifiers"][0], status["sessions"][0]) == (VERIFIER, SESSION)


async def test_json_of_tenants_windows_and_what_was_done_keeps_its_names(busy, outrider):
    _, out, _ = await outrider("tenants", "create", "acme", "-o", "json")
    made = json.loads(out)
    assert list(made) == ["name", "state", "created", "revoked", "configured", "limits", "use", "key"]
    assert list(made["limits"]) == ["max_places", "opens_per_minute", "tokens_per_minute", "max_streams"]
    assert made["use"] == {"places": 0, "opens": 0, "tokens": 0}
    assert (made["name"], made["state"], made["revoked"], made["configured"]) == ("acme", "active", None, False)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", made["created"])
    listed = await read(outrider, "tenants", "list")
    del made["key"]
    assert listed == {"tenants": [made], "next": None, "anonymous": False}
    _, out, _ = await outrider("window", "set", "--all", "--k", "2", "--depth", "4", "-o", "json")
    bounds = {"k": 2, "depth": 4, "pinned": False, "draft_wait_ms": None, "nodes_per_level": None}
    assert json.loads(out) == {"session": None, "bounds": bounds}
    assert await read(outrider, "window", "show") == {"default_bounds": bounds, "windows": [], "total": 0}
    _, out, _ = await outrider("verifiers", "cordon", "v2", "-o", "json")
    assert {name: json.loads(out)[name] for name in ("id", "action")} == {"id": "v2", "action": "cordon"}
    assert json.loads(out)["verifier"]["state"] == "cordoned"
    _, out, _ = await outrider("sessions", "kill", "a", "-o", "json")
    assert json.loads(out) == {"id": "a", "verifier": "v1", "killed": True}
    assert await read(outrider, "releases", "list") == {"releases": []}


async def test_a_long_list_is_cut_with_a_notice_and_goes_on_from_there(coordinator, outrider):
    await coordinator.join("v1")
    await coordinator.report("v1", list("abcde"))
    code, out, err = await outrider("sessions", "list", "--limit", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["a", "b"]
    assert "2 sessions are shown, and there are more: --limit N shows more of them, --after v1/b the next" in err
    code, out, err = await outrider("sessions", "list", "--limit", "3", "--after", "v1/b")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["c", "d", "e"]


class Hostile(coordinator_pb2_grpc.AdminServicer):
    """Act as a coordinator that answers with values that no real one admits."""

    verifier = pb.VerifierStatus(verifier_id=EVIL, address=EVIL, target=identity(name=EVIL, hardware=EVIL))
    session = pb.SessionStatus(
        telemetry=SessionTelemetry(session_id=EVIL, tenant=EVIL, traffic_class=EVIL, draft_release=EVIL),
        verifier_id=EVIL,
    )
    window = pb.WindowDecision(session_id=EVIL, verifier_id=EVIL, reason=EVIL)

    async def Status(self, request, context):
        return pb.StatusResponse(verifiers=[self.verifier], sessions=[self.session], store=EVIL)

    async def ListVerifiers(self, request, context):
        return pb.ListVerifiersResponse(verifiers=[self.verifier], next="" if request.verifier_id else EVIL)

    async def ListSessions(self, request, context):
        return pb.ListSessionsResponse(sessions=[self.session])

    async def ListWindows(self, request, context):
        return pb.ListWindowsResponse(windows=[self.window])

    async def ListTenants(self, request, context):
        return pb.ListTenantsResponse(tenants=[pb.Tenant(name=EVIL)])

    async def KillSession(self, request, context):
        await abort(context, NotFound(EVIL))


@pytest.fixture
async def hostile():
    server = channels.server()
    coordinator_pb2_grpc.add_AdminServicer_to_server(Hostile(), server)
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize(
    "words",
    [
        ["verifiers", "list", "--limit", "1"],
        ["verifiers", "show", "v"],
        ["sessions", "list"],
        ["sessions", "show", "s"],
        ["sessions", "kill", "s"],
        ["tenants", "list"],
        ["window", "show"],
        ["status"],
        ["top", "--once"],
    ],
)
async def test_what_a_coordinator_says_cannot_steer_the_terminal(hostile, capsys, words):
    for form in ([],) if words[0] == "top" else ([], ["-o", "json"]):
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cli.main, [*words, *form, "--coordinator", hostile])
        said = capsys.readouterr()
        assert "evil" in said.out + said.err
        assert all(c.isprintable() or c == "\n" for c in said.out + said.err)
        assert len(said.out.splitlines()) < 100


# --- what is done


async def test_a_verifier_is_cordoned_shown_so_and_uncordoned(busy, outrider):
    code, out, _ = await outrider("verifiers", "cordon", "v1")
    assert code == 0
    assert "outrider verifiers uncordon v1" in out
    assert "cordoned" in (await outrider("verifiers", "list"))[1].splitlines()[1]
    assert "cordoned" in (await outrider("status"))[1]
    assert (await outrider("verifiers", "uncordon", "v1"))[0] == 0
    assert "cordoned" not in (await outrider("verifiers", "list"))[1]


async def test_a_drain_says_that_the_process_ends_and_the_id_stays_cordoned(busy, outrider):
    code, out, _ = await outrider("verifiers", "drain", "v1")
    assert code == 0
    assert "and ends; its id stays cordoned until `outrider verifiers uncordon v1`" in out
    assert (await busy.report("v1", ["a", "b"], draining=True)).drain
    assert "draining" in (await outrider("verifiers", "list"))[1]
    code, out, err = await outrider("verifiers", "uncordon", "v1")
    assert code == 0
    assert "draining already, which cannot be taken back" in err


async def test_a_killed_session_is_listed_no_more(busy, outrider):
    code, out, _ = await outrider("sessions", "kill", "a")
    assert (code, out) == (0, "a: killed; verifier v1 ends it with its next report\n")
    assert [line.split()[0] for line in (await outrider("sessions", "list"))[1].splitlines()[1:]] == ["b"]


async def test_a_tenants_key_alone_goes_to_stdout_and_is_shown_once(busy, outrider):
    code, key, err = await outrider("tenants", "create", "acme")
    assert code == 0
    assert re.fullmatch(r"outrider-[\w-]{43}\n", key)
    assert "keep its key now" in err
    code, out, _ = await outrider("tenants", "list")
    assert out.splitlines()[1].split()[:2] == ["acme", "active"]
    assert key.strip() not in out
    code, out, _ = await outrider("tenants", "revoke", "acme")
    assert code == 0
    assert "end with their verifiers' next report" in out
    assert (await outrider("tenants", "list"))[1].splitlines()[1].split()[:2] == ["acme", "revoked"]


# --- exit codes


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
        (("sessions", "list", "--after", "nonsense"), 2, "session_id"),
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


def test_a_coordinator_that_is_not_there_is_code_4_with_what_to_look_at(capsys):
    for arguments in (["verifiers", "list"], ["top", "--once"], ["status"], ["status", "--watch"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--coordinator", "127.0.0.1:1"])
        assert ended.value.code == 4
        assert "the coordinator at 127.0.0.1:1 (--coordinator) cannot be reached" in (err := capsys.readouterr().err)
        assert "is it running" in err


# --- again and again, and top


def command(coordinator, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "coordinator.cli", *arguments, "--coordinator", coordinator.address]


async def test_watching_shows_what_has_changed_and_ends_well_with_ctrl_c(busy):
    process = await asyncio.create_subprocess_exec(
        *command(busy, "verifiers", "list", "-o", "json", "--watch", "0.1"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        first = json.loads(await process.stdout.readline())
        assert [v["state"] for v in first["verifiers"]] == ["serving", "serving"]
        request = pb.UpdateVerifierRequest(verifier_id="v2", action=pb.VERIFIER_ACTION_CORDON)
        await busy.admin.UpdateVerifier(request)
        while json.loads(await process.stdout.readline())["verifiers"][1]["state"] != "cordoned":
            pass
        process.send_signal(2)
        await process.stdout.read()
        assert await process.wait() == 0


async def test_a_reader_that_has_enough_ends_it_without_a_traceback(busy):
    line = " ".join(command(busy, "status", "--watch", "0.1"))
    ran = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", f"{line} | head -1"], capture_output=True, text=True, timeout=30
    )
    assert "up" in ran.stdout
    assert ran.stderr == ""


async def test_top_without_a_terminal_says_what_to_do(outrider):
    code, out, err = await outrider("top")
    assert (code, out) == (2, "")
    assert "needs a terminal" in err and "--once" in err
