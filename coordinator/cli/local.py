"""`outrider up`, `demo` and `chat`: start the other programs as processes, and show how far they are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coordinator import DEFAULT_COORDINATOR
from coordinator.cluster import Child, Cluster, stand_apart
from coordinator.config import CoordinatorConfig
from coordinator.store.embedded_redis import tied_to_this_process
from outrider.core.errors import BadRequest
from outrider.settings.file import config_file, read
from outrider.settings.layers import Layers

EXIT_FAILED = 1
_NEEDS = {
    "coordinator": ("redis", "cryptography", "grpc_health", "grpc_reflection", "starlette", "uvicorn"),
    "verifier": ("torch", "transformers", "safetensors", "cryptography", "grpc_health", "grpc_reflection"),
    "edge": ("llama_cpp", "tokenizers", "jinja2"),
}
"""Modules of each extra that its program cannot do without."""
_LOG_LINE = re.compile(r"(?P<time>[\d-]+ [\d:,]+) (?P<process>\S+) (?P<level>[A-Z]+) (?P<message>.*)")
"""A line of `outrider.telemetry.logs` for people."""

_T = TypeVar("_T")


def up(options: argparse.Namespace) -> int:
    """Run a coordinator and verifiers until Ctrl-C. Raises BadRequest, ImportError or Unavailable."""
    return asyncio.run(_up(options))


def demo(options: argparse.Namespace) -> int:
    """Run a small cluster and the device's demonstration. Raises BadRequest, ImportError or Unavailable."""
    pair = _pair(options)
    _check_extras("coordinator", "verifier", "edge")
    return asyncio.run(_demo(options, pair))


def chat(options: argparse.Namespace) -> int:
    """Become `outrider-edge chat`. Raises BadRequest."""
    file = config_file(options.config)
    where = ["--verifier", options.verifier] if options.verifier else []
    where += ["--coordinator", options.coordinator] if options.coordinator else []
    if not where and not any(_is_set("edge", name, file) for name in ("coordinator", "verifier")):
        where = ["--coordinator", DEFAULT_COORDINATOR]
    config = ["--config", str(options.config)] if options.config else []
    program = "from outrider.console_scripts import edge; edge()"  # as installed, where Ctrl-C ends its imports quietly
    os.execv(sys.executable, [sys.executable, "-c", program, "chat", *where, *config, *options.passed_on])


def shipped_pair() -> tuple[Path, Path]:
    """Return the demo target's directory and the demo draft's file.

    They are in $OUTRIDER_MODELS, or else in models/ beside this code or in the current directory. Raises BadRequest if
    they are not.
    """
    given = os.environ.get("OUTRIDER_MODELS")
    here = (Path(__file__).resolve().parents[2] / "models", Path.cwd() / "models")
    folders = (Path(given),) if given else tuple(dict.fromkeys(here))
    for folder in folders:
        target, draft = folder / "target", folder / "draft.gguf"
        if (target / "config.json").is_file() and draft.is_file():
            return target, draft
    raise BadRequest(
        f"no demo pair in {' or '.join(map(str, folders))} (an installed package brings none): run it in a clone of the"
        " repository, give --model DIR and --draft FILE, or set OUTRIDER_MODELS to a folder of target/ and draft.gguf",
        field="model",
    )


def _pair(options: argparse.Namespace, *, elsewhere: bool = False) -> list[str]:
    """Return the verifier's flags for target and draft. elsewhere: its own settings name the target."""
    if options.model is None and not elsewhere:
        target, draft = shipped_pair()
        return ["--model", str(target), "--draft", str(options.draft or draft)]
    given = {"--model": options.model, "--draft": options.draft}
    return [part for flag, path in given.items() if path is not None for part in (flag, str(path))]


def _check_extras(*extras: str) -> None:
    """Look, without importing, before a child process fails. Raises ImportError that names what to install."""
    for extra in extras:
        for module in _NEEDS[extra]:
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"{module} is missing: pip install 'outrider[{','.join(extras)}]'")


def _is_set(process: str, name: str, file: Path | None) -> bool:
    """Return whether the environment or the file gives a process this setting. Raises BadRequest for the file."""
    table = read(file).get(process) if file is not None else None
    return bool(os.environ.get(f"OUTRIDER_{process}_{name}".upper()) or (isinstance(table, dict) and table.get(name)))


# --- up


