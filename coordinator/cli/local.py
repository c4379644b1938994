"""Start the other programs for `outrider up`, `demo`, `chat` and `bench`, and show how far they are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TextIO

from coordinator.cluster import Child, Cluster, stand_apart
from coordinator.config import EMBEDDED, CoordinatorConfig
from coordinator.store.embedded_redis import EmbeddedServer
from outrider.artifacts.hub import fetch_draft, fetch_target, hub_id
from outrider.artifacts.model_files import check_gguf, check_target
from outrider.core.addresses import DEFAULT_COORDINATOR
from outrider.core.errors import BadRequest, Unavailable
from outrider.core.text import counted
from outrider.processes import tied_to_this_process
from outrider.settings import Layers, config_file, read_file
from outrider.telemetry.logs import JsonFormatter, is_json
from outrider.wire import local_tokens

EXIT_FAILED = 1
REVIVE_S = 1.0
"""Seconds between two looks at the embedded Redis server."""
DRAFT = "smollm2-draft.gguf"
_NEEDS = {
    "coordinator": ("redis", "cryptography", "jwt", "grpc_health", "starlette", "uvicorn"),
    "verifier": ("torch", "transformers", "safetensors", "accelerate", "gguf", "cryptography", "jwt", "grpc_health"),
    "edge": ("llama_cpp", "tokenizers", "jinja2"),
}
"""Modules of each extra that its program cannot do without."""


def up(options: argparse.Namespace) -> int:
    """Run a coordinator and verifiers until Ctrl-C. Raises BadRequest, ModelRefused, ImportError or Unavailable."""
    file = config_file(options.config)
    _check_extras("coordinator", "verifier")
    pair = _pair(options, {name for name in ("model", "draft") if _is_set("verifier", name, file)})
    given = {name: value for name in ("state_dir", "redis") if (value := getattr(options, name))}
    settings = Layers(CoordinatorConfig, given, file)
    pair = _checked_pair(pair, file, needs_weights=options.engine != "vllm" and not _is_set("verifier", "engine", file))
    return asyncio.run(_up(options, pair, file, settings))


def demo(options: argparse.Namespace) -> int:
    """Run a small cluster and the device's demonstration. Raises what `up` does."""
    _check_extras("coordinator", "verifier", "edge")
    pair = _pair(options)
    pair = _checked_pair(pair, flags_alone=True)
    return asyncio.run(_demo(options, pair))


def device(options: argparse.Namespace) -> int:
    """Become `outrider-edge` with the same command, `chat` or `bench`. Raises BadRequest."""
    where, file = _given(options, "verifier", "coordinator"), config_file(options.config)
    if not where and not any(_is_set("edge", name, file) for name in ("coordinator", "verifier")):
        where = ["--coordinator", DEFAULT_COORDINATOR]
    program = [sys.executable, "-c", "from outrider.console_scripts import edge; edge()"]
    # Python answers a Ctrl-C with a traceback while it starts, so this is held back until `edge` can end quietly.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(program[0], [*program, options.command, *where, *_given(options, "config"), *options.passed_on])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def fetch_model(_: argparse.Namespace) -> int:
    """Make the folder of SmolLM2, and print its path. Raises ImportError."""
    print(_smollm2())
    return 0


def _smollm2() -> str:
    """Return the folder of SmolLM2, made first if it is not there. Raises ImportError, or SystemExit if that fails."""
    _check_extras("verifier")
    command = [*tied_to_this_process(), sys.executable, "-m", "cloud_verifier.smollm2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        _say(f"outrider: making SmolLM2's folder was ended by signal {-done.returncode}; is there 3 GB of free memory?")
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else EXIT_FAILED)
    return done.stdout.strip()


def _draft() -> Path:
    """Return our draft for SmolLM2. Raises BadRequest if this installation has none."""
    code = Path(__file__).resolve().parents[1]
    for folder in (code / "models", code.parent / "models"):  # of an installed package, of a clone
        if (draft := folder / DRAFT).is_file():
            return draft
    raise BadRequest(
        f"{code.parent / 'models' / DRAFT}: no such file, so there is no draft for SmolLM2; give --draft FILE, or"
        " --model and --draft of your own"
    )


def _pair(options: argparse.Namespace, elsewhere: Set[str] = frozenset()) -> list[str]:
    """Return the verifier's flags for target and draft. elsewhere: those of the two that its own settings name."""
    if options.model is not None or "model" in elsewhere:
        return _given(options, "model", "draft")
    if options.draft is None and "draft" not in elsewhere:
        options.draft = _draft()
    return ["--model", _smollm2(), *_given(options, "draft")]


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """Return these options with their values, where they were given, as flags for another program."""
    values = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    return [word for flag, value in values.items() if value for word in (flag, str(value))]


def _check_extras(*extras: str) -> None:
    """Look, without importing, before a child process fails. Raises ImportError that names what to install."""
    for extra in extras:
        for module in _NEEDS[extra]:
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"{module} is missing: pip install 'outrider[{','.join(extras)}]'")


