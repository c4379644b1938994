"""`outrider up`, `demo` and `chat`: the other programs, started as processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coordinator.cli.connection import DEFAULT_COORDINATOR
from coordinator.cli.values import count, milliseconds
from coordinator.cluster import START_TIMEOUT_S, Child, Cluster, stand_apart
from coordinator.config import DEFAULT_STATE, CoordinatorConfig
from coordinator.store.embedded_redis import tied_to_this_process
from outrider.core.errors import BadRequest
from outrider.settings.file import VARIABLE, config_file, read
from outrider.settings.layers import Layers

EXIT_FAILED = 1

_T = TypeVar("_T")


def add_parsers(commands: Any) -> None:
    _add_up(commands)
    _add_demo(commands)
    _add_chat(commands)


def _add_up(commands: Any) -> None:
    up = commands.add_parser(
        "up",
        help="start a coordinator and verifiers here, until Ctrl-C",
        epilog="What follows `--` goes to every verifier: outrider up -- --threads 4 --kv-slots 65536",
    )
    _pair_options(up)
    up.add_argument(
        "--name", help="of the target in the cluster [default: the directory's name] [env: OUTRIDER_VERIFIER_NAME]"
    )
    up.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"of the coordinator [default: {DEFAULT_COORDINATOR}] [env: OUTRIDER_COORDINATOR_LISTEN]",
    )
    up.add_argument("--verifiers", type=count, default=1, metavar="N", help="how many [default: 1]")
    up.add_argument(
        "--redis",
        metavar="URL",
        help="of a Redis server, or `embedded` [default: embedded] [env: OUTRIDER_COORDINATOR_REDIS]",
    )
    up.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where the coordinator keeps its ticket key "
        f"[default: {DEFAULT_STATE}] [env: OUTRIDER_COORDINATOR_STATE_DIR]",
    )
    up.add_argument(
        "--tls-cert",
        type=Path,
        metavar="PEM",
        help="certificate chain, of coordinator and verifiers [default: none, plain text]",
    )
    up.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key [default: none]")
    up.add_argument("--ca", type=Path, metavar="PEM", help="its authority [default: the certificate is its own]")
    up.add_argument("--insecure", action="store_true", help="accept plain text and strangers beyond loopback")
    up.add_argument(
        "--start-timeout-s",
        type=float,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"that each process may take to be ready: large models load slowly [default: {START_TIMEOUT_S:.0f}]",
    )
    _config_option(up, "that coordinator and verifiers read")
    up.set_defaults(run=lambda options: asyncio.run(_up(options)))


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="text from a device and its verifier, compared with cloud streaming")
    _pair_options(demo)
    demo.add_argument("--quick", action="store_true", help="two prompts, no pauses")
    demo.add_argument(
        "--rtt-ms", type=milliseconds, default=30.0, metavar="MS", help="of the second, emulated link [default: 30]"
    )
    demo.set_defaults(run=lambda options: asyncio.run(_demo(options)))


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="chat through a running cluster; takes all options of `outrider-edge chat`",
        epilog="All other options are passed on to `outrider-edge chat`; see `outrider-edge chat --help`.",
        allow_abbrev=False,
    )
    chat.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=f"it names the verifier [default: {DEFAULT_COORDINATOR}] [env: OUTRIDER_EDGE_COORDINATOR]",
    )
    chat.add_argument(
        "--verifier",
        metavar="HOST:PORT",
        help="of one verifier, instead of a coordinator [default: none] [env: OUTRIDER_EDGE_VERIFIER]",
    )
    _config_option(chat, "whose table [edge] it reads")
    chat.set_defaults(run=_chat)


def _config_option(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"TOML file {what} [default: none] [env: {VARIABLE}]"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)


def _pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="of the target [default: the shipped demo target]")
    parser.add_argument(
        "--draft", type=Path, metavar="FILE", help="GGUF draft [default: the shipped one, with the shipped target]"
    )


def shipped_pair() -> tuple[Path, Path]:
    """The demo pair in $OUTRIDER_MODELS where that is set, else in models/ beside this code or where we are started.

    Raises BadRequest where there is none.
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
    """The verifier's flags for target and draft. elsewhere: its own settings name the target."""
    if options.model is None and not elsewhere:
        target, draft = shipped_pair()
        return ["--model", str(target), "--draft", str(options.draft or draft)]
    given = {"--model": options.model, "--draft": options.draft}
    return [part for flag, path in given.items() if path is not None for part in (flag, str(path))]


_NEEDS = {
    "coordinator": ("redis", "cryptography", "grpc_health", "grpc_reflection", "starlette", "uvicorn"),
    "verifier": ("torch", "transformers", "safetensors", "cryptography", "grpc_health", "grpc_reflection"),
    "edge": ("llama_cpp", "tokenizers", "jinja2"),
}
"""Modules of each extra that its program cannot do without."""