async def _up(options: argparse.Namespace) -> int:
    pair = _pair(options, elsewhere=_is_set("verifier", "model", config_file(options.config)))
    if (options.tls_cert is None) != (options.tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together: give both or neither", field="tls_cert")
    _check_extras("coordinator", "verifier")
    stop = _stop_signal()
    async with Cluster(on_log=_print_log, start_timeout_s=options.start_timeout_s) as cluster:
        if await _unless(stop, _start(cluster, options, pair)) is None:
            return 0
        print(
            f"ready: coordinator at {cluster.address}, {len(cluster.verifiers)} verifier(s); Ctrl-C stops", flush=True
        )
        failed = await _failing(stop, cluster)
    for child in failed:
        print(f"outrider: {child.name} ended by itself; see its messages above", file=sys.stderr)
    return EXIT_FAILED if failed else 0


async def _start(cluster: Cluster, options: argparse.Namespace, pair: Sequence[str]) -> bool:
    """Start all processes and return True once they are ready."""
    shared = ["--config", str(options.config)] if options.config else []
    shared += ["--insecure"] if options.insecure else []
    trust = []
    if options.tls_cert:
        shared += ["--tls-cert", str(options.tls_cert), "--tls-key", str(options.tls_key)]
        trust = ["--coordinator-ca", str(options.ca or options.tls_cert)]
    state = ["--state-dir", options.state_dir] if options.state_dir else []
    name = ["--name", options.name] if options.name else []
    redis = ["--redis", options.redis] if options.redis else []
    drafts = _served_drafts(options.state_dir, config_file(options.config))
    listen = ["--listen", options.listen] if options.listen else []
    await _start_coordinator(cluster, *listen, *redis, *state, *drafts, *shared)
    verifier = (*pair, *name, *shared, *trust, *options.passed_on)
    await _start_verifiers(cluster, options.verifiers, *verifier)
    return True


async def _start_coordinator(cluster: Cluster, *arguments: str) -> None:
    _progress("starting the coordinator: it starts or finds its Redis (1 to 5 s)")
    started = time.monotonic()
    child = await cluster.start_coordinator(*arguments)
    _progress(f"coordinator is ready at {child.address} after {time.monotonic() - started:.0f} s")


async def _start_verifiers(cluster: Cluster, count: int, *arguments: str) -> list[Child]:
    """Start verifiers side by side. If one fails, or this is cancelled, the others are stopped."""
    what = "a verifier: it imports" if count == 1 else f"{count} verifiers side by side: each imports"
    usual = "10 to 30 s for the demo target, minutes for a large one"
    _progress(f"starting {what} torch, reads the target, checks it and measures its steps ({usual})")
    started = time.monotonic()

    async def start() -> Child:
        child = await cluster.start_verifier(*arguments)
        _progress(f"{child.name} is ready at {child.address} after {time.monotonic() - started:.0f} s")
        return child

    starting = [asyncio.create_task(start()) for _ in range(count)]
    try:
        return await asyncio.gather(*starting)
    finally:
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_log(name: str, line: str) -> None:
    """Print a line of a child's log with the child's name in it: several verifiers log at once."""
    if found := _LOG_LINE.fullmatch(line):
        line = f"{found['time']} {name} {found['level']} {found['message']}"
    print(line, file=sys.stderr, flush=True)


def _served_drafts(state_dir: str | None, file: Path | None = None) -> list[str]:
    """Return the coordinator's flags that serve drafts from its state directory, unless its settings say from where."""
    settings = Layers(CoordinatorConfig, {"state_dir": state_dir} if state_dir else {}, file)
    if settings.raw("artifacts") or settings.raw("http"):
        return []
    return ["--artifacts", str(Path(settings.raw("state_dir")) / "artifacts"), "--http", "127.0.0.1:0"]


async def _failing(stop: asyncio.Future[int], cluster: Cluster) -> list[Child]:
    """Wait for the end and return the children that have failed.

    None has if `stop` comes first, or if the last verifier ends with 0, as it does after an operator's drain.
    """
    children = [child for child in (cluster.coordinator, *cluster.verifiers) if child is not None]
    exits: dict[asyncio.Future[int], Child] = {asyncio.create_task(child.wait()): child for child in children}
    try:
        while not stop.done() and len(exits) > 1:
            done, _ = await asyncio.wait({stop, *exits}, return_when=asyncio.FIRST_COMPLETED)
            ended = [(task.result(), exits.pop(task)) for task in done & exits.keys()]
            if failed := [child for code, child in ended if code or child is cluster.coordinator]:
                return failed
            for _, child in ended:
                print(f"{child.name} has drained and ended", flush=True)
        return []
    finally:
        for task in exits:
            task.cancel()


def _stop_signal() -> asyncio.Future[int]:
    """Return a future of the first SIGINT, SIGTERM or SIGHUP, which no longer end this process."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def arrived(signum: int) -> None:
        if not stop.done():
            stop.set_result(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, arrived, signum)
    return stop


async def _unless(stop: asyncio.Future[int], work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of `work`, or None if `stop` comes first: models load for long, and Ctrl-C must not wait."""
    task = asyncio.create_task(work)
    waiting: list[asyncio.Future[Any]] = [stop, task]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None


# --- demo


async def _demo(options: argparse.Namespace, pair: Sequence[str]) -> int:
    stop, ready = _stop_signal(), asyncio.Event()

    def print_phase(name: str, line: str) -> None:
        if not ready.is_set():
            found = _LOG_LINE.fullmatch(line)
            _progress(f"{name}: {found['message'] if found else line}")

    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as scratch:
        stand_apart(Path(scratch), prefix_cache=False)
        async with Cluster(on_log=print_phase) as cluster:
            code = await _unless(stop, _show(cluster, options, pair, scratch, ready))
            return 128 + stop.result() if code is None else code


async def _show(
    cluster: Cluster, options: argparse.Namespace, pair: Sequence[str], scratch: str, ready: asyncio.Event
) -> int:
    """Return the demonstration's exit code. Its device does not outlive this call, nor this process.

    ready: is set when the cluster is, whose logs are of no interest from then on.
    """
    await _start_coordinator(cluster, "--listen", "127.0.0.1:0", "--state-dir", scratch)
    [verifier] = await _start_verifiers(cluster, 1, *pair)
    ready.set()
    command = [sys.executable, "-m", "edge_agent.demo", "--coordinator", cluster.address]
    command += ["--verifier", verifier.address, "--rtt-ms", str(options.rtt_ms)]
    command += ["--quick"] if options.quick else []
    # In a session of its own: Ctrl-C in a terminal reaches us alone, and we end it in order.
    device = await asyncio.create_subprocess_exec(*tied_to_this_process(), *command, start_new_session=True)
    try:
        return await device.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            device.kill()
        await device.wait()