def _is_set(process: str, name: str, file: Path | None) -> bool:
    """Return whether the environment or the file gives a process this setting. Raises BadRequest for the file."""
    return bool(_setting(process, name, file)[1])


def _setting(process: str, name: str, file: Path | None) -> tuple[str, Any]:
    """Return where the environment or the file gives a process this setting, and its value; it is None if neither does.

    Raises BadRequest for the file.
    """
    variable = f"OUTRIDER_{process}_{name}".upper()
    if given := os.environ.get(variable):
        return variable, given
    table = read_file(file).get(process) if file is not None else None
    return f"{file}: [{process}] {name}", table.get(name) if isinstance(table, dict) else None


# --- what is looked at before anything starts


def _checked_pair(
    pair: Sequence[str], file: Path | None = None, *, needs_weights: bool = True, flags_alone: bool = False
) -> list[str]:
    """Fetch what target and draft have on the hub, look at their files, and decode a token with the draft.

    pair: the verifier's flags for them. Return these with paths for ids of the hub, so that several verifiers share one
    download, and with the target's name where its id names it. flags_alone: its environment and `file` do not count.
    Raises ModelRefused that names the file, and the flag, the variable or the setting that named it, and Unavailable
    for the hub.
    """
    from outrider.llama.trial import try_draft  # numpy, for which `chat` does not wait

    given = dict(zip(pair[::2], pair[1::2], strict=True))
    found: dict[str, tuple[str, Path]] = {}
    for name, fetch in (("draft", fetch_draft), ("server_draft", fetch_draft), ("model", fetch_target)):
        flag = f"--{name.replace('_', '-')}"
        by_flag = flag in given or flags_alone
        where, path = (flag, given.get(flag)) if by_flag else _setting("verifier", name, file)
        if not isinstance(path, str) or not path:
            continue
        if on_hub := hub_id(path):
            given[flag] = path = str(fetch(path, where, tell=_say))
            if name == "model" and (flags_alone or not _is_set("verifier", "name", file)):
                given["--name"] = on_hub[0]
        found[name] = where, Path(path)
    if "model" in found:
        where, folder = found["model"]
        check_target(folder, where, needs_weights=needs_weights)
    if "draft" in found:
        where, draft = found["draft"]
        check_gguf(draft, where)
        if why := try_draft(draft, where, found["model"][1] / "tokenizer.json" if "model" in found else None):
            _say(f"the draft was not tried: {why}")
    return [word for flag, value in given.items() for word in (flag, value)]


# --- up


async def _up(
    options: argparse.Namespace, pair: Sequence[str], file: Path | None, settings: Layers[CoordinatorConfig]
) -> int:
    shared = [
        *_given(options, "config", "tls_cert", "tls_key", "tls_client_ca"),
        *(["--insecure"] if options.insecure else []),
    ]
    trust = ["--coordinator-ca", str(options.ca or options.tls_cert)] if options.tls_cert else []
    in_order = True
    made, environment = _tokens(file)
    state_dir = Path(settings.raw("state_dir"))
    serves = settings.raw("artifacts") or settings.raw("http")
    drafts = [] if serves else ["--artifacts", str(state_dir / "artifacts"), "--http", "127.0.0.1:0"]
    async with (
        contextlib.AsyncExitStack() as stack,
        Cluster(on_log=_print_log, start_timeout_s=options.start_timeout_s, environment=environment) as cluster,
    ):
        with _until_signal():
            if settings.raw("redis") == EMBEDDED:
                # Here it outlives a coordinator, which finds all in it when it is back.
                redis = stack.enter_context(EmbeddedServer())
                options.redis = redis.url
                stack.callback(asyncio.create_task(_revive(redis)).cancel)
            await _start_coordinator(cluster, *_given(options, "listen", "redis", "state_dir"), *drafts, *shared)
            if made:
                path = stack.enter_context(local_tokens.kept(made, cluster.address, state_dir))
                _say(f"tokens of operators and verifiers, for your own commands, are in {path}")
            verifier = (*pair, *_given(options, "name", "engine", "engine_python"), *shared, *trust, *options.passed_on)
            count = len(await _start_verifiers(cluster, options.verifiers, *verifier))
            _say(f"ready: coordinator at {cluster.address}, {counted(count, 'verifier')}; Ctrl-C stops", sys.stdout)
            in_order = await cluster.keep(_say)
    return 0 if in_order else EXIT_FAILED


async def _revive(redis: EmbeddedServer) -> None:
    """Start the Redis server again, empty, whenever it has ended."""
    while True:
        await asyncio.sleep(REVIVE_S)
        try:
            if await asyncio.to_thread(redis.revive):
                _say("the embedded Redis server had ended; started an empty one, verifiers will register again")
        except Unavailable as error:
            _say(str(error))


