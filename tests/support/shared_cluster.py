"""Run one cluster by the commands that users type, for all black-box tests.

The tests in tests/contract hold Outrider to its promises from outside: they use its commands, its HTTP server, the
public names of `edge_agent`, and the generated stubs of `outrider.wire.v1` where an RPC is called raw. They import
nothing else of the product, so they stay as they are whatever becomes of it inside. The promises are:

Text (`test_contract_text.py`)
    A text is the target's own, token for token, at temperature 0 and above: with a draft, with several, with n-grams,
    without any, and with a verifier that drafts itself. Penalties, filters and biases are those of the protocol page.
    Stop strings, stop ids and least lengths end a text where they say, and grammars hold. Log-probabilities, also
    those of a prompt, are the target's. Sessions side by side do not touch one another. Typical acceptance needs the
    operator's permission, and its text is labelled. A skeleton has the points of its outline.
Survival (`test_contract_survival.py`)
    A verifier that is killed or drained costs a session no token. The death of the coordinator leaves live sessions
    alone, and a new one takes over. A client that goes away frees its slot. An operator can end a session. Without a
    verifier the draft writes alone, if it is allowed to, and what it writes is labelled.
Access (`test_contract_access.py`)
    Every RPC refuses callers without the right credential. A revoked key opens nothing and ends its sessions. A
    tenant's limits hold. Bad input gets an error that says what is wrong, and neighbours do not notice. Messages on a
    stream that break the protocol end that stream alone.
Attacks (`test_contract_attacks.py`)
    Floods of health watches, of unfinished messages and of idle connections leave others served and memory bounded.
    Damaged model files are refused and kill no device. A tenant that lies decides no trial of a draft.
HTTP (`test_contract_http.py`)
    The unmodified `openai` package gets completions, chats, responses, tool calls and structured outputs, streamed and
    whole. Errors are the package's own.
Learning (`test_contract_learning.py`)
    What a tenant has not consented to is not recorded. A turn of the distillation loop makes a draft of recorded
    traffic and publishes it. A release reaches devices in the middle of their sessions, and is rolled back, without a
    token changed.
Commands (`test_contract_commands.py`)
    Every command does once what its help says, and says what is wrong if it cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from small_pair import DRAFT, TARGET

from edge_agent import Client
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
NAME = "pair"
"""The target's name in the cluster."""
QUICK = ("--engine-args", '{"token_budget": 64, "draft_wait_ms": 200}')
"""Flags with which a verifier starts sooner, since it measures steps of fewer rows, and waits for drafts also on a busy
machine, until the coordinator decides: a step of the small target takes hardly longer than a message."""
KEYS = {"acme": "acme-key-0123456789", "open": "open-key-0123456789"}
"""The API keys of the two tenants that are there from the beginning; `open` lets its sessions be recorded."""
ADMIN, JOIN = "admin-token-0123456789", "join-token-0123456789"
TENANTS = f"""
[tenants]
acme = "{KEYS["acme"]}"
open = "{KEYS["open"]}"
[recording.open]
share = 1.0
keep_days = 1
"""
TICKET = "outrider-ticket-bin"
"""The metadata of a call to a verifier that holds the session's ticket."""
SECRETS = {
    "OUTRIDER_ADMIN_TOKEN": ADMIN,
    "OUTRIDER_COORDINATOR_ADMIN_TOKEN": ADMIN,
    "OUTRIDER_COORDINATOR_JOIN_TOKEN": JOIN,
    "OUTRIDER_DISTILL_ADMIN_TOKEN": ADMIN,
    "OUTRIDER_EDGE_API_KEY": KEYS["acme"],
    "OUTRIDER_VERIFIER_JOIN_TOKEN": JOIN,
}


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of every command: this checkout's code, and no settings but these tests' own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    caches = {"HOME": str(folder / "home"), "OUTRIDER_EDGE_CACHE_DIR": str(folder / "cache")}
    return {**kept, **SECRETS, **caches, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that holds a secret."""
    return (("authorization", f"Bearer {secret}"),)


def command(name: str, *arguments: object) -> list[str]:
    """Return the command line of an installed command."""
    return [str(Path(sys.executable).with_name(name)), *map(str, arguments)]


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait until the condition is true, and return what it returned then."""
    give_up = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"not within {timeout_s} s"
        time.sleep(0.02)
    return found


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Program:
    """A command that runs; its output goes to the file `log`."""

    process: subprocess.Popen[bytes]
    log: Path
    ready: str = ""
    """What the pattern found that the output was awaited for."""

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def tree(self) -> list[psutil.Process]:
        """Return the command's process and all below it that live."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def memory(self) -> int:
        """Return the resident bytes of all its processes."""
        total = 0
        for process in self.tree:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def await_output(self, pattern: str, timeout_s: float = 300.0) -> re.Match[str]:
        """Return the first match in the output."""

        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output)
            assert match or self.process.poll() is None, f"ended with {self.process.returncode}: {self.output[-3000:]}"
            return match

        return until(found, timeout_s)

    def signal(self, signum: int) -> None:
        """Send a signal to all its processes."""
        for process in self.tree:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signum)

    def stop(self, timeout_s: float = 60.0) -> int:
        """End it as Ctrl-C does, and by force what is left; return its exit code."""
        left = self.tree
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout_s)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return self.process.wait(60)


@contextlib.contextmanager
def running(
    folder: Path, ready: str, name: str, *arguments: object, home: Path | None = None, **variables: str
) -> Iterator[Program]:
    """Run a command from the moment on at which its output matches `ready`; end it with the context.

    folder: of its log. home: the folder of what commands keep, if it is another one.
    """
    log = folder / f"{name}-{len(list(folder.glob('*.log')))}.log"
    tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []  # it ends if these tests are killed
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*tied, *command(name, *arguments)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(home or folder) | variables,
            start_new_session=True,
        )
    program = Program(process, log)
    try:
        found = program.await_output(ready)
        program.ready = found[1] if found.groups() else found[0]
        yield program
    finally:
        program.stop()


@dataclass
class Cluster:
    """The coordinator, two verifiers and Redis that `outrider up` runs; see the module for what may be used of them."""

    folder: Path
    address: str
    up: Program

    def client(self, tenant: str = "acme", cache: str = "cache", **options: Any) -> Client:
        """Return a blocking client of the SDK; use it as a context manager."""
        api_key = options.pop("api_key", KEYS.get(tenant))
        given = {"coordinator": self.address, "target": NAME, "api_key": api_key, "cache_dir": self.folder / cache}
        return Client(**given | options)

    def run(self, name: str, *arguments: object, timeout_s: float = 240.0, **variables: str) -> tuple[int, str, str]:
        """Run a command to its end; return exit code, stdout and stderr."""
        done = subprocess.run(
            command(name, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env=environment(self.folder) | variables,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def outrider(self, *arguments: object) -> str:
        """Run the operator's command, which must succeed, and return what it printed."""
        code, out, err = self.run("outrider", *arguments, "--coordinator", self.address)
        assert code == 0, f"{arguments}: {err}"
        return out

    def asked(self, *arguments: object) -> Any:
        """Return what the operator's command shows, from JSON."""
        return json.loads(self.outrider(*arguments, "-o", "json"))

    def administer(self, rpc: str, request: Any) -> Any:
        """Call an operator's RPC, which takes milliseconds where the start of a command may outlast a text."""
        with grpc.insecure_channel(self.address) as channel:
            return getattr(coordinator_pb2_grpc.AdminStub(channel), rpc)(request, metadata=bearer(ADMIN), timeout=60)

    def sessions(self) -> list[str]:
        """Return the ids of the live sessions."""
        listed = self.administer("ListSessions", pb.ListSessionsRequest()).sessions
        return [one.telemetry.session_id for one in listed]

    def verifiers(self) -> dict[str, pb.VerifierStatus]:
        """Return the verifiers that are registered, by their ids."""
        listed = self.administer("ListVerifiers", pb.ListVerifiersRequest()).verifiers
        return {one.verifier_id: one for one in listed}

    def update(self, verifier: str, action: str) -> None:
        """Have a verifier "CORDON", "UNCORDON" or "DRAIN"."""
        request = pb.UpdateVerifierRequest(verifier_id=verifier, action=f"VERIFIER_ACTION_{action}")
        self.administer("UpdateVerifier", request)

    def update_tenant(self, name: str, action: str, **limits: int) -> str:
        """Have a tenant "CREATE"d, whose key is returned, its limits "SET_LIMITS", or "REVOKE" it."""
        limited = pb.TenantLimits(**limits)
        request = pb.UpdateTenantRequest(name=name, action=f"TENANT_ACTION_{action}", limits=limited)
        return self.administer("UpdateTenant", request).key

    def at_rest(self, *ids: str) -> bool:
        """Return whether these verifiers, by default all, hold no session and no slot of the target's memory."""
        measured = [one.telemetry for id, one in self.verifiers().items() if not ids or id in ids]
        return not any(one.live_sessions or one.kv_used for one in measured)

    @contextlib.contextmanager
    def verifier(self, *flags: object, alone: bool = False, **variables: str) -> Iterator[Program]:
        """Run a further verifier, which joins the cluster unless it is to be alone; `ready` is its address."""
        models = ("--model", TARGET, "--draft", DRAFT, "--name", NAME, "--listen", "127.0.0.1:0")
        joins = () if alone else ("--coordinator", self.address)
        pattern = r"listening on (127\.0\.0\.1:\d+)"
        command = ("outrider-verifier", *models, *QUICK, *joins, *flags)
        with running(self.folder, pattern, *command, **variables) as program:
            yield program

    @contextlib.contextmanager
    def cordoned(self, *ids: str) -> Iterator[None]:
        """Keep new sessions off these verifiers."""
        for one in ids:
            self.update(one, "CORDON")
        try:
            yield
        finally:
            for one in ids:
                self.update(one, "UNCORDON")


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """Run the cluster that the tests share, in a folder of its own."""
    (folder / "tenants.toml").write_text(TENANTS)
    settings = {
        "OUTRIDER_COORDINATOR_TENANTS_FILE": str(folder / "tenants.toml"),
        "OUTRIDER_COORDINATOR_REPORT_INTERVAL_MS": "100",
        "OUTRIDER_COORDINATOR_CANARY_SHARE": "0.5",
        "OUTRIDER_COORDINATOR_METRICS": "127.0.0.1:0",
        "OUTRIDER_VERIFIER_METRICS": "127.0.0.1:0",
        "OUTRIDER_VERIFIER_TRAFFIC": str(folder / "traffic"),
    }
    up = ("up", "--listen", "127.0.0.1:0", "--verifiers", 2, "--state-dir", folder / "state")
    models = ("--model", TARGET, "--draft", DRAFT, "--name", NAME, "--", *QUICK)
    with running(folder, r"ready: coordinator at (127\.0\.0\.1:\d+)", "outrider", *up, *models, **settings) as program:
        yield Cluster(folder, program.ready, program)
        tree = program.tree
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(60) == 0 and not any(map(lives, tree)), "Ctrl-C did not end all in order"