def _check_extras(*extras: str) -> None:
    """Look, without importing, before a child process fails. Raises ImportError that names what to install."""
    for extra in extras:
        for module in _NEEDS[extra]:
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"{module} is missing: pip install 'outrider[{','.join(extras)}]'")


def _stop_signal() -> asyncio.Future[int]:
    """Done with its number at the first SIGINT, SIGTERM or SIGHUP, which no longer end this process."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def note(signum: int) -> None:
        if not stop.done():
            stop.set_result(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, note, signum)
    return stop


async def _unless(stop: asyncio.Future[int], work: Coroutine[Any, Any, _T]) -> _T | None:
    """The result of `work`, or None where `stop` came first: models take long to load, and Ctrl-C must not wait."""
    task = asyncio.create_task(work)
    waiting: list[asyncio.Future[Any]] = [stop, task]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None


async def _up(options: argparse.Namespace) -> int:
    file = config_file(options.config)
    pair = _pair(options, elsewhere=_is_set("verifier", "model", file))
    if (options.tls_cert is None) != (options.tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together: give both or neither", field="tls_cert")
    _check_extras("coordinator", "verifier")
    stop = _stop_signal()
    async with Cluster(start_timeout_s=options.start_timeout_s) as cluster:
        if await _unless(stop, _start(cluster, options, pair)) is None:
            return 0
        print(
            f"ready: coordinator at {cluster.address}, {len(cluster.verifiers)} verifier(s); Ctrl-C stops", flush=True
        )
        failed = await _failing(stop, cluster)
    for child in failed:
        print(f"outrider: {child.name} ended by itself; see its messages above", file=sys.stderr)
    return EXIT_FAILED if failed else 0


async def _failing(stop: asyncio.Future[int], cluster: Cluster) -> list[Child]:
    """Wait for the end, and return the child that has failed. None has where `stop` comes first, and where the last
    verifier ends with 0, as one does that an operator has told to drain."""
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


async def _start(cluster: Cluster, options: argparse.Namespace, pair: Sequence[str]) -> bool:
    """True once all of them are ready."""
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
    await cluster.start_coordinator(*listen, *redis, *state, *drafts, *shared)
    for _ in range(options.verifiers):
        await cluster.start_verifier(*pair, *name, *shared, *trust, *options.passed_on)
    return True


def _served_drafts(state_dir: str | None, file: Path | None = None) -> list[str]:
    """The coordinator's flags: a folder beside its key, at a free port of this machine, unless its settings say."""
    told = Layers(CoordinatorConfig, {"state_dir": state_dir} if state_dir else {}, file)
    if told.raw("artifacts") or told.raw("http"):
        return []
    return ["--artifacts", str(Path(told.raw("state_dir")) / "artifacts"), "--http", "127.0.0.1:0"]


def _is_set(process: str, name: str, file: Path | None) -> bool:
    """Whether the environment or the file gives a process this setting. Raises BadRequest for the file."""
    table = read(file).get(process) if file is not None else None
    return bool(os.environ.get(f"OUTRIDER_{process}_{name}".upper()) or (isinstance(table, dict) and table.get(name)))


async def _demo(options: argparse.Namespace) -> int:
    pair = _pair(options)
    _check_extras("coordinator", "verifier", "edge")
    stop = _stop_signal()
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as scratch:
        stand_apart(Path(scratch), prefix_cache=False)
        async with Cluster(logs=Path(scratch)) as cluster:
            code = await _unless(stop, _show(cluster, options, pair, scratch))
            return 128 + stop.result() if code is None else code


async def _show(cluster: Cluster, options: argparse.Namespace, pair: Sequence[str], scratch: str) -> int:
    """The demonstration's exit code. Its device does not outlive this call, nor this process."""
    print("starting a coordinator (embedded Redis) and a verifier ...", flush=True)
    await cluster.start_coordinator("--listen", "127.0.0.1:0", "--state-dir", scratch)
    verifier = await cluster.start_verifier(*pair)
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


def _chat(options: argparse.Namespace) -> int:
    where = ["--verifier", options.verifier] if options.verifier else []
    where += ["--coordinator", options.coordinator] if options.coordinator else []
    if not where and not any(
        _is_set("edge", name, config_file(options.config)) for name in ("coordinator", "verifier")
    ):
        where = ["--coordinator", DEFAULT_COORDINATOR]
    file = ["--config", str(options.config)] if options.config else []
    os.execv(sys.executable, [sys.executable, "-m", "edge_agent.cli", "chat", *where, *file, *options.passed_on])