def _tokens(file: Path | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Make the tokens that the settings do not give, so that other users of this machine neither administer nor join.

    Return those by name, and the variables that tell them, or a join token that is given, to the processes.
    """
    join = _setting("coordinator", "join_token", file)[1] or _setting("verifier", "join_token", file)[1]
    made = {} if join else {local_tokens.JOIN: local_tokens.new_token()}
    if not _is_set("coordinator", "admin_token", file):
        made[local_tokens.ADMIN] = local_tokens.new_token()
    join = join or made[local_tokens.JOIN]
    variables = {"OUTRIDER_COORDINATOR_JOIN_TOKEN": join, "OUTRIDER_VERIFIER_JOIN_TOKEN": join}
    if local_tokens.ADMIN in made:
        variables["OUTRIDER_COORDINATOR_ADMIN_TOKEN"] = made[local_tokens.ADMIN]
    return made, variables


async def _start_coordinator(cluster: Cluster, *arguments: str) -> None:
    _say("starting the coordinator: it starts or finds its Redis (1 to 5 s)")
    started = time.monotonic()
    child = await cluster.start_coordinator(*arguments)
    _say(f"coordinator is ready at {child.address} after {time.monotonic() - started:.0f} s")


async def _start_verifiers(cluster: Cluster, count: int, *arguments: str) -> list[Child]:
    """Start verifiers side by side. If one fails, or this is cancelled, the others are stopped."""
    what = "a verifier: it imports" if count == 1 else f"{count} verifiers side by side: each imports"
    usual = "10 to 30 s for a small target, minutes for a large one"
    _say(f"starting {what} torch, reads the target, checks it and measures its steps ({usual})")
    started = time.monotonic()

    async def start() -> Child:
        child = await cluster.start_verifier(*arguments)
        _say(f"{child.name} is ready at {child.address} after {time.monotonic() - started:.0f} s")
        return child

    starting = [asyncio.create_task(start()) for _ in range(count)]
    try:
        return await asyncio.gather(*starting)
    finally:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)


def _say(text: str, stream: TextIO | None = None) -> None:
    """Print a line of this command itself; to stderr unless a stream is given."""
    if is_json():
        text = JsonFormatter("up").format(logging.makeLogRecord({"name": "outrider", "levelname": "INFO", "msg": text}))
    print(text, file=stream or sys.stderr, flush=True)


def _print_log(name: str, line: str) -> None:
    """Print a line that a child wrote, with the child's name in it: several of them speak at once."""
    if is_json():
        try:
            entry = json.loads(line)
        except ValueError:  # a traceback, or what a library prints
            entry = None
        known = entry if isinstance(entry, dict) else {"level": "WARNING", "message": line}
        line = json.dumps({**known, "process": name}, ensure_ascii=False)
    else:
        line = f"{name}: {line}"
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _until_signal() -> Iterator[list[int]]:
    """Cancel the body at the first SIGINT, SIGTERM or SIGHUP, without an error; yield a list that then holds it.

    Models load for long, and Ctrl-C must not wait. From then on signals do nothing: what was started ends in order.
    """
    loop, task, arrived, over = asyncio.get_running_loop(), asyncio.current_task(), list[int](), False

    def arrive(signum: int) -> None:
        if task is not None and not arrived and not over:
            arrived.append(signum)
            task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, arrive, signum)
    try:
        yield arrived
    except asyncio.CancelledError:
        if not arrived:
            raise
    finally:
        over = True


# --- demo


async def _demo(options: argparse.Namespace, pair: Sequence[str]) -> int:
    ready = asyncio.Event()

    def print_phase(name: str, line: str) -> None:
        if not ready.is_set():
            _print_log(name, line)

    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as scratch:
        stand_apart(Path(scratch), prefix_cache=False)
        async with Cluster(on_log=print_phase, environment=_tokens(None)[1]) as cluster:
            code = 0
            with _until_signal() as signals:
                code = await _show(cluster, options, pair, scratch, ready)
            return 128 + signals[0] if signals else code


async def _show(
    cluster: Cluster, options: argparse.Namespace, pair: Sequence[str], scratch: str, ready: asyncio.Event
) -> int:
    """Return the demonstration's exit code. ready: set once the cluster is; what verifiers log is not shown then."""
    await _start_coordinator(cluster, "--listen", "127.0.0.1:0", "--state-dir", scratch)
    await _start_verifiers(cluster, 1, *pair)
    ready.set()
    if code := await _device(cluster, "--rtt-ms", str(options.rtt_ms)):
        return code
    await _start_verifiers(cluster, 1, *pair)
    return await _device(cluster, "--kill", *(f"{one.address}={one.pid}" for one in cluster.verifiers))


async def _device(cluster: Cluster, *arguments: str) -> int:
    """Run the device's side of the demonstration, which ends with this call, and return its exit code."""
    command = [sys.executable, "-m", "edge_agent.demo", "--coordinator", cluster.address, *arguments]
    # In a session of its own: Ctrl-C in a terminal reaches us alone, and we end it in order.
    device = await asyncio.create_subprocess_exec(*tied_to_this_process(), *command, start_new_session=True)
    try:
        return await device.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            device.kill()
        await device.wait()
