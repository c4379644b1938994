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

from coordinator.admin import DEFAULT_COORDINATOR
from coordinator.cli.values import count, milliseconds
from coordinator.cluster import START_TIMEOUT_S, Child, Cluster, stand_apart
from coordinator.config import DEFAULT_STATE
from coordinator.embedded import tied_to_this_process
from outrider.core.errors import BadRequest

EXIT_FAILED = 1

_T = TypeVar("_T")


def add_parsers(commands: Any) -> None:
    up = commands.add_parser(
        "up",
        help="start a coordinator and verifiers here, until Ctrl-C",
        epilog="What follows `--` goes to every verifier: outrider up -- --threads 4 --kv-slots 65536",
    )
    _pair_options(up)
    up.add_argument("--name", help="of the target in the cluster (default: the directory's name)")
    up.add_argument("--listen", default=DEFAULT_COORDINATOR, help=f"of the coordinator ({DEFAULT_COORDINATOR})")
    up.add_argument("--verifiers", type=count, default=1, help="how many (1)")
    up.add_argument("--redis", help="URL of a Redis server, or `embedded`, the default ($OUTRIDER_COORDINATOR_REDIS)")
    up.add_argument("--state-dir", help="where the coordinator keeps its ticket key")
    up.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate chain, of coordinator and verifiers")
    up.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    up.add_argument("--ca", type=Path, metavar="PEM", help="its authority (default: the certificate is its own)")
    up.add_argument("--insecure", action="store_true", help="accept plain text and strangers beyond loopback")
    up.add_argument(
        "--start-timeout-s",
        type=float,
        default=START_TIMEOUT_S,
        metavar="S",
        help=f"how long each process may take to be ready: large models load slowly ({START_TIMEOUT_S:.0f})",
    )
    up.set_defaults(run=lambda options: asyncio.run(_up(options)))

    demo = commands.add_parser("demo", help="text from a device and its verifier, compared with cloud streaming")
    _pair_options(demo)
    demo.add_argument("--quick", action="store_true", help="two prompts, no pauses")
    demo.add_argument("--rtt-ms", type=milliseconds, default=30.0, help="of the second, emulated link (30)")
    demo.set_defaults(run=lambda options: asyncio.run(_demo(options)))

    chat = commands.add_parser(
        "chat",
        help="chat through a running cluster; takes all options of `outrider-edge chat`",
        epilog="All other options are passed on to `outrider-edge chat`; see `outrider-edge chat --help`.",
        allow_abbrev=False,
    )
    chat.add_argument("--coordinator", help=f"host:port ($OUTRIDER_EDGE_COORDINATOR, else {DEFAULT_COORDINATOR})")
    chat.add_argument("--verifier", help="host:port of one verifier, instead of a coordinator")
    chat.set_defaults(run=_chat)


def _pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="directory of the target (default: the shipped demo target)")
    parser.add_argument("--draft", type=Path, help="GGUF draft (default: the shipped one, with the shipped target)")


def shipped_pair() -> tuple[Path, Path]:
    """The demo pair in models/ of this checkout or of $OUTRIDER_MODELS. Raises BadRequest where there is none."""
    folder = Path(os.environ.get("OUTRIDER_MODELS") or Path(__file__).resolve().parents[2] / "models")
    target, draft = folder / "target", folder / "draft.gguf"
    if not (target / "config.json").is_file() or not draft.is_file():
        raise BadRequest(
            f"no demo pair in {folder} (an installed package brings none): run it from a clone of the repository, give"
            " --model DIR and --draft FILE, or set OUTRIDER_MODELS to a folder with target/ and draft.gguf",
            field="model",
        )
    return target, draft


def _pair(options: argparse.Namespace) -> list[str]:
    """The verifier's flags for target and draft."""
    if options.model is None:
        target, draft = shipped_pair()
        return ["--model", str(target), "--draft", str(options.draft or draft)]
    return ["--model", str(options.model), *(["--draft", str(options.draft)] if options.draft else [])]


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
    pair = _pair(options)
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
    shared = ["--insecure"] if options.insecure else []
    trust = []
    if options.tls_cert:
        shared += ["--tls-cert", str(options.tls_cert), "--tls-key", str(options.tls_key)]
        trust = ["--coordinator-ca", str(options.ca or options.tls_cert)]
    state = ["--state-dir", options.state_dir] if options.state_dir else []
    name = ["--name", options.name] if options.name else []
    redis = ["--redis", options.redis] if options.redis else []
    drafts = _served_drafts(options.state_dir)
    await cluster.start_coordinator("--listen", options.listen, *redis, *state, *drafts, *shared)
    for _ in range(options.verifiers):
        await cluster.start_verifier(*pair, *name, *shared, *trust, *options.passed_on)
    return True


def _served_drafts(state_dir: str | None) -> list[str]:
    """The coordinator's flags: a folder beside its key, at a free port of this machine, unless the environment says."""
    if any(os.environ.get(f"OUTRIDER_COORDINATOR_{name}") for name in ("ARTIFACTS", "HTTP")):
        return []
    state = Path(state_dir or os.environ.get("OUTRIDER_COORDINATOR_STATE_DIR") or DEFAULT_STATE)
    return ["--artifacts", str(state / "artifacts"), "--http", "127.0.0.1:0"]


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
    if not where and not any(os.environ.get(name) for name in ("OUTRIDER_EDGE_COORDINATOR", "OUTRIDER_EDGE_VERIFIER")):
        where = ["--coordinator", DEFAULT_COORDINATOR]
    os.execv(sys.executable, [sys.executable, "-m", "edge_agent.cli", "chat", *where, *options.passed_on])
